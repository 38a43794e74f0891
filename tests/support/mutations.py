"""Files as an attacker or a bad disk leaves them: wrong kinds, lost names, huge numbers, HTML, paths, other files."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from hardneg.io.sealed import CHECKSUM, with_checksum

CANARY = "canary_of_the_fuzz"
"""A module that must never be imported, and the name of all that must never run."""

SCRIPT = f"<script>{CANARY}()</script>"
TEXTS = (
    SCRIPT, f'"><img src=x onerror={CANARY}()>', f"' onmouseover='{CANARY}()", f"javascript:{CANARY}()",
    f"{CANARY}:run", f"{CANARY}", "subprocess:getoutput", "os:system", f"__import__('{CANARY}').run()",
    "../../precious/file", "/etc/passwd", "~", "precious", "\x00", "a\x00b", "\x1b]0;owned\x07\x1b[2J",
    "\u202etxt", "\ud800", "", " ", "nan", "-1", "1e400", "x" * 100_000, "{}", "[]", "Tilt(" * 400,
    "Tilt(1.0) * " * 600, "9" * 4000, "hf:owner/model", "npz:../../precious/file", "folder:/", "None", "True",
    "%s%n{0}{x!r}", "[red]bold[/red]", "[/]",
)  # fmt: skip
NUMBERS = (
    0, -1, 1, 2**31, 2**63, 2**64, 10**18, 10**400, -(10**30), 0.5, -0.0, 1e-320, 1e308, float("nan"), float("inf"),
    -float("inf"), 1e400,
)  # fmt: skip
PLAIN: tuple[Any, ...] = (
    None,
    True,
    False,
    [],
    {},
    [[]],
    [None],
    {"": None},
    [{}],
    {"a": {"b": {"c": 1}}},
    [1, "a", None],
)


CHOICES = (
    "encoder",
    "model",
    "query_model",
    "guide_model",
    "data",
    "out",
    "cache",
    "augment",
    "negatives",
    "batches",
    "recipe",
)
"""Names whose values choose code, models, files or expressions, here or in an older version."""


def mutate_value(value: Any, random: Random) -> Any:
    """A JSON value with one to three changes at random places."""
    value = {"": copy.deepcopy(value)}
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        places = [place for place in _places(value) if place[0] is not value or random.random() < 0.05]
        if places:
            with suppress(RecursionError):  # of a change to a value that an earlier one has nested
                _change(*random.choice(places), random, value)
    return value.get("")


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container with every name or number in it."""
    todo = [value]
    while todo:
        one = todo.pop()
        names = list(one) if isinstance(one, dict) else range(min(len(one), 20))
        for name in names:
            yield one, name
            if isinstance(one[name], (dict, list)):
                todo.append(one[name])


def _change(inside: Any, name: Any, random: Random, whole: Any) -> None:
    old = inside[name]
    match random.randrange(10):
        case 0:
            del inside[name]
        case 1 | 2:
            inside[name] = random.choice(TEXTS)
        case 3:
            inside[name] = random.choice(NUMBERS)
        case 4:
            inside[name] = copy.deepcopy(random.choice(PLAIN))
        case 5:
            inside[name] = random.choice(([old], {"x": old}, str(old), [old] * 3, {SCRIPT: old}))
        case 6:
            inside[name] = nested(random.choice((30, 900, 5000)))
        case 7:
            other, elsewhere = random.choice(list(_places(whole)))
            inside[name] = copy.deepcopy(other[elsewhere]) if other is not whole else None
        case 8 if isinstance(inside, dict):
            inside[random.choice(TEXTS)] = old
        case 9 if isinstance(inside, dict):
            inside[random.choice(CHOICES)] = random.choice(TEXTS)
        case _:
            inside[name] = -old if isinstance(old, (int, float)) else None


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def mutate_json(content: bytes, random: Random) -> bytes:
    """With a checksum that fits, as an attacker would write it; now and then with the one before."""
    value = mutate_value(json.loads(content), random)
    if isinstance(value, dict) and CHECKSUM in value and random.random() < 0.9:
        try:
            value = with_checksum(value) if random.random() < 0.5 else {k: v for k, v in value.items() if k != CHECKSUM}
        except (RecursionError, ValueError, TypeError):
            value.pop(CHECKSUM)
    try:
        return json.dumps(value).encode()
    except RecursionError:
        return b"[" * 5000 + b"]" * 5000


