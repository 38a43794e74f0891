"""Records of a run: lines of JSON with checksums, the final figures, and the test for collapse.

``line_of`` and ``read_records`` define the format of metrics.jsonl: each line is a JSON object with its number and
its checksum, so that changed and missing lines are noticed. ``final_of`` averages the last records into the figures
of result.json, and ``has_collapsed`` decides whether to warn that all embeddings are alike.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hardneg.core.errors import ArgumentError, Damaged
from hardneg.io.embeddings import outcomes_in
from hardneg.io.files import parse_json, without_nan
from hardneg.io.sealed import CHECKSUM, checked, with_checksum
from hardneg.training.evaluation.measures import headline_of, measures_in

Record = dict[str, Any]

KINDS = ("similarities", "global_loss")
"""What --record adds to the records at chosen moments."""

NUM_BINS = 100
"""Bins of the recorded similarities, over [-1, 1]."""

NUM_MOMENTS = 6
"""Moments of --record-at auto: the first step, and others at equal distances up to the last one."""

FIX = "restore a copy, or delete it"
LINE = "line"

MIN_RECORDS, MAX_RECORDS, FINAL_SHARE = 3, 10, 5
"""The final figures are means over the last fifth of the records: at least three, at most ten."""

NOT_AVERAGED = ("step", "epoch", "effective_temperature")
"""Figures taken from the last record instead of averaged."""

COLLAPSED_SIMILARITY, COLLAPSED_LOSS = 0.99, 0.95
"""Similarity above which, and share of the guessing loss above which, a run has collapsed.

An untrained encoder stays below it (the tiny one has 0.93 on digits); a collapsed run on digits ends at 1.000.
"""

SPREADING, SMALLEST_SPREAD = 1.2, 1e-5
"""Growth of 1 - similarity over a run from which embeddings are spreading, and the spread below which it is noise."""

COLLAPSED_WITH_LABELS = 0.9999
"""The similarity threshold of losses that pull classes together, which at first pull everything together.

SupCon is at 0.999 for its first 30 steps and recovers; runs with a learning rate of 0.5 stay at 0.999997.
"""


@dataclass(frozen=True)
class Moments:
    """The steps of a run at which ``--record`` adds a record.

    Attributes:
        kinds: What is recorded, of ``KINDS``.
        steps: Numbers of steps, counted from 1.

    Example:
        >>> Moments.of("similarities", "1, 50")
        Moments(kinds=('similarities',), steps=(1, 50))
        >>> Moments.of("global_loss", "auto").within(100).steps
        (1, 20, 40, 60, 80, 100)
    """

    kinds: tuple[str, ...]
    steps: tuple[int, ...] | None

    @classmethod
    def of(cls, record: str, at: str) -> Moments:
        """Read the options ``record`` and ``record_at``.

        Args:
            record: Kinds, separated by commas; empty for none.
            at: Numbers of steps, separated by commas, or "auto".

        Raises:
            ArgumentError: If a kind is unknown, or ``at`` is neither "auto" nor numbers of at least 1.
        """
        kinds = tuple(word.strip() for word in record.split(",") if word.strip())
        for kind in kinds:
            if kind not in KINDS:
                raise ArgumentError("train", f"--record to list {' and '.join(KINDS)}", repr(record))
        words = [word.strip() for word in at.split(",")]
        if at == "auto":
            return cls(kinds, None)
        if not all(word.isdecimal() and int(word) for word in words):
            raise ArgumentError("train", '--record-at to be auto or numbers of steps such as "1,500"', repr(at))
        return cls(kinds, tuple(sorted({int(word) for word in words})))

    def within(self, total: int) -> Moments:
        """Return the moments of a run of ``total`` steps.

        Raises:
            ArgumentError: If a moment is after the end of the run.
        """
        parts = NUM_MOMENTS - 1
        steps = self.steps or tuple(sorted({max(1, total * i // parts) for i in range(parts + 1)}))
        if self.kinds and steps[-1] > total:
            raise ArgumentError("train", f"--record-at within the {total} steps of the run", str(steps[-1]))
        return Moments(self.kinds, steps)

    def due(self, step: int) -> bool:
        """Return True if there is something to record at this step, counted from 1."""
        return bool(self.kinds) and step in (self.steps or ())


class Seconds:
    """Seconds that a run spent in each of its parts; what is not in another part is training.

    A part inside another one counts only for itself. On a GPU, work that runs beside training, such as building the
    graph of a planner, counts only as far as training waits for it.

    Args:
        spent: Seconds of an earlier attempt.

    Example:
        >>> seconds = Seconds()
        >>> with seconds.part("graph"):
        ...     with seconds.part("encoding"):
        ...         pass
        >>> sorted(seconds.spent)
        ['encoding', 'graph', 'recording', 'sampling', 'views']
    """

    def __init__(self, spent: dict[str, float] | None = None) -> None:
        self.spent = dict.fromkeys(("sampling", "graph", "encoding", "views", "recording"), 0.0) | (spent or {})

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time inside the block, without parts inside it, to a part."""
        begun, before = time.perf_counter(), sum(self.spent.values())
        yield
        self.spent[name] += time.perf_counter() - begun - (sum(self.spent.values()) - before)

    def of_run(self, total: float) -> dict[str, float]:
        """Return the seconds of each part, and of training, the rest of ``total``."""
        parts = {name: round(value, 4) for name, value in self.spent.items()}
        return parts | {"training": round(max(0.0, total - sum(parts.values())), 4)}


