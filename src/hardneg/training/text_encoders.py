"""Encoders of texts: a small one that needs no download and no extra, and models of Transformers or ST on disk.

    text_encoder("auto", dim=256)         hashed subwords, their weighted mean and one hidden layer
    text_encoder("gru", dim=256)          hashed words read by a GRU, as in quick-thoughts
    text_encoder("hf:PATH")               a Transformers model, averaged over its tokens, or its first token (CLS)
    text_encoder("st:PATH")               a sentence-transformers model with a transformer or StaticEmbedding inside

The dropout of the small encoders is a function of the key of each view (data/tokens.py), so that ranks, chunks and
resumed runs draw the same masks; pretrained models use torch's dropout.

Read ``text_encoder`` first. Callers are the data kinds of texts (data/texts.py, data/image_texts.py) and export.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag, gelu
from torch.nn.utils.rnn import pack_padded_sequence

from hardneg.core.errors import ArgumentError, NoFile, UnknownName, optional
from hardneg.core.keyed import uniforms
from hardneg.io.functions import loading_model
from hardneg.training.data.tokens import NUM_BUCKETS, Ragged, Tokens, tokenizer_for
from hardneg.training.encoders import Encoder, Features, Represent, seeded

KINDS = ("auto", "hashed", "gru", "hf:PATH", "st:PATH")
MANY = 4096
"""Texts that are tokenised at once, to limit memory."""


class TokenEncoder(Encoder):
    """An encoder of ``Tokens`` that can also encode strings directly.

    Example:
        >>> text_encoder(dim=8, seed=0).encode(["a cat", "a dog"]).shape
        torch.Size([2, 8])
    """

    def encode(self, texts: Sequence[str]) -> Features:
        """Return the features [n, d] of a list of texts, without gradients, on the device of the weights."""
        return encoded_texts(self, str(self.name), texts)


def encoded_texts(
    encoder: nn.Module, name: str, texts: Sequence[str], as_inputs: Callable[[Tokens], Any] = lambda tokens: tokens
) -> Features:
    """Tokenise texts for the named encoder and return their features.

    Args:
        encoder: Module of ``Tokens`` or of what ``as_inputs`` makes of them.
        name: Name of the text encoder, which determines the tokenizer.
        texts: One or more strings.
        as_inputs: Turns ``Tokens`` into the encoder's inputs, such as one side of ``Sided``.

    Returns:
        Features [n, d], without gradients.

    Raises:
        ArgumentError: If ``texts`` is empty or a single string.
    """
    if isinstance(texts, str) or not texts:
        raise ArgumentError("encode", "a list of one or more texts", repr(texts)[:60])
    tokenizer, represent = tokenizer_for(name), Represent(encoder)
    parts = [Ragged.of(texts[i : i + MANY], tokenizer) for i in range(0, len(texts), MANY)]
    return torch.cat([represent(as_inputs(part.batch(torch.arange(len(part.ends))))) for part in parts])


def check_text_encoder(name: str) -> None:
    """Raise unless ``text_encoder`` accepts the name; loads nothing."""
    kind, _, path = name.partition(":")
    if name not in KINDS[:3] and not (kind in ("hf", "st") and path):
        raise UnknownName(name, KINDS)
    if kind in ("hf", "st"):
        optional("transformers", name, extra="text")


def text_encoder(
    name: str = "auto", dim: int = 256, *, head: str = "none", seed: int | None = None, pooling: str = "mean"
) -> TokenEncoder:
    """Build an encoder of ``Tokens`` by name.

    Args:
        name: "auto" or "hashed" for the mean of hashed subwords, "gru" for a GRU; "hf:PATH" or "st:PATH" for a model on
            disk.
        dim: Width of the small encoders; for pretrained models, width of a linear head.
        head: "none", "linear", or "mlp" (a layer as wide as the features and tanh, as in SimCSE).
        seed: Seed of the fresh weights; None draws them from torch's generator.
        pooling: Features of "hf:PATH": "mean" over the tokens, or "cls", the first token.

    Returns:
        The encoder; its ``features`` come from before the head.

    Raises:
        UnknownName: If the name is none of the forms above.
        ArgumentError: If the model in PATH cannot be loaded.
    """
    check_text_encoder(name)
    with seeded(seed):
        kind, _, path = name.partition(":")
        backbone: Any
        if kind in ("hf", "st"):
            backbone = Pretrained(kind, path, pooling)
        else:
            backbone = HashedGRU(dim) if kind == "gru" else HashedSubwords(dim)
        width = backbone.feature_dim
        return TokenEncoder(backbone, width, _head(head, width, dim), "hashed" if kind == "auto" else name)


def _head(name: str, width: int, dim: int) -> nn.Module:
    if name == "mlp":
        return nn.Sequential(nn.Linear(width, width), nn.Tanh())
    return nn.Linear(width, dim) if name == "linear" else nn.Identity()


class HashedSubwords(nn.Module):
    """The mean of hashed subword embeddings, weighted by a learnt importance, followed by one residual hidden layer.

    Where a batch has keys, a share ``dropout`` of the tokens and features is dropped as a function of the key, in
    training and in evaluation: the dropout distinguishes two views of a text (SimCSE).

    Args:
        width: Width of the embeddings and features.
        dropout: Probability of dropping a token or a feature.
    """

    def __init__(self, width: int = 256, dropout: float = 0.1) -> None:
        super().__init__()
        self.feature_dim, self.dropout = width, dropout
        self.table = nn.Parameter(torch.randn(NUM_BUCKETS, width) * width**-0.5)
        self.log_weight = nn.Parameter(torch.zeros(NUM_BUCKETS))
        self.norm, self.hidden = nn.LayerNorm(width), nn.Linear(width, width)
        nn.init.zeros_(self.hidden.weight)  # begins as the plain mean

    def forward(self, tokens: Tokens) -> Features:
        """Return the features [b, width] of a batch of tokens."""
        weights = torch.where(tokens.mask, self.log_weight[tokens.rows].exp(), 0.0)  # [b, l]
        kept = factors_of_dropout(tokens, self.feature_dim, weights.shape[1], self.dropout)
        if kept is not None:
            weights = weights * kept[:, : weights.shape[1]]
        pooled = embedding_bag(tokens.rows, self.table.to(weights.dtype), per_sample_weights=weights, mode="sum")
        pooled = pooled / weights.sum(1, keepdim=True).clamp(min=1e-6)
        features: Tensor = pooled + gelu(self.hidden(self.norm(pooled)))
        return features if kept is None else features * kept[:, -self.feature_dim :]


class HashedGRU(nn.Module):
    """The last state of a GRU over hashed words: the encoder of quick-thoughts (Logeswaran and Lee 2018).

    Where a batch has keys, a share of the features is dropped as a function of the key, as in ``HashedSubwords``.

    Args:
        width: Width of the word embeddings and of the state.
        dropout: Probability of dropping a feature.
    """

    def __init__(self, width: int = 256, dropout: float = 0.1) -> None:
        super().__init__()
        self.feature_dim, self.dropout = width, dropout
        self.table = nn.Embedding(NUM_BUCKETS, width)
        self.cell = nn.GRU(width, width, batch_first=True)

    def forward(self, tokens: Tokens) -> Features:
        """Return the features [b, width] of a batch of tokens."""
        words = pack_padded_sequence(self.table(tokens.rows), tokens.lengths.cpu(), True, enforce_sorted=False)
        features: Tensor = self.cell(words)[1][0]
        kept = factors_of_dropout(tokens, self.feature_dim, 0, self.dropout)
        return features if kept is None else features * kept


def factors_of_dropout(
    tokens: Tokens, num_features: int, num_tokens: int, dropout: float
) -> Annotated[Tensor, "b n"] | None:
    """Return the factors of dropout, 1 / (1 - dropout) or 0, of each token and then of each feature.

    Args:
        tokens: A batch; a row with key 0 keeps everything.
        num_features: Number of features.
        num_tokens: Number of tokens, 0 to drop features only.
        dropout: Probability of dropping one.

    Returns:
        Factors [b, num_tokens + num_features], or None for a batch without keys.
    """
    if tokens.keys is None:
        return None
    keys = tokens.keys
    number = num_tokens + num_features
    drawn = uniforms(number, keys, torch.zeros_like(keys), 0, 0).T  # per slot: independent of the longest text
    features, words = drawn[:, :num_features], drawn[:, num_features:]
    dropped = torch.cat([words, features], dim=1) < dropout
    return torch.where((keys == 0)[:, None], 1.0, torch.where(dropped, 0.0, 1.0 / (1.0 - dropout)))


class Pretrained(nn.Module):
    """A transformer from disk: pooled over its tokens (hf), or a sentence-transformers model's own embedding (st).

    Args:
        kind: "hf" or "st".
        path: Folder or hub name of the model.
        pooling: Of "hf": "mean" over the tokens, or "cls", the first token.

    Raises:
        ArgumentError: If the model cannot be loaded; the message includes the library's reason.
    """

    def __init__(self, kind: str, path: str, pooling: str = "mean") -> None:
        super().__init__()
        self.pooling = pooling
        try:
            with loading_model("train", path):
                self._load(kind, path)
        except (ImportError, NoFile):
            raise
        except Exception as error:  # the hub, its cache and damaged files raise many types
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ArgumentError("train", "an encoder of texts", f"{kind}:{path} ({reason})") from error

    def _load(self, kind: str, path: str) -> None:
        if kind == "st":
            library = optional("sentence_transformers", f"st:{path}", extra="text")
            self.model: Any = library.SentenceTransformer(path, device="cpu")
            width = getattr(self.model, "get_embedding_dimension", None)  # version 6; older ones use the other name
            self.feature_dim = int((width or self.model.get_sentence_embedding_dimension)())
        else:
            self.model = optional("transformers", f"hf:{path}", extra="text").AutoModel.from_pretrained(path)
            self.feature_dim = int(self.model.config.hidden_size)
        self.static = kind == "st" and isinstance(getattr(self.model[0], "embedding", None), nn.EmbeddingBag)
        self.model.float()  # files may be in half precision, in which small optimiser steps are lost
        self.kind = kind

    def forward(self, tokens: Tokens) -> Features:
        """Return the features [b, feature_dim] of a batch of tokens."""
        mask = tokens.mask.long()
        features = {"input_ids": tokens.rows, "attention_mask": mask}
        if self.static:
            features = {"input_ids": tokens.rows[tokens.mask], "offsets": tokens.lengths.cumsum(0) - tokens.lengths}
        if self.kind == "st":
            found: Tensor = self.model(features)["sentence_embedding"]
            return found
        states: Tensor = self.model(**features).last_hidden_state
        if self.pooling == "cls":
            return states[:, 0]
        return (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
