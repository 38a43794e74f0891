"""Encode texts with any sentence-transformers model or Python function, each text once, cached by content.

The cache is a folder of pieces of at most half a minute's work, named by the key of the encoder and
of their texts (``cache_key.py``). A killed run finds its finished pieces; changed texts or another
encoder have other names. A damaged piece is encoded again.

``encoder_of_function`` and ``encoders_of_model`` make encoders, ``embed`` encodes and caches,
``cached`` only reads.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
import uuid
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from hardneg.core.errors import ArgumentError, Damaged, MiningWarning, optional, spelled, warn_once
from hardneg.io.arrays import Array, read_npy
from hardneg.io.files import check_free, read_json, run_again, write_atomically, write_json
from hardneg.io.functions import in_any_folder, load_function, loading_model
from hardneg.io.sealed import is_whole, sealing
from hardneg.mining.cache_key import key_of_function, key_of_model, keys_of_items
from hardneg.mining.engines import Engine, Work

EncodeTexts = Callable[[list[str]], Any]
TextPiece = tuple[Path, list[str]]
"""The file of a piece and its texts."""
_piece, _sample = 4096, 64  # texts of a piece at most, and of the first piece
_seconds = 15.0  # aim for a piece: even with texts twice as long as those of the first it takes less than 30
_in_memory = 1 << 30  # bytes of vectors that are held instead of memory-mapped
_single = re.compile(r"(run-[0-9a-f]{16})-[0-9a-f]{32}")
"""Keys of embeddings that belong to one run; the group is the folder of its vectors."""


@dataclass(frozen=True)
class KeyedEncoder:
    """A function from texts to vectors, with the key under which its vectors are cached.

    Attributes:
        key: Changes when the function does; None if that cannot be known, so its vectors are not reused.
        encode: The function.
        load: Recreates the encoder in another process.
    """

    key: str | None
    encode: EncodeTexts
    load: Callable[[], KeyedEncoder] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        assert self.load is not None
        return _loaded, (self.load,)


_of_this_process: dict[str, KeyedEncoder] = {}


def _loaded(load: Callable[[], KeyedEncoder]) -> KeyedEncoder:
    """Load an encoder once in each process."""
    name = repr(load)
    if name not in _of_this_process:
        _of_this_process[name] = load()
    return _of_this_process[name]


def encoder_of_function(text: str, cache_key: str | None = None) -> KeyedEncoder:
    """Return the encoder of a function given as ``module:function`` or ``file.py:function``.

    Args:
        text: Name of the function.
        cache_key: Version that the user declares, without which vectors are not reused.
    """
    function = load_function(text, "mine")
    load = partial(encoder_of_function, in_any_folder(text), cache_key)
    return KeyedEncoder(key_of_function(text, function, cache_key), function, load)


def key_of_run(out: str | Path, cache: Path, engine: Engine) -> str:
    """Return a key for one run of a job, whose vectors no later run reuses, and delete those of the last run.

    They are kept until then because an audit of the output reads them by the key in its manifest.

    Args:
        out: Path of the output.
        cache: Folder of the embedding cache.
        engine: Processes that must agree on the key.
    """
    place = f"run-{_digest(str(Path(out).resolve()))[:16]}"
    if engine.first:
        shutil.rmtree(cache / place, ignore_errors=True)
    return engine.agree(f"{place}-{uuid.uuid4().hex}")


def _folder_of(key: str, cache: Path) -> Path:
    """Return the folder of the vectors of a key: those of one run have their own folder."""
    found = _single.fullmatch(key)  # the full key, which may come from a manifest that a stranger wrote
    return cache.absolute() / found[1] if found else cache.absolute()


def warn_not_reused(what: str) -> None:
    """Warn that the results of a function are computed again in every run."""
    fix = f"give {spelled('mine', 'cache_key')} to reuse the results, and change it whenever they change"
    note = f"{what} is computed again in every run, because hardneg cannot know whether it has changed: {fix}."
    warnings.warn(MiningWarning(note, "not cached"), stacklevel=3)


def encoders_of_model(
    path: str,
    batch_size: int,
    device: str | None,
    *,
    revision: str | None = None,
    dtype: str | None = None,
    prompts: tuple[str | None, str | None] = (None, None),
    cache_key: str | None = None,
) -> tuple[KeyedEncoder, KeyedEncoder]:
    """Return a sentence-transformers model's encoders of queries and of documents.

    Args:
        path: Folder or name of the model.
        batch_size: Number of texts encoded at a time.
        device: Device of the model; None lets the library choose.
        revision: Branch, tag or commit on the hub.
        dtype: Data type of the parameters.
        prompts: Prompts, or names of the model's prompts, for queries and documents; None uses the
            model's own.
        cache_key: Version that the user declares, for a model with custom modules.
    """
    SentenceTransformer = optional("sentence_transformers", "--model", extra="text").SentenceTransformer  # noqa: N806
    with loading_model("--model", path):
        model = SentenceTransformer(path, device=device, revision=revision)
    if dtype is not None:
        model = model.to(getattr(torch, dtype))
    key = key_of_model(path, model, cache_key)
    how = {"revision": revision, "dtype": dtype, "prompts": prompts, "cache_key": cache_key}
    place = str(Path(path).absolute()) if Path(path).exists() else path

    def encoder(which: int, side: str) -> KeyedEncoder:
        encode, prompt = getattr(model, f"encode_{side}", model.encode), _prompt_of(model, prompts[which])
        more = {} if prompt is None else {"prompt": prompt}
        options = {"batch_size": batch_size, "show_progress_bar": False, "convert_to_numpy": True, **more}
        name = key and f"{key}{f' {dtype}' if dtype else ''} {side}" + (f" {prompt!r}" if more else "")
        again = partial(_encoder_of_model, which, place, batch_size, device, **how)
        return KeyedEncoder(name, lambda texts: encode(texts, **options), again)

    return encoder(0, "query"), encoder(1, "document")


def _prompt_of(model: Any, given: str | None) -> str | None:
    """Return the prompt of the model that has this name, or the text itself."""
    known = getattr(model, "prompts", None) or {}
    if given is not None and given not in known and known and given.isidentifier():
        names = ", ".join(known)
        text = f"The model has no prompt {given!r}, so this text itself is put before each text. Its prompts: {names}."
        warn_once(f"unknown prompt: {given}", text)
    return given if given is None else known.get(given, given)


def _encoder_of_model(which: int, *given: Any, **options: Any) -> KeyedEncoder:
    return encoders_of_model(*given, **options)[which]


def embed(
    texts: Sequence[str],
    encoder: KeyedEncoder,
    cache: Path,
    engine: Engine,
    progress: Callable[[int], None] = lambda done: None,
) -> Tensor:
    """Return the embeddings of the texts, encoding those that are not in the cache.

    Embeddings of an encoder without a key are kept in memory only.

    Args:
        texts: Texts [n].
        encoder: Function from texts to vectors.
        cache: Folder of the embedding cache.
        engine: Where missing pieces are encoded.
        progress: Called with the number of texts encoded since the last call.

    Returns:
        Embeddings [n, d], a memory map if they are too large to hold.
    """
    if encoder.key is None:
        progress(0)
        parts = [vectors_of(encoder.encode, list(texts[low : low + _piece])) for low in range(0, len(texts), _piece)]
        progress(len(texts))
        return torch.from_numpy(np.concatenate(parts))
    cache = _folder_of(encoder.key, cache)  # absolute, for processes that run elsewhere
    cache.mkdir(parents=True, exist_ok=True)
    pieces = _pieces(texts, encoder.key, cache, *_piece_sizes(texts, encoder, encoder.key, cache))
    _check_disk(pieces, encoder)
    work = partial(_encode_piece, encoder)
    name = lambda piece: f"the embeddings {piece[0].name}"  # noqa: E731
    engine.map(Work(work, pieces, _is_encoded, lambda piece: progress(len(piece[1])), name))
    whole = _whole(pieces)
    if whole is not None:
        join = partial(_join_pieces, [path for path, _ in pieces])
        is_joined = partial(_is_whole, then="its vectors are joined again")
        engine.map(Work(join, [whole], is_joined, lambda path: None))
    return _vectors(pieces)


def _check_disk(pieces: list[TextPiece], encoder: KeyedEncoder) -> None:
    """Raise before the rest is encoded if the disk is too small, judging by the size of the first piece."""
    missing = [len(texts) for path, texts in pieces[1:] if not path.exists()]
    if not missing:
        return
    if not _is_encoded(pieces[0]):
        _encode_piece(encoder, pieces[0])
    first = pieces[0][0]
    width = 4 * _mapped(first).shape[1]
    whole = width * sum(len(texts) for _, texts in pieces)
    needed = disk_bytes(whole) - whole + width * sum(missing)
    check_free("mine", first.parent, needed, "for its embeddings", "free disk space, or use another --cache")


def disk_bytes(vectors: int) -> int:
    """Return the bytes in the cache for vectors of this many bytes: the pieces and, if large, a joined file."""
    return vectors * (1 if fits_in_memory(vectors) else 2)


def fits_in_memory(vectors: int) -> bool:
    """Return whether vectors of this many bytes are held in memory instead of read from one joined file."""
    return vectors < _in_memory


def _piece_sizes(texts: Sequence[str], encoder: KeyedEncoder, key: str, cache: Path) -> tuple[int, int]:
    """Return the number of texts of the first piece and of the others, measured once and then stored.

    A rerun needs the same sizes, otherwise it would not find its pieces.
    """
    path = _size_file(texts, key, cache)
    if not path.exists():
        size = min(_sample, _piece)
        first = _pieces(texts, key, cache, size, size)[0]
        encoder.encode(first[1][:1])  # many encoders load weights in their first call
        begin = time.perf_counter()
        _encode_piece(encoder, first)
        most = int(_seconds * len(first[1]) / max(time.perf_counter() - begin, 1e-6))
        _write_once(path, {"first": size, "others": min(max(most, 1), _piece)})
    return _known_sizes(path)


def _write_once(path: Path, value: dict[str, int]) -> None:
    """Write a file unless another process did so first, whose content stays."""
    own = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    write_json(own, value, run_again)
    try:
        os.link(own, path)
    except FileExistsError:
        pass
    except OSError:  # a file system without hard links
        os.replace(own, path)
    own.unlink(missing_ok=True)


def _size_file(texts: Sequence[str], key: str, cache: Path) -> Path:
    """Return the file of the piece sizes of these texts: one encoder may read short queries and long documents."""
    return cache / f"piece-{_name(list(texts[:_sample]), key)}.json"


def _known_sizes(path: Path) -> tuple[int, int]:
    found = read_json(path, "delete it and run the same command again", who="mine")
    return int(found["first"]), int(found["others"])


def _encode_piece(encoder: KeyedEncoder, piece: TextPiece) -> None:
    vectors = vectors_of(encoder.encode, piece[1])
    write_atomically(piece[0], sealing(lambda file: np.save(file, vectors)), run_again)


def _is_encoded(piece: TextPiece) -> bool:
    return _is_whole(piece[0], "its vectors are encoded again")


def _join_pieces(paths: list[Path], whole: Path) -> None:
    """Write one file from the pieces, for vectors that may not fit into memory."""
    parts = [_mapped(path) for path in paths]
    shape = (sum(len(part) for part in parts), parts[0].shape[1])
    header = {"descr": np.lib.format.dtype_to_descr(np.dtype(np.float32)), "fortran_order": False, "shape": shape}

    def write(file: BinaryIO) -> None:
        np.lib.format.write_array_header_2_0(file, header)
        for part in parts:
            file.write(np.ascontiguousarray(part, dtype=np.float32).data)

    write_atomically(whole, sealing(write), run_again)


def _whole(pieces: list[TextPiece]) -> Path | None:
    """Return the file of all pieces joined, for vectors that may not fit into memory, else None."""
    if fits_in_memory(sum(part.nbytes for part in _read(pieces))):
        return None
    return pieces[0][0].with_name(f"whole-{_digest(repr([path.stem for path, _ in pieces]))}.npy")


def _vectors(pieces: list[TextPiece]) -> Tensor:
    whole = _whole(pieces)
    if whole is not None and whole.exists():
        return torch.from_numpy(_mapped(whole))
    parts = _read(pieces)
    return torch.from_numpy(parts[0] if len(parts) == 1 else np.concatenate(parts))


def cached(texts: Sequence[str], key: str, cache: Path) -> Tensor | None:
    """Return the embeddings that an encoder with this key left in the cache.

    Args:
        texts: Texts [n].
        key: Cache key of the encoder.
        cache: Folder of the embedding cache.

    Returns:
        Embeddings [n, d]; None unless all pieces are there and undamaged.
    """
    cache = _folder_of(key, cache)
    size = _size_file(texts, key, cache)
    if not size.exists():
        return None
    pieces = _pieces(texts, key, cache, *_known_sizes(size))
    return _vectors(pieces) if all(_is_whole(path, "its vectors are not used") for path, _ in pieces) else None


def _pieces(texts: Sequence[str], key: str, cache: Path, first: int, others: int) -> list[TextPiece]:
    """Return the file and the texts of each piece; the first piece is short, to measure the time."""
    rest = (list(texts[low : low + others]) for low in range(first, len(texts), others))
    return [(cache / f"{_name(each, key)}.npy", each) for each in (list(texts[:first]), *rest)]


def _name(texts: list[str], key: str) -> str:
    return _digest(json.dumps([key, keys_of_items(texts)], ensure_ascii=False))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _mapped(path: Path) -> Array:
    return read_npy("mine", path, mapped=True)


def _is_whole(path: Path, then: str) -> bool:
    return is_whole(path, "mine", then, _mapped)


def _read(pieces: list[TextPiece]) -> list[Array]:
    parts = [_mapped(path) for path, _ in pieces]
    if len({part.shape[1:] for part in parts}) > 1 or parts[0].ndim != 2:
        raise ArgumentError("mine", "embeddings of one dimension", str(sorted({part.shape[1:] for part in parts})))
    for part, (path, texts) in zip(parts, pieces, strict=True):
        if len(part) != len(texts):
            raise Damaged("mine", "one vector for each text", path, fix="delete it and run the same command again")
    return parts


def vectors_of(encode: EncodeTexts, texts: list[str]) -> Array:
    """Return the vectors of texts as float32, after checking the output of the encoder.

    Args:
        encode: Function from texts to vectors.
        texts: Texts [n].

    Raises:
        ArgumentError: If the result is not a float array [n, d].
    """
    vectors = encode(texts)
    if isinstance(vectors, Tensor):
        vectors = vectors.detach().float().cpu().numpy()
    vectors = np.asarray(vectors)
    if vectors.ndim != 2 or len(vectors) != len(texts) or vectors.dtype.kind != "f":
        got = f"shape {vectors.shape} of {vectors.dtype}"
        raise ArgumentError("The encoder", f"to return floats [{len(texts)}, d] for {len(texts)} texts", got)
    return vectors.astype(np.float32, copy=False)
