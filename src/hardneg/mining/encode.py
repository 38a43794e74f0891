"""Texts to embeddings, each text once: any sentence-transformers model or Python function, kept on disk by content.

The cache is a folder of pieces of some thousand texts, named by the hash of the encoder and of the texts in them. A
killed run finds the pieces it had; changed texts or another encoder make other names.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hardneg.core.errors import optional
from hardneg.io.files import go_on, write_atomically
from hardneg.mining.ranks import Ranks

Encode = Callable[[list[str]], Any]
_piece = 4096
_in_memory = 1 << 30


@dataclass(frozen=True)
class Encoder:
    """A function from texts to vectors and a name that changes when the function does."""

    name: str
    encode: Encode


def load_callable(text: str) -> Callable[..., Any]:
    """The function that ``module:function`` names; the current folder counts."""
    module, _, name = text.partition(":")
    if not module or not name:
        raise ValueError(f"mine needs a function as 'module:function', got {text!r}.")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"mine needs a function that exists, got {text!r}: {error}.") from None
    if not callable(found):
        raise ValueError(f"mine needs a function, got {text!r}, which is not one.")
    return found  # type: ignore[no-any-return]


def encoder_of_function(text: str) -> Encoder:
    return Encoder(f"{text} {hash_of_function(text)}", load_callable(text))


def hash_of_function(text: str) -> str:
    """What changes when the source of ``module:function`` does: of the module that it names, and of the one where a
    function that is only imported there, or bound to arguments there, was written."""
    function = load_callable(text)
    while isinstance(function, functools.partial):
        function = function.func
    written = getattr(function, "__module__", None) or type(function).__module__
    source = hashlib.sha256()
    for module in (text.partition(":")[0], written):
        file = getattr(sys.modules.get(module), "__file__", None)
        source.update(Path(file).read_bytes() if file else b"")
    return source.hexdigest()


def encoders_of_model(path: str, batch_size: int, device: str | None) -> tuple[Encoder, Encoder]:
    """How a sentence-transformers model encodes queries and documents, with its own prompts for each."""
    SentenceTransformer = optional("sentence_transformers", "--model", extra="text").SentenceTransformer  # noqa: N806
    model = SentenceTransformer(path, device=device)
    name = f"{path} {_fingerprint(Path(path))}"

    def encoded(encode: Callable[..., Any]) -> Encode:
        return lambda texts: encode(texts, batch_size=batch_size, show_progress_bar=False, convert_to_numpy=True)

    of_query = getattr(model, "encode_query", model.encode)
    of_document = getattr(model, "encode_document", model.encode)
    return Encoder(f"{name} query", encoded(of_query)), Encoder(f"{name} document", encoded(of_document))


def embed(
    texts: Sequence[str],
    encoder: Encoder,
    cache: Path,
    ranks: Ranks,
    progress: Callable[[int], None] | None = None,
) -> Tensor:
    """Embeddings of the texts from the cache, encoding what is not there; several ranks share the work."""
    cache.mkdir(parents=True, exist_ok=True)
    pieces = [list(texts[low : low + _piece]) for low in range(0, len(texts), _piece)]
    names = [_name(encoder, piece) for piece in pieces]
    for number, (piece, name) in enumerate(zip(pieces, names, strict=True)):
        path = cache / f"{name}.npy"
        if number % ranks.size == ranks.rank and not path.exists():
            vectors = _encoded(encoder, piece)
            write_atomically(path, lambda file, vectors=vectors: np.save(file, vectors), go_on)  # type: ignore[misc]
        if progress is not None:
            progress(len(piece))
    ranks.wait()
    parts = [np.load(cache / f"{name}.npy", mmap_mode="c") for name in names]
    if len({part.shape[1] for part in parts}) > 1:
        raise ValueError(f"mine needs embeddings of one dimension, got {sorted({part.shape[1] for part in parts})}.")
    if sum(part.nbytes for part in parts) < _in_memory:
        return torch.from_numpy(parts[0] if len(parts) == 1 else np.concatenate(parts))
    whole = cache / f"whole-{hashlib.sha256(repr(names).encode()).hexdigest()[:32]}.npy"
    if ranks.first and not whole.exists():
        _join_on_disk(parts, whole)
    ranks.wait()
    return torch.from_numpy(np.load(whole, mmap_mode="c"))


def _join_on_disk(parts: list[Any], path: Path) -> None:
    """One file from its pieces, for vectors that may not fit into memory."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    shape = (sum(len(part) for part in parts), parts[0].shape[1])
    joined = np.lib.format.open_memmap(partial, mode="w+", dtype=np.float32, shape=shape)
    low = 0
    for part in parts:
        joined[low : low + len(part)] = part
        low += len(part)
    joined.flush()
    os.replace(partial, path)


def _encoded(encoder: Encoder, texts: list[str]) -> Any:
    vectors = encoder.encode(texts)
    if isinstance(vectors, Tensor):
        vectors = vectors.detach().float().cpu().numpy()
    vectors = np.asarray(vectors)
    if vectors.ndim != 2 or len(vectors) != len(texts) or vectors.dtype.kind != "f":
        raise ValueError(
            f"The encoder needs to give floats [{len(texts)}, d] for {len(texts)} texts, "
            f"got shape {vectors.shape} of {vectors.dtype}."
        )
    return vectors.astype(np.float32, copy=False)


def _name(encoder: Encoder, texts: list[str]) -> str:
    content = json.dumps([encoder.name, texts], ensure_ascii=False).encode("utf-8", "surrogatepass")
    return hashlib.sha256(content).hexdigest()[:32]


def _fingerprint(path: Path) -> str:
    """What changes when the files of a local model do; a model of a hub is its name."""
    if not path.exists():
        return "hub"
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    stats = [(str(file), os.stat(file).st_size, os.stat(file).st_mtime_ns) for file in files]
    return hashlib.sha256(repr(stats).encode()).hexdigest()