def mutate_lines(content: bytes, random: Random) -> bytes:
    lines = content.splitlines()
    if not lines:
        return b"{}\n"
    for _ in range(random.choice((1, 1, 2))):
        place = random.randrange(len(lines))
        lines[place] = random.choice((mutate_json(lines[place], random), b"", b"null", b"[]", lines[0]))
    return b"\n".join(lines) + b"\n" * random.randrange(2)


def mutate_bytes(content: bytes, random: Random) -> bytes:
    """What no JSON mutation makes: cut, noisy, empty, of another kind."""
    place = random.randrange(len(content) + 1)
    return random.choice(
        (
            content[:place],
            content[:place] + random.randbytes(random.randrange(1, 9)) + content[place + 1 :],
            content[:place] + content[random.randrange(len(content) + 1) :],
            b"",
            random.randbytes(200),
            b"[" * 50_000,
            b'{"a": ' * 20_000,
            b"NaN",
            b"null",
            b"[]",
            b'{"options": 3}',
            b"\xff\xfe{}",
            content.decode("latin-1").encode("utf-16"),
            content * 2,
            malicious_pickle(),
            lying_npz(),
        )
    )


class _Runs:
    def __reduce__(self) -> Any:
        return os.mkdir, (CANARY,)


def malicious_pickle() -> bytes:
    return pickle.dumps({"of": _Runs(), "step": _Runs()})


def lying_npz(shape: str = "(1000000000000, 1000000)") -> bytes:
    """Arrays that claim to be larger than any memory."""
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}"
    header = header.ljust(117) + "\n"
    array = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode()
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name in ("train_x", "train_y", "test_x", "test_y"):
            archive.writestr(f"{name}.npy", array)
    return out.getvalue()


def mutate_npz(content: bytes, random: Random) -> bytes:
    with np.load(io.BytesIO(content)) as file:
        arrays = {name: file[name] for name in file}
    name = random.choice(list(arrays))
    old = arrays.pop(name)
    choices: list[Callable[[], Any]] = [
        lambda: None, lambda: old[:0], lambda: old[..., None], lambda: old.astype("U"), lambda: old * np.nan,
        lambda: old[:3],
        lambda: np.array([_Runs()] * len(old), dtype=object), lambda: np.float32(3), lambda: old.astype(np.complex64),
        lambda: np.full(old.shape, 1e38), lambda: np.array([SCRIPT] * len(old)), lambda: old.astype(np.uint64) + 2**63,
    ]  # fmt: skip
    changed = random.choice(choices)()
    arrays |= {} if changed is None else {name: changed}
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


def mutate_file(path: Path, random: Random) -> None:
    """Changes what is in the file, or what the file is."""
    if not path.is_file() or random.random() < 0.08:
        return _replace_file(path, random)
    content = path.read_bytes()
    kinds: dict[str, Callable[[bytes, Random], bytes]] = {
        ".json": mutate_json, ".jsonl": mutate_lines, ".npz": mutate_npz,
    }  # fmt: skip
    mutate = kinds.get(path.suffix, mutate_bytes) if random.random() < 0.85 else mutate_bytes
    try:
        path.write_bytes(mutate(content, random))
    except (ValueError, RecursionError):  # it is no longer what its name says, or nested
        path.write_bytes(mutate_bytes(content, random))


def _replace_file(path: Path, random: Random) -> None:
    """By nothing, a folder, another file of its kind, or a link to nowhere or to someone's file."""
    others = sorted(one for one in path.parent.iterdir() if one.is_file() and one != path)
    precious = path.parents[1] / "precious" / "file"
    path.unlink(missing_ok=True)
    match random.randrange(5):
        case 0:
            return
        case 1:
            path.mkdir()
        case 2 if others:
            shutil.copy(random.choice(others), path)
        case 3:
            path.symlink_to("nowhere")
        case _:
            path.symlink_to(precious)