def line_of(record: Record, number: int) -> str:
    """Return a record as one line of metrics.jsonl.

    Args:
        record: The figures of a step; NaN is written as null.
        number: Number of the line, counted from 0; it is stored with the checksum and reveals missing lines.
    """
    return json.dumps(with_checksum({**without_nan(record), LINE: number}), allow_nan=False) + "\n"


def text_of(records: list[Record]) -> str:
    """Return the content of a records file: one line per record."""
    return "".join(line_of(record, number) for number, record in enumerate(records))


def count_lines(path: Path) -> int:
    """Return the number of complete lines of a file; 0 if the file does not exist."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))


def read_records(path: Path, least: int = 0) -> list[Record]:
    """Read all records of a file and verify their checksums and order.

    A killed writer may leave half a line at the end, which is dropped; a complete one without its newline is kept.

    Args:
        path: The file; a missing one has no records.
        least: Number of records known to have been written, so that a lost end is noticed.

    Raises:
        Damaged: If a line was changed or is missing.
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
    """Parse and verify one line; raise ``Damaged`` if it is not the record with this number."""
    try:
        record = parse_json(line)
    except ValueError:
        record = None
    if not isinstance(record, dict) or CHECKSUM not in record:
        raise _damaged(path)
    found: Record = checked(record, "train", path, FIX)
    if found.pop(LINE, None) != number:
        raise _damaged(path, f"line {number + 1} was replaced or moved")
    if not all(_is_figure(value) for value in found.values()):
        raise _damaged(path)
    return found


def _is_figure(value: Any) -> bool:
    """Return True for a number or None, and for lists of numbers by name, such as histograms."""
    if isinstance(value, dict):
        return all(isinstance(one, int | float) for part in value.values() for one in part)
    return isinstance(value, int | float | None)


def _damaged(path: Path, got: str | None = None) -> Damaged:
    return Damaged("train", "records", path, got=got, fix=FIX)


