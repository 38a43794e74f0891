"""What an encoder is and what it encodes, by content: the names of the embeddings that are kept.

- A model: the bytes of its files; of one from a hub, its parameters, tokenizer, structure, prompts and settings.
- A function: the source of its module or file and of every module of the user's that this one imports, the files and
  saved models that these name in plain strings, arguments bound to it, the parameters of modules and arrays that it
  reads from its globals, and what it declares: ``function.cache_key`` (anything with a steady repr, or a function that
  gives it) and ``function.cache_files`` (paths).
- An item: its text or, where the text is the path of a file, the name and the bytes of that file.

Installed packages are not looked into: declare their version where it matters.
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
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hardneg.io.functions import module_of
from hardneg.io.sealed import digest_of

_installed = tuple(os.path.realpath(path) for path in (*sysconfig.get_paths().values(), str(Path(__file__).parents[1])))
_model_files = ("modules.json", "config.json")  # of a folder that holds a saved model
_settings = ("prompts", "default_prompt_name", "truncate_dim", "max_seq_length")  # its repr need not have them


def digest_of_path(path: Path) -> str:
    """The sha256 of a file; of a folder, that of the names and contents of all files in it."""
    if not path.is_dir():
        return digest_of(path)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return _hashed(*((file.relative_to(path).as_posix(), digest_of(file)) for file in files))


def key_of_model(path: str, model: Any) -> str:
    """What changes when the vectors of a sentence-transformers model do; ``path`` is empty for one made in memory."""
    if path and Path(path).exists():
        return _hashed("files", digest_of_path(Path(path)))
    tokenizer: Any = getattr(model, "tokenizer", None)
    backend: Any = getattr(tokenizer, "backend_tokenizer", tokenizer)
    words = backend.to_str() if hasattr(backend, "to_str") else repr(tokenizer)
    settings = [getattr(model, name, None) for name in _settings]
    return _hashed(_state(model), repr(model), words, *settings)


def key_of_function(text: str, function: Any) -> str:
    """What changes when the function that ``load_function`` finds does, as far as that can be seen or is declared."""
    found: list[Any] = [text]
    bound: list[Any] = []
    declared = function
    while isinstance(function, functools.partial):
        bound += [*function.args, *function.keywords.values()]
        found.append((len(function.args), sorted(function.keywords)))
        function = function.func
    written = getattr(function, "__module__", None) or type(function).__module__
    sources = _sources([module_of(text), written])
    found += [(module, source.digest) for module, source in sorted(sources.items())]
    bound += [getattr(function, "__self__", None), *_globals_of(function)]
    found += [value for value in (_value(one) for one in bound) if value is not None]
    if callable(getattr(function, "state_dict", None)):
        found.append(_state(function))
    found += [(path.name, digest_of_path(path)) for path in _named_files(sources, bound)]
    for one in (declared, function):
        key = getattr(one, "cache_key", None)
        found.append(repr(key() if callable(key) else key))
        found += [digest_of_path(Path(path)) for path in getattr(one, "cache_files", ())]
    return _hashed(*found)


def keys_of_items(texts: list[str]) -> list[Any]:
    """Each text, or the name and the digest of the file that it is the path of."""
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
    """The digest of the names and bytes of all tensors of a module's state."""
    content = hashlib.sha256()
    for name, value in module.state_dict().items():
        content.update(repr((name, getattr(value, "dtype", None), getattr(value, "shape", None))).encode())
        content.update(_bytes(value) if isinstance(value, Tensor) else repr(value).encode())
    return content.hexdigest()


def _bytes(value: Tensor) -> Any:
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data if value.numel() else b""


def _value(one: Any) -> Any:
    """A value that a function depends on, by its content; None for what has no steady content."""
    if isinstance(one, torch.nn.Module):
        return _state(one)
    if isinstance(one, Tensor):
        return str(one.dtype), tuple(one.shape), hashlib.sha256(_bytes(one)).hexdigest()
    if isinstance(one, np.ndarray) and not one.dtype.hasobject:
        return str(one.dtype), one.shape, hashlib.sha256(np.ascontiguousarray(one).data).hexdigest()
    return repr(one) if isinstance(one, (str, bytes, int, float)) else None


def _globals_of(function: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """The values that the code of a function, and of functions of the user's that it calls, names among its globals
    and finds in its closure."""
    seen = set() if seen is None else seen
    code = getattr(function, "__code__", None)
    if code is None or id(code) in seen or _file_of(function.__module__ or "") is None:
        return
    seen.add(id(code))
    known = function.__globals__
    for value in [*(known[name] for name in sorted(_names(code)) if name in known), *_closure(function)]:
        yield value
        yield from _globals_of(value, seen)


def _closure(function: Any) -> list[Any]:
    names = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return [cell.cell_contents for name, cell in names if name != function.__name__]


def _names(code: CodeType) -> set[str]:
    inner = [_names(const) for const in code.co_consts if isinstance(const, CodeType)]
    return set(code.co_names).union(*inner)


@dataclass(frozen=True)
class _Source:
    path: Path
    digest: str
    nodes: list[ast.AST]


def _sources(modules: list[str]) -> dict[str, _Source]:
    """These modules and all that they import, but for installed ones."""
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
    """The source of a module of the user's own; None for built-in and installed ones."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if module not in sys.modules:
        if "." in module and _file_of(module.partition(".")[0]) is None:  # to look into a package is to import it
            return None
        try:
            file = getattr(importlib.util.find_spec(module), "origin", None)
        except (ImportError, AttributeError, ValueError):
            return None
    if not file or not file.endswith(".py") or not os.path.isfile(file):
        return None
    real = os.path.realpath(file)
    return None if any(real.startswith(folder + os.sep) for folder in _installed) else Path(real)


def _imports(module: str, source: _Source) -> Iterator[str]:
    package = module if source.path.name == "__init__.py" else module.rpartition(".")[0]
    for node in source.nodes:
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*(part for part in above if part), *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{one.name}" for one in node.names)


def _nodes(source: bytes) -> list[ast.AST]:
    """The imports and constants of a module."""
    try:
        found = ast.walk(ast.parse(source))
        return [node for node in found if isinstance(node, (ast.Import, ast.ImportFrom, ast.Constant))]
    except (SyntaxError, ValueError, RecursionError):  # it is not what Python has imported
        return []


def _named_files(sources: dict[str, _Source], bound: list[Any]) -> list[Path]:
    """Files, and folders of saved models, whose paths occur in the sources or among the bound arguments."""
    texts = {(Path(), one) for one in bound if isinstance(one, str)}
    for source in sources.values():
        constants = {node.value for node in source.nodes if isinstance(node, ast.Constant)}
        texts |= {(place, one) for one in constants if isinstance(one, str) for place in (Path(), source.path.parent)}
    found = {place / text for place, text in texts if 0 < len(text) < 1024 and "\0" not in text and "\n" not in text}
    return sorted({path.resolve() for path in found if _is_weights(path)})


def _is_weights(path: Path) -> bool:
    try:
        return path.is_file() or (path.is_dir() and any((path / name).is_file() for name in _model_files))
    except OSError:  # a text that is no path
        return False
