"""The records of a run: lines of JSON with their checksums, the final figures, and whether the run collapsed."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

from hardneg.core.errors import Damaged
from hardneg.io.files import parse_json, without_nan
from hardneg.io.sealed import CHECKSUM, checked, with_checksum

Record = dict[str, Any]

FIX = "put back a copy of it, or delete it"
LINE = "line"

FEWEST, MOST, SHARE = 3, 10, 5
"""The final figures are means over the last fifth of the records, at least three and at most ten of them."""

OF_THE_LAST = ("step", "epoch", "effective_temperature")
"""Taken from the last record, not averaged."""

COLLAPSED_SIMILARITY, COLLAPSED_LOSS = 0.99, 0.95
"""Beyond what a fresh encoder has (0.93 of the tiny one on digits); a run on digits that collapsed ends at 1.000."""

COLLAPSED_WITH_LABELS = 0.9999
"""Losses that pull classes together begin by pulling everything together: SupCon is at 0.999 for its first 30 steps, of
which it recovers. Runs with a learning rate of 0.5, which do not, are at 0.999997."""


def line_of(record: Record, number: int) -> str:
    """A record as the line of this number, from 0: numbers and checksums reveal lines that were lost or changed."""
    return json.dumps(with_checksum({**without_nan(record), LINE: number}), allow_nan=False) + "\n"


def text_of(records: list[Record]) -> str:
    """The content of a file of these records."""
    return "".join(line_of(record, number) for number, record in enumerate(records))


def count_lines(path: Path) -> int:
    """The number of whole lines in a file; 0 if there is none."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))


def read_records(path: Path, least: int = 0) -> list[Record]:
    """All records of a file; raises ``Damaged`` for a line that was changed or lost.

    A killed writer may leave half a line at the end, which is dropped; a whole one without its end is a record.

    Args:
        path: The file; one that is not there has no records.
        least: The number of records that are known to have been written, so that a lost end is found.
    """
    if not path.exists():
        return []
    *lines, rest = path.read_text(errors="replace").split("\n")
    records = [_record(path, line, number) for number, line in enumerate(lines)]
    with suppress(ValueError):
        records.append(_record(path, rest[: rest.rindex("}") + 1], len(lines)))
    if len(records) < least:
        raise _damaged(path, f"{least - len(records)} of {least} records are missing")
    return records


def _record(path: Path, line: str, number: int) -> Record:
    try:
        record = parse_json(line)
    except ValueError:
        record = None
    if not isinstance(record, dict) or CHECKSUM not in record:
        raise _damaged(path)
    found: Record = checked(record, "train", path, FIX)
    if found.pop(LINE, None) != number:
        raise _damaged(path, f"line {number + 1} is not the one that was written there")
    if not all(isinstance(value, int | float | None) for value in found.values()):
        raise _damaged(path)
    return found


def _damaged(path: Path, got: str | None = None) -> Damaged:
    return Damaged("train", "records", path, got=got, fix=FIX)


def final_of(records: list[Record]) -> Record:
    """The last record, with means over the last ones instead of what varies from batch to batch.

    >>> final_of([{"step": step, "hardness": step / 4} for step in range(1, 4)])
    {'step': 3, 'hardness': 0.5, 'records': 3}
    """
    last = records[-min(len(records), MOST, max(FEWEST, len(records) // SHARE)) :]
    return {name: _final(name, last) for name in last[-1]} | {"records": len(last)}


def _final(name: str, last: list[Record]) -> Any:
    if name in OF_THE_LAST:
        return last[-1][name]
    known = [record[name] for record in last if record.get(name) is not None]
    return math.fsum(known) / len(known) if known else None


def has_collapsed(final: Record, similar: float = COLLAPSED_SIMILARITY) -> bool:
    """Whether all embeddings are almost one: any two are similar, and the loss is near that of a guess, ln(1 + n).

    Of all candidates alike, since hard negatives may be similar in a good run; n is the effective number of negatives,
    which in a collapsed run is that of all. A recipe whose guess costs something else records it as ``guess_loss``. A
    similarity above 1 is a dot product that no norm bounds (InfoGraph), and nothing follows from it.
    Embeddings whose similarity is at least ``similar`` are almost one.
    """
    similarity, loss, number = (final.get(name) for name in ("uniform_hardness", "loss", "effective_number"))
    if similarity is None or loss is None or number is None:
        return False
    guess = final.get("guess_loss")
    guess = math.log1p(number) if guess is None else guess
    return bool(similar <= similarity <= 1.001 and loss >= COLLAPSED_LOSS * guess)