def final_of(records: list[Record]) -> Record:
    """Average the last records into the final figures of a run.

    Batches vary, so the figures are means over the last records (see ``FINAL_SHARE``); step, epoch and effective
    temperature are those of the last record. None stands for a figure that no record has.

    Args:
        records: All records of the run with a loss, oldest first; at least one.

    Example:
        >>> final_of([{"step": step, "hardness": step / 4} for step in range(1, 4)])
        {'step': 3, 'hardness': 0.5, 'records': 3}
    """
    last = records[-min(len(records), MAX_RECORDS, max(MIN_RECORDS, len(records) // FINAL_SHARE)) :]
    return {name: _final(name, last) for name in last[-1]} | {"records": len(last)}


def _final(name: str, last: list[Record]) -> Any:
    if name in NOT_AVERAGED:
        return last[-1][name]
    known = [record[name] for record in last if record.get(name) is not None]
    return math.fsum(known) / len(known) if known else None


def has_collapsed(final: Record, similar: float = COLLAPSED_SIMILARITY, records: Sequence[Record] = ()) -> bool:
    """Return True if all embeddings have become almost identical.

    Three conditions must hold: the mean similarity of all candidates is at least ``similar``, the loss is at least
    95 % of that of random guessing, ln(1 + n), and the embeddings are not spreading. n is the effective number of
    negatives, which in a collapsed run equals their number.

    The similarity of all candidates is used, not that of the negatives, since hard negatives may be similar in a good
    run. A recipe with another loss of random guessing records it as ``guess_loss``. Similarities above 1 are dot
    products of unbounded norm (InfoGraph) and never count as a collapse.

    Args:
        final: The final figures, from ``final_of``.
        similar: Mean similarity from which embeddings count as identical.
        records: All records of the run, oldest first. A run that starts with similar embeddings has not collapsed if
            they spread: if the mean of 1 - similarity over the second half of the records is 1.2 times that over the
            first half.

    Example:
        >>> close = {"uniform_hardness": 0.999, "loss": 4.1, "effective_number": 62.0}
        >>> spreading = [{"uniform_hardness": 1.0 - 1e-4 * step} for step in range(1, 11)]
        >>> has_collapsed(close), has_collapsed(close, records=spreading), has_collapsed(close, records=spreading[::-1])
        (True, False, True)
    """
    similarity, loss, number = (final.get(name) for name in ("uniform_hardness", "loss", "effective_number"))
    if similarity is None or loss is None or number is None:
        return False
    guess = final.get("guess_loss")
    guess = math.log1p(number) if guess is None else guess
    alike = similar <= similarity <= 1.001 and loss >= COLLAPSED_LOSS * guess
    return bool(alike and not _spreading(records))


def _spreading(records: Sequence[Record]) -> bool:
    """Return whether the embeddings move apart from the first to the second half of the records."""
    spread = [1.0 - one["uniform_hardness"] for one in records if one.get("uniform_hardness") is not None]
    first, second = spread[: len(spread) // 2], spread[(len(spread) + 1) // 2 :]
    if not first:
        return False
    before, after = (math.fsum(part) / len(part) for part in (first, second))
    return after > max(SPREADING * before, SMALLEST_SPREAD)


def before_training(before: Record, after: Record) -> Record:
    """Summarise the evaluation of the encoder before training, and how much training has improved on it.

    Args:
        before: Figures of the evaluation of the encoder before training.
        after: Figures of the same evaluation of the trained encoder.

    Returns:
        The measures of ``before``; with one outcome per item also ``difference``, the gain of the headline measure, and
        ``half_width``, half its 95 % interval over the items.
    """
    found = {name: before[name] for name in (*measures_in(before), "uniformity") if before.get(name) is not None}
    metric = headline_of(after)
    number = (after.get("num_items") or {}).get(metric, after.get("num_test")) or 0
    outcomes = [outcomes_in(one, metric, number) for one in (after, before)]
    if number < 2 or outcomes[0] is None or outcomes[1] is None:
        return found
    gains = outcomes[0].astype(float) - outcomes[1]
    half_width = 1.96 * float(gains.std(ddof=1)) * number**-0.5
    return found | {"difference": float(gains.mean()), "half_width": half_width}
