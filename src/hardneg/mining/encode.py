"""Texts to embeddings, each text once: any sentence-transformers model or Python function, kept on disk by content.

The cache is a folder of pieces of some thousand texts, named by the key of the encoder and of the texts in them
(cache_key.py). A killed run finds the pieces it had; changed texts or another encoder make other names. A piece that is
damaged is encoded again.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError, Damaged, optional
from hardneg.io.arrays import Array, read_npy
from hardneg.io.files import run_again, write_atomically
from hardneg.io.sealed import is_whole, sealing
from hardneg.mining.cache_key import key_of_function, key_of_model, keys_of_items
from hardneg.mining.ranks import Ranks

Encode = Callable[[list[str]], Any]
_piece = 4096
_in_memory = 1 << 30


@dataclass(frozen=True)
class Encoder:
    """A function from texts to vectors and a key that changes when the function does."""

    key: str
    encode: Encode


def load_callable(text: str) -> Callable[..., Any]:
    """The function that ``module:function`` names; the current folder counts. Only for what a person has named: the
    module is run."""
    module, _, name = text.partition(":")
    if not module or not name:
        raise ArgumentError("mine", "a function as 'module:function'", repr(text))
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ArgumentError("mine", "a function that exists", f"{text!r}: {error}") from None
    if not callable(found):
        raise ArgumentError("mine", "a function", f"{text!r}, which is not one")
    return found  # type: ignore[no-any-return]


def encoder_of_function(text: str) -> Encoder:
    function = load_callable(text)
    return Encoder(key_of_function(text, function), function)


def encoders_of_model(
    path: str,
    batch_size: int,
    device: str | None,
    *,
    revision: str | None = None,
    dtype: str | None = None,
    prompts: tuple[str | None, str | None] = (None, None),
) -> tuple[Encoder, Encoder]:
    """How a sentence-transformers model encodes queries and documents, with its own prompts for each or those given."""
    SentenceTransformer = optional("sentence_transformers", "--model", extra="text").SentenceTransformer  # noqa: N806
    model = SentenceTransformer(path, device=device, revision=revision)
    if dtype is not None:
        model = model.to(getattr(torch, dtype))
    key = key_of_model(path, model) + (f" {dtype}" if dtype else "")

    def encoder(side: str, prompt: str | None) -> Encoder:
        encode = getattr(model, f"encode_{side}", model.encode)
        more = {} if prompt is None else {"prompt": prompt}
        options = {"batch_size": batch_size, "show_progress_bar": False, "convert_to_numpy": True, **more}
        return Encoder(f"{key} {side}" + (f" {prompt!r}" if more else ""), lambda texts: encode(texts, **options))

    return encoder("query", prompts[0]), encoder("document", prompts[1])


def embed(
    texts: Sequence[str],
    encoder: Encoder,
    cache: Path,
    ranks: Ranks,
    progress: Callable[[int], None] | None = None,
) -> Tensor:
    """Embeddings of the texts from the cache, encoding what is not there; several ranks share the work."""
    cache.mkdir(parents=True, exist_ok=True)
    pieces = _pieces(texts, encoder.key)
    for number, (name, piece) in enumerate(pieces):
        path = cache / f"{name}.npy"
        if number % ranks.size == ranks.rank and not _is_whole(path, "its vectors are encoded again"):
            vectors = _encoded(encoder, piece)
            write_atomically(path, sealing(lambda file, vectors=vectors: np.save(file, vectors)), run_again)  # type: ignore[misc]
        if progress is not None:
            progress(len(piece))
    ranks.wait()
    parts = _read(pieces, cache)
    if sum(part.nbytes for part in parts) < _in_memory:
        return torch.from_numpy(parts[0] if len(parts) == 1 else np.concatenate(parts))
    names = repr([name for name, _ in pieces])
    whole = cache / f"whole-{hashlib.sha256(names.encode()).hexdigest()[:32]}.npy"
    if ranks.first and not _is_whole(whole, "its vectors are made again"):
        write_atomically(whole, sealing(lambda file: _join(parts, file)), run_again)
    ranks.wait()
    return torch.from_numpy(read_npy("mine", whole, mapped=True))


def cached(texts: Sequence[str], key: str, cache: Path) -> Tensor | None:
    """Embeddings that an encoder of this key has left in the cache; None unless all are there and undamaged."""
    pieces = _pieces(texts, key)
    if not all(_is_whole(cache / f"{name}.npy", "its vectors are left aside") for name, _ in pieces):
        return None
    return torch.from_numpy(np.concatenate(_read(pieces, cache)))


def _pieces(texts: Sequence[str], key: str) -> list[tuple[str, list[str]]]:
    """The texts of each piece under its name."""
    pieces = [list(texts[low : low + _piece]) for low in range(0, len(texts), _piece)]
    return [(_name(key, piece), piece) for piece in pieces]


def _name(key: str, texts: list[str]) -> str:
    content = json.dumps([key, keys_of_items(texts)], ensure_ascii=False).encode("utf-8", "surrogatepass")
    return hashlib.sha256(content).hexdigest()[:32]


def _is_whole(path: Path, then: str) -> bool:
    return is_whole(path, "mine", then, lambda file: read_npy("mine", file, mapped=True))


def _read(pieces: list[tuple[str, list[str]]], cache: Path) -> list[Array]:
    parts = [read_npy("mine", cache / f"{name}.npy", mapped=True) for name, _ in pieces]
    if len({part.shape[1:] for part in parts}) > 1 or parts[0].ndim != 2:
        raise ArgumentError("mine", "embeddings of one dimension", str(sorted({part.shape[1:] for part in parts})))
    wrong = [name for part, (name, piece) in zip(parts, pieces, strict=True) if len(part) != len(piece)]
    if wrong:
        path = cache / f"{wrong[0]}.npy"
        raise Damaged("mine", "one vector for each text", path, fix="delete it and run the same command again")
    return parts


def _join(parts: list[Array], file: BinaryIO) -> None:
    """One file from its pieces, for vectors that may not fit into memory."""
    shape = (sum(len(part) for part in parts), parts[0].shape[1])
    header = {"descr": np.lib.format.dtype_to_descr(np.dtype(np.float32)), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_2_0(file, header)
    for part in parts:
        file.write(np.ascontiguousarray(part, dtype=np.float32).data)


def _encoded(encoder: Encoder, texts: list[str]) -> Any:
    vectors = encoder.encode(texts)
    if isinstance(vectors, Tensor):
        vectors = vectors.detach().float().cpu().numpy()
    vectors = np.asarray(vectors)
    if vectors.ndim != 2 or len(vectors) != len(texts) or vectors.dtype.kind != "f":
        got = f"shape {vectors.shape} of {vectors.dtype}"
        raise ArgumentError("The encoder", f"to give floats [{len(texts)}, d] for {len(texts)} texts", got)
    return vectors.astype(np.float32, copy=False)
