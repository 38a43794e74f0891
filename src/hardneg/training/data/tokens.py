"""Texts as an encoder receives them: padded rows of token numbers, with a key for the dropout of each view.

``Ragged`` holds the tokens of a whole data set without padding; ``Ragged.batch`` makes ``Tokens``, the input of
encoders. ``tokenizer_for`` returns the tokenizer that belongs to an encoder's name.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from hardneg.core.errors import ArgumentError, MissingExtra, optional
from hardneg.core.keyed import splitmix

MOST_TOKENS = 256
"""Tokens of a text at most; the rest is cut off."""
NUM_BUCKETS = 2**14
"""Buckets of hashed subwords; bucket 0 is never used."""

Tokenizer = Callable[[Sequence[str]], list[list[int]]]


@dataclass(frozen=True, eq=False)
class Tokens:
    """A batch of texts.

    Attributes:
        rows: Token numbers [b, l], padded with 0.
        lengths: Number of tokens of each row, int64 [b].
        keys: Key of each row for dropout, int64 [b], or None; an encoder may drop parts of a row as a function of its
            key.
    """

    rows: Annotated[Tensor, "b l"]
    lengths: Annotated[Tensor, "b"]
    keys: Annotated[Tensor, "b"] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: slice) -> Tokens:
        return Tokens(self.rows[rows], self.lengths[rows], None if self.keys is None else self.keys[rows])

    def to(self, device: torch.device | str) -> Tokens:
        """Move the batch to a device."""
        keys = None if self.keys is None else self.keys.to(device)
        return Tokens(self.rows.to(device), self.lengths.to(device), keys)

    def joined(self, others: Sequence[Tokens]) -> Tokens:
        """Return one batch of this one followed by the others, padded to the longest row."""
        every = [self, *others]
        longest = max(one.rows.shape[1] for one in every)
        rows = torch.cat([pad(one.rows, (0, longest - one.rows.shape[1])) for one in every])
        keys = None
        if any(one.keys is not None for one in every):  # key 0 means no dropout
            keys = torch.cat([torch.zeros_like(one.lengths) if one.keys is None else one.keys for one in every])
        return Tokens(rows, torch.cat([one.lengths for one in every]), keys)

    @property
    def mask(self) -> Annotated[Tensor, "b l"]:
        """True for tokens, False for padding, [b, l]."""
        return torch.arange(self.rows.shape[1], device=self.rows.device) < self.lengths[:, None]


@dataclass(frozen=True, eq=False)
class Ragged:
    """The tokens of many texts, concatenated without padding.

    Attributes:
        flat: All tokens, int32 [m].
        ends: End of each text in ``flat``, int64 [n].

    Example:
        >>> Ragged.of(["a b", "c"], lambda texts: [[1, 2], [3]]).batch(torch.tensor([1, 0])).rows.tolist()
        [[3, 0], [1, 2]]
    """

    flat: Annotated[Tensor, "m"]
    ends: Annotated[Tensor, "n"]

    @classmethod
    def of(cls, texts: Sequence[str], tokenizer: Tokenizer) -> Ragged:
        """Tokenise texts, cutting each to ``MOST_TOKENS``; a text without tokens gets a single 0."""
        lists = [row[:MOST_TOKENS] or [0] for row in tokenizer(texts)]
        flat = torch.tensor([token for row in lists for token in row], dtype=torch.int32)
        return cls(flat, torch.tensor([len(row) for row in lists], dtype=torch.int64).cumsum(0))

    def to(self, device: torch.device | str) -> Ragged:
        """Move the tokens to a device."""
        return replace(self, flat=self.flat.to(device), ends=self.ends.to(device))

    def batch(self, index: Annotated[Tensor, "b"], keys: Tensor | None = None) -> Tokens:
        """Return the padded tokens of the texts at positions [b], with the given keys."""
        begin = torch.where(index > 0, self.ends[index - 1], 0)
        lengths = self.ends[index] - begin
        columns = torch.arange(int(lengths.max()) if len(index) else 0, device=index.device)
        there = columns < lengths[:, None]
        rows = torch.where(there, self.flat[(begin[:, None] + columns).clamp(max=len(self.flat) - 1)].long(), 0)
        return Tokens(rows, lengths, keys)


def view_keys(ids: Annotated[Tensor, "b"], view: int, epoch: int, seed: int) -> Annotated[Tensor, "b"]:
    """Return a pseudo-random number for each (seed, epoch, id, view), never 0, as int64 [b].

    Args:
        ids: Id of each row [b].
        view: 0 or 1.
        epoch: The epoch.
        seed: The seed.
    """
    mixed = torch.zeros_like(ids)
    for part in (seed, epoch, view, ids):
        mixed = splitmix(mixed ^ part)
    return torch.where(mixed == 0, 1, mixed)


def hashed_subwords(texts: Sequence[str]) -> list[list[int]]:
    """Tokenise into words and their pieces of three to five letters, hashed to buckets (Bojanowski et al. 2017).

    >>> len(hashed_subwords(["A cat"])[0])  # <a>; <cat>, and <ca, cat, at>, <cat, cat>
    7
    """
    words = (re.findall(r"\w+|[^\w\s]", text.lower()) for text in texts)
    return [[bucket for word in of_text for bucket in _buckets(word)] for of_text in words]


def hashed_words(texts: Sequence[str]) -> list[list[int]]:
    """Tokenise into words in their order, hashed to buckets.

    >>> [len(row) for row in hashed_words(["A cat, twice", ""])]
    [4, 0]
    """
    return [[_buckets(word)[0] for word in re.findall(r"\w+|[^\w\s]", text.lower())] for text in texts]


@lru_cache(maxsize=1_000_000)
def _buckets(word: str) -> tuple[int, ...]:
    marked = f"<{word}>"
    pieces = [marked[i : i + n] for n in (3, 4, 5) for i in range(len(marked) - n + 1) if n < len(marked)]
    hashes = (zlib.crc32(piece.encode("utf-8", "surrogatepass")) for piece in (marked, *pieces))
    return tuple(1 + number % (NUM_BUCKETS - 1) for number in hashes)


def tokenizer_for(encoder: str) -> Tokenizer:
    """Return the tokenizer of an encoder by name: hashed subwords or words, or that of ``hf:PATH`` and ``st:PATH``.

    Raises:
        ArgumentError: If the model in PATH has no usable tokenizer.
    """
    kind, _, path = encoder.partition(":")
    if kind == "gru":
        return hashed_words
    return hashed_subwords if kind in ("auto", "hashed") else _pretrained(kind, path)


@lru_cache(maxsize=4)
def _pretrained(kind: str, path: str) -> Tokenizer:
    tokenizer = optional("transformers", f"{kind}:{path}", extra="text").AutoTokenizer
    try:
        if kind == "st" and (static := _static_file(Path(path))) is not None:
            own = optional("tokenizers", f"{kind}:{path}", extra="text").Tokenizer.from_file(str(static))
            return lambda texts: [one.ids for one in own.encode_batch(list(texts), add_special_tokens=False)]
        found: Any = tokenizer.from_pretrained(path)
    except MissingExtra:
        raise
    except Exception as error:  # the hub, its cache and damaged files raise many types
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ArgumentError("train", "a model with a tokenizer", f"{kind}:{path} ({reason})") from error

    most = min(MOST_TOKENS, found.model_max_length)  # the model has no further positions

    def tokens(texts: Sequence[str]) -> list[list[int]]:
        rows: list[list[int]] = found(list(texts), truncation=True, max_length=most)["input_ids"]
        return rows

    return tokens


def _static_file(folder: Path) -> Path | None:
    """Return the tokenizer file of a model with StaticEmbedding, which adds no special tokens; None for others."""
    path = folder / "modules.json"
    modules = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    found = [folder / one["path"] for one in modules[:1] if one["type"].endswith("StaticEmbedding")]
    return found[0] / "tokenizer.json" if found else None
