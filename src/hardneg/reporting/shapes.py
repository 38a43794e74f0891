"""The shapes of the files of a run or a comparison; a file of another shape raises before a page is written."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hardneg.core.errors import FileError
from hardneg.core.text import printable
from hardneg.training.evaluation.measures import MEASURES

RecordShape = Any
"""A kind of value, a list of one shape, a dict of shapes by name ("*": any other), or a tuple of a list's parts."""


def _is_number(value: Any) -> bool:
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    return plain and abs(value) < 1e100 and math.isfinite(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1e15


FieldKind = tuple[str, Callable[[Any], bool]]
NUMBER: FieldKind = ("a number", _is_number)
WHOLE: FieldKind = ("a whole number", _is_whole)
TEXT: FieldKind = ("text", lambda value: isinstance(value, str))
ANYTHING: FieldKind = ("anything", lambda value: True)

_split = {"images": WHOLE, "items": WHOLE, "noun": TEXT, "classes": WHOLE, "fingerprint": TEXT}
TRAINED = {
    "encoder": {"name": TEXT, "class": TEXT, "parameters": WHOLE, "initial_weights": TEXT},
    "views": TEXT,
    "weight_decay": NUMBER,
    "normalisation": {"mean": [NUMBER], "std": [NUMBER]},
    "data": {"*": _split},
    "earlier_data": [{"*": _split}],
}
_machine = {"command": TEXT, "python": TEXT, "commit": TEXT, "machine": TEXT, "device": TEXT, "versions": {"*": TEXT}}
CONFIG = {"recipe": TEXT, "options": {"seed": WHOLE, "*": ANYTHING}, "trained": TRAINED, **_machine}
RECORD = {"step": NUMBER, "epoch": NUMBER, "*": NUMBER}
RESULT = {
    "steps": WHOLE, "seconds": NUMBER, "epochs": NUMBER, "k": WHOLE, "num_test": WHOLE, "num_train": WHOLE,
    "alignment": NUMBER, "uniformity": NUMBER, "no_accuracy": TEXT, "headline": TEXT, "num_items": {"*": WHOLE},
    "final": {"*": NUMBER}, "trained": TRAINED, "correct": {"*": TEXT}, "scores": {"*": TEXT},
    "similarities": {
        "edges": [NUMBER], "same": [NUMBER], "other": [NUMBER], "same_mean": NUMBER, "other_mean": NUMBER,
    },
    **dict.fromkeys(MEASURES, NUMBER),
}  # fmt: skip
ROW = {
    "arm": TEXT, "values": [NUMBER], "mean": NUMBER, "half_width": NUMBER, "difference": NUMBER,
    "difference_half_width": NUMBER, "detectable": NUMBER, "effective_temperature": NUMBER, "false_negatives": NUMBER,
    "hardness": NUMBER, "clamped": NUMBER, "steps": WHOLE, "seconds": NUMBER, "collapsed": WHOLE,
}  # fmt: skip
COMPARISON = {
    "metric": TEXT, "k": WHOLE, "num_test": WHOLE, "noun": TEXT, "rows": [ROW], "answer": [TEXT], "sentences": [TEXT],
    "notes": [TEXT], "cautions": [TEXT], "unlike": [TEXT], "threads": WHOLE,
    "verdicts": [{"arm": TEXT, "against": TEXT, "sentence": TEXT, "kind": TEXT}],
    "tuned": {"*": NUMBER}, "tries": {"*": [(NUMBER, NUMBER)]},
    "comparison": {"seeds": WHOLE, "common": {"*": ANYTHING}, "tune": (TEXT, [NUMBER]), "arms": [TEXT]},
    **_machine,
}  # fmt: skip
REQUEST = {"metric": TEXT, "common": {"*": ANYTHING}}


def checked(value: Any, shape: RecordShape, path: Path, where: str = "", *, needs: tuple[str, ...] = ()) -> Any:
    """The value without its nulls, which stand for what is not known; raises where it has another shape.

    ``needs`` are the names that must be there.
    """
    if isinstance(shape, dict):
        found = _kind(value, dict, "names and values", path, where)
        for name in needs:
            if found.get(name) is None:
                raise _other(f"{name!r}", path, where, found)
        return {
            name: checked(one, shape.get(name, shape.get("*", ANYTHING)), path, f"{where}.{name}" if where else name)
            for name, one in found.items()
            if one is not None
        }
    if isinstance(shape, list):
        every = _kind(value, list, "a list", path, where)
        return [checked(one, shape[0], path, f"{where}[{i}]") for i, one in enumerate(every) if one is not None]
    if isinstance(shape[0], str) and callable(shape[-1]):
        if not shape[1](value):
            raise _other(shape[0], path, where, value)
        return value
    parts = _kind(value, list, f"a list of {len(shape)}", path, where)
    if len(parts) != len(shape):
        raise _other(f"a list of {len(shape)}", path, where, value)
    pairs = enumerate(zip(parts, shape, strict=True))
    return [None if one is None else checked(one, part, path, f"{where}[{i}]") for i, (one, part) in pairs]


def _kind(value: Any, kind: type, words: str, path: Path, where: str) -> Any:
    if not isinstance(value, kind):
        raise _other(words, path, where, value)
    return value


def _other(words: str, path: Path, where: str, value: Any) -> FileError:
    place = f" in {printable(where, 80)}" if where else ""
    return FileError("report", f"{words}{place}", path, f"which has {printable(repr(value), 60)}")
