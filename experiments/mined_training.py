"""Do mined negatives train better than random ones? scifact, a static model, sentence-transformers' trainer.

    pip install --no-deps wordllama
    python experiments/mined_training.py --data DIR       # DIR/scifact as its README.txt says

The static vectors of wordllama (256 of each of 32,000 tokens) are fine-tuned on scifact's training queries with
(anchor, positive, negative_1 ... negative_5) rows that `hardneg mine` wrote: five random documents, or the five most
similar at least 5% below the positive. Every arm chooses its learning rate on a fifth of the
training queries, with seed 0; then nDCG@10 of the 300 test queries over three seeds (order of the rows, and the draw of
the random documents), and a paired bootstrap over the test queries. 181 of the 283 documents that answer test queries
also answer training queries, so that all arms gain much; the question is which gains more.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mining_judged import ROOT, Judged, read_scifact
from rich.console import Console

from hardneg.integrations.sentence_transformers import NegativesLoss
from hardneg.io.provenance import environment
from hardneg.mining.job import run
from hardneg.mining.options import MineOptions
from hardneg.training.data.named import default_root

ARMS = {
    "in-batch only": None,
    "random": {"negatives": "Uniform()", "draw": "gumbel"},
    "mined": {"negatives": "BelowPositive(relative=0.05)", "draw": "top"},
}
GRID = [(rate, epochs) for rate in (1e-2, 3e-2, 1e-1, 3e-1) for epochs in (3,)]


def static_model() -> Any:
    from safetensors.torch import load_file
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from tokenizers import Tokenizer

    spec = importlib.util.find_spec("wordllama")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    tokenizer = Tokenizer.from_file(str(folder / "tokenizers" / "l2_supercat_tokenizer_config.json"))
    tokenizer.no_padding()
    table = load_file(str(folder / "weights" / "l2_supercat_256.safetensors"))["embedding.weight"].float().numpy()
    return SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_weights=table)], device="cpu")


_frozen: list[Any] = []


def encode(texts: list[str]) -> Any:
    """The encoder of the miner: the model before training."""
    if not _frozen:
        _frozen.append(static_model())
    return _frozen[0].encode(texts, show_progress_bar=False)


def rows_of(judged: Judged, which: list[int], arm: str, seed: int) -> Any:
    """Training rows as `hardneg mine` writes and ``datasets`` reads them."""
    from datasets import Dataset

    pairs = [
        {"anchor": judged.queries[i], "positive": judged.documents[row]} for i in which for row in judged.relevant[i]
    ]
    options = ARMS[arm]
    if options is None:
        return Dataset.from_list(pairs)
    with tempfile.TemporaryDirectory() as folder:
        for name, table in (("pairs", pairs), ("corpus", [{"text": text} for text in judged.documents])):
            lines = "".join(json.dumps(row) + "\n" for row in table)
            (Path(folder) / f"{name}.jsonl").write_text(lines, encoding="utf-8")
        out = str(Path(folder) / "mined.parquet")
        run(
            MineOptions(
                queries=f"{folder}/pairs.jsonl",
                corpus=f"{folder}/corpus.jsonl",
                out=out,
                encoder="mined_training:encode",
                format="n-tuple",
                k=5,
                seed=seed,
                cache=str(ROOT / "runs" / "static_embeddings"),
                **options,
            )
        )
        return Dataset.from_parquet(out, cache_dir=folder, keep_in_memory=True)


def train(rows: Any, rate: float, epochs: int, seed: int) -> Any:
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments

    torch.manual_seed(seed)
    model = static_model()
    with tempfile.TemporaryDirectory() as folder:
        arguments = SentenceTransformerTrainingArguments(
            output_dir=folder,
            num_train_epochs=epochs,
            per_device_train_batch_size=64,
            learning_rate=rate,
            warmup_steps=5,
            seed=seed,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            batch_sampler="no_duplicates",
        )
        loss = NegativesLoss(model, "Uniform()", temperature=0.05)
        SentenceTransformerTrainer(model=model, args=arguments, train_dataset=rows, loss=loss).train()
    return model


def ndcg(model: Any, judged: Judged, which: list[int]) -> Any:
    """nDCG@10 of each query, binary relevance."""
    documents = model.encode(judged.documents, show_progress_bar=False, normalize_embeddings=True)
    queries = model.encode([judged.queries[i] for i in which], show_progress_bar=False, normalize_embeddings=True)
    best = torch.from_numpy(queries @ documents.T).topk(10, dim=1).indices.numpy()
    discount = 1 / np.log2(np.arange(2, 12))
    out = []
    for row, i in zip(best, which, strict=True):
        gain = np.isin(row, judged.relevant[i]) @ discount
        out.append(gain / discount[: len(judged.relevant[i])].sum())
    return np.array(out)


def bootstrap(first: Any, second: Any, rounds: int = 10_000) -> dict[str, float]:
    """The difference of two means over the same queries, with its 95% interval."""
    difference = first - second
    random = np.random.default_rng(0)
    means = np.array([difference[random.integers(0, len(difference), len(difference))].mean() for _ in range(rounds)])
    low, high = np.quantile(means, [0.025, 0.975])
    return {"difference": float(difference.mean()), "low": float(low), "high": float(high)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    data = default_root()
    parser.add_argument("--data", type=Path, default=data)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "mined_training.json")
    options = parser.parse_args()
    console = Console()
    training, test = (read_scifact(options.data / "scifact", split) for split in ("train", "test"))
    order = np.random.default_rng(0).permutation(len(training.queries)).tolist()
    held_out, kept = order[: len(order) // 5], order[len(order) // 5 :]
    everyone = list(range(len(test.queries)))
    untrained = ndcg(static_model(), test, everyone)
    found: dict[str, Any] = {"untrained": float(untrained.mean()), "arms": {}}
    console.print(f"untrained: {untrained.mean():.4f}")
    per_query = {}
    for arm in ARMS:
        rows = rows_of(training, kept, arm, 0)
        tried = {
            (rate, epochs): float(ndcg(train(rows, rate, epochs, 0), training, held_out).mean())
            for rate, epochs in GRID
        }
        rate, epochs = max(tried, key=lambda pair: tried[pair])
        scores = []
        for seed in range(options.seeds):
            model = train(rows_of(training, order, arm, seed), rate, epochs, seed)
            scores.append(ndcg(model, test, everyone))
        per_query[arm] = np.mean(scores, axis=0)
        found["arms"][arm] = {
            "learning_rate": rate,
            "epochs": epochs,
            "validation": {f"{r:g}, {e} epochs": value for (r, e), value in tried.items()},
            "test": [float(each.mean()) for each in scores],
        }
        console.print(arm, found["arms"][arm])
    found["against random"] = {arm: bootstrap(per_query[arm], per_query["random"]) for arm in ARMS if arm != "random"}
    console.print(found["against random"])
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found | environment(), indent=1) + "\n")


if __name__ == "__main__":
    main()
