"""A BERT of two small layers with a vocabulary of its own, made offline, and texts of its words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from support.libraries import part_of_sentence_transformers

WORDS = 64


def tiny_bert(folder: Path, seed: int = 0, dropout: float = 0.1, hidden: int = 16, precise: bool = False) -> Any:
    """A SentenceTransformer; ``folder`` keeps its files."""
    from sentence_transformers import SentenceTransformer
    from transformers import BertConfig, BertModel, BertTokenizer

    modules = part_of_sentence_transformers("modules")
    path = folder / f"bert-{seed}-{dropout}-{hidden}"
    if not path.is_dir():
        path.mkdir(parents=True)
        tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ":", *(f"w{i}" for i in range(WORDS))]
        (path / "vocab.txt").write_text("\n".join(tokens))
        BertTokenizer(str(path / "vocab.txt")).save_pretrained(path)
        torch.manual_seed(seed)
        config = BertConfig(
            vocab_size=len(tokens), hidden_size=hidden, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=2 * hidden, max_position_embeddings=32,
            hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
        )  # fmt: skip
        BertModel(config).save_pretrained(path)
    words = modules.Transformer(str(path), max_seq_length=16)
    model = SentenceTransformer(modules=[words, modules.Pooling(hidden)], device="cpu")
    return model.double() if precise else model


def texts(number: int, seed: int, length: int = 4) -> list[str]:
    random = torch.Generator().manual_seed(seed)
    return [" ".join(f"w{i}" for i in row) for row in torch.randint(WORDS, (number, length), generator=random).tolist()]


def rows(number: int, seed: int = 0, negatives: int = 1) -> dict[str, list[str]]:
    """Anchor, positive and negatives; the positive shares two words with its anchor."""
    anchors = texts(number, seed)
    data = {"anchor": anchors, "positive": [f"{text} w{i % WORDS}" for i, text in enumerate(anchors)]}
    return data | {f"negative_{i + 1}": texts(number, seed + 100 + i) for i in range(negatives)}
