"""Cache keys of encoders and texts, computed from their content: the file names of stored embeddings.

- A model: the bytes of its files; for a model from a hub, its parameters, tokenizer, structure,
  prompts and settings.
- A function: the version that the user declares (``--cache-key``; ``function.cache_key``, a value
  with a stable repr or a function that returns one; or ``function.cache_files``, paths), and the
  source of its file and of every module outside installed packages that it imports. Its weights can be anywhere
  (a dict, an object, a default argument, the environment), so a function without a declaration has
  no key, and its results are not reused. The same holds for a model with custom modules.
- An item: its text or, if the text is the path of a file, the name and bytes of that file.

Installed packages are not inspected: declare their version if it matters.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hardneg.io.functions import module_of
from hardneg.io.sealed import digest_of

_installed = tuple(os.path.realpath(path) for path in (*sysconfig.get_paths().values(), str(Path(__file__).parents[1])))
_of_hub = "transformers_modules."  # prefix of modules that were downloaded with a model from a hub
_settings = (
    "prompts",
    "default_prompt_name",
    "truncate_dim",
    "max_seq_length",
)  # settings that the repr of a model may leave out


def digest_of_path(path: Path) -> str:
    """Return the sha256 of a file; for a folder, that of the names and contents of all files in it."""
    if not path.is_dir():
        return digest_of(path)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return _hashed(*((file.relative_to(path).as_posix(), digest_of(file)) for file in files))


def key_of_model(path: str, model: Any, declared: str | None = None) -> str | None:
    """Return a key that changes whenever the vectors of a sentence-transformers model do; None if unknown.

    Args:
        path: Folder or name of the model; empty for one made in memory.
        model: The model itself.
        declared: Version that the user declares, needed for a model with custom modules.
    """
    own = {type(part).__module__ for part in model.modules() if _file_of(type(part).__module__) is not None}
    if declared is None and any(not module.startswith(_of_hub) for module in own):
        return None
    sources = [(module, source.digest) for module, source in sorted(_sources([*own]).items())]
    if path and Path(path).exists():
        return _hashed("files", digest_of_path(Path(path)), sources, declared)
    tokenizer: Any = getattr(model, "tokenizer", None)
    backend: Any = getattr(tokenizer, "backend_tokenizer", tokenizer)
    words = backend.to_str() if hasattr(backend, "to_str") else repr(tokenizer)
    settings = [getattr(model, name, None) for name in _settings]
    return _hashed(_state(model), repr(model), words, *settings, sources, declared)


def key_of_function(text: str, function: Any, declared: str | None = None) -> str | None:
    """Return a key that changes with a function's declared version or its source; None if nothing is declared.

    Args:
        text: Its name, as given to ``load_function``; empty for one made in memory.
        function: The function itself, or any other callable.
        declared: Version that the user declares.
    """
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    keys = [getattr(one, "cache_key", None) for one in (function, inner)]
    files = [path for one in (function, inner) for path in getattr(one, "cache_files", ())]
    if declared is None and not files and keys == [None, None]:
        return None
    name = text or getattr(inner, "__qualname__", type(inner).__qualname__)
    written = getattr(inner, "__module__", None) or type(inner).__module__
    sources = _sources([*([module_of(text)] if text else []), written])
    values = [repr(key() if callable(key) else key) for key in keys]
    digests = [digest_of_path(Path(path)) for path in files]
    return _hashed(name, declared, values, digests, [(each, found.digest) for each, found in sorted(sources.items())])


def keys_of_items(texts: list[str]) -> list[Any]:
    """Return each text, or the name and digest of the file whose path it is."""
    return [[os.path.basename(text), digest_of(Path(text))] if _is_file(text) else text for text in texts]


def _is_file(text: str) -> bool:
    suffix = os.path.splitext(text)[1]
    return 1 < len(suffix) <= 10 and suffix[1:].isalnum() and "\0" not in text and os.path.isfile(text)


def _hashed(*parts: Any) -> str:
    content = hashlib.sha256()
    for part in parts:
        content.update(repr(part).encode("utf-8", "surrogatepass") + b"\n")
    return content.hexdigest()


def _state(module: Any) -> str:
    """Return the digest of the names and bytes of all tensors of a module's state."""
    content = hashlib.sha256()
    for name, value in module.state_dict().items():
        content.update(repr((name, getattr(value, "dtype", None), getattr(value, "shape", None))).encode())
        content.update(_bytes(value) if isinstance(value, Tensor) else repr(value).encode())
    return content.hexdigest()


def _bytes(value: Tensor) -> Any:
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data if value.numel() else b""


@dataclass(frozen=True)
class _Source:
    path: Path
    digest: str
    imports: list[ast.Import | ast.ImportFrom]


def _sources(modules: list[str]) -> dict[str, _Source]:
    """Return the sources of these modules and of all modules they import, except installed ones."""
    found: dict[str, _Source] = {}
    left = list(modules)
    while left:
        name = left.pop()
        path = None if name in found else _file_of(name)
        if path is not None:
            content = path.read_bytes()
            found[name] = _Source(path, hashlib.sha256(content).hexdigest(), _nodes(content))
            left += _imports(name, found[name])
    return found


def _file_of(module: str) -> Path | None:
    """Return the source file of one of the user's modules; None for built-in and installed modules."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if module not in sys.modules:
        if "." in module and _file_of(module.partition(".")[0]) is None:  # find_spec would import the package
            return None
        try:
            file = getattr(importlib.util.find_spec(module), "origin", None)
        except (ImportError, AttributeError, ValueError):
            return None
    if not file or not file.endswith(".py") or not os.path.isfile(file):
        return None
    path = Path(os.path.realpath(file))
    # A .pth file may add the packages of another environment.
    if {"site-packages", "dist-packages"} & set(path.parts) or any(map(path.is_relative_to, _installed)):
        return None
    return path


def _imports(module: str, source: _Source) -> Iterator[str]:
    package = module if source.path.name == "__init__.py" else module.rpartition(".")[0]
    for node in source.imports:
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        else:
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*(part for part in above if part), *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{one.name}" for one in node.names)


def _nodes(source: bytes) -> list[ast.Import | ast.ImportFrom]:
    """Return the import statements of a module."""
    try:
        return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    except (SyntaxError, ValueError, RecursionError):  # Python has not imported this content
        return []
