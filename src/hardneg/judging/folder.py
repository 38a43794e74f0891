"""The folder of a judgement: what it was started with, its pairs, and every answer, safe against a kill at any moment.

- ``state.json``: digests of the inputs and the options that must not change while pairs are judged.
- ``populations.npz``: the mined pairs of every rule.
- ``answers.jsonl``: one line for each answer, with its checksum, only ever appended.
- ``judgements.tsv``, ``judge.json``, ``judge.html`` and the sheet: written anew by every run.

One process at a time works in a folder; a second one is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from hardneg.core.errors import Damaged, DataChanged, NotWritten
from hardneg.io.files import disk_failure, read_json, run_again, write_atomically, write_json
from hardneg.io.sealed import check_seal, checked, sealing, with_checksum
from hardneg.judging.asking import Grade, Judge, RowPair, answers_of
from hardneg.judging.design import Population

_fix = "use another --out, or delete the folder to judge from the start"


class AnswerLog:
    """A file of JSON lines that is only appended to; each line has a checksum.

    Reading drops a last line that a kill has cut off. Appending is safe from several threads.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._lock = path, Lock()

    def read(self) -> list[dict[str, Any]]:
        """Return all records, after removing a last line that is incomplete.

        Raises:
            Damaged: If another line than the last one cannot be read.
        """
        if not self.path.exists():
            return []
        content = self.path.read_bytes()
        lines = content.split(b"\n")
        whole, rest = lines[:-1], lines[-1]
        records = []
        for number, line in enumerate(whole, 1):
            try:
                record = json.loads(line)
                if not isinstance(record, dict) or "checksum" not in record:
                    raise ValueError("it has no checksum")
                records.append(checked(record, "judge", self.path, _fix))
            except (ValueError, RecursionError) as error:
                got = f"line {number}: {' '.join(str(error).split())}"
                raise Damaged("judge", "lines of answers", self.path, got, _fix) from None
        if rest:
            os.truncate(self.path, len(content) - len(rest))
        return records

    def append(self, record: dict[str, Any]) -> None:
        """Append a record; it is on the disk when this returns.

        Raises:
            NotWritten: If the disk refuses.
        """
        line = json.dumps(with_checksum(record), ensure_ascii=True).encode() + b"\n"
        with self._lock:
            try:
                with self.path.open("ab") as file:
                    file.write(line)
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                failure: NotWritten = disk_failure(self.path, error, run_again)
                raise failure from error


class Memory:
    """Answers of judges in a folder, so that no pair is judged twice: for ``hn.judge(..., out=folder)``.

    Args:
        folder: The folder of the judgement.

    Attributes:
        budgets: Budgets of the calls so far, in order. Asking with each of them again repeats the questions of these
            calls, so that a call that was interrupted ends with the same result as one that was not.
    """

    def __init__(self, folder: Path) -> None:
        self.log = AnswerLog(folder / "answers.jsonl")
        self.budgets: list[int] = []
        self._known: dict[str, dict[RowPair, Grade]] = {}
        for record in self.log.read():
            if record["kind"] == "budget":
                self.budgets.append(record["budget"])
            else:
                self._known.setdefault(record["kind"], {})[record["query"], record["document"]] = record["grade"]

    def begin(self, budget: int) -> list[int]:
        """Store the budget of a new call, and return all budgets so far."""
        if self.budgets[-1:] != [budget]:
            self.log.append({"kind": "budget", "budget": budget})
            self.budgets.append(budget)
        return self.budgets

    def of(self, kind: str, judge: Judge) -> Judge:
        """Return a judge that answers only pairs without a stored answer, and whose answers are stored.

        Args:
            kind: Name of the judge in the file.
            judge: The judge.
        """
        known = self._known.setdefault(kind, {})

        def ask(pairs: list[RowPair]) -> list[Grade]:
            new = list(dict.fromkeys(pair for pair in pairs if pair not in known))
            if new:
                for pair, grade in zip(new, answers_of(judge, new), strict=True):
                    self.log.append({"kind": kind, "query": pair[0], "document": pair[1], "grade": grade})
                    known[pair] = grade
            return [known[pair] for pair in pairs]

        return ask


def digest_of_populations(populations: Sequence[Population]) -> str:
    """Return a digest of the pairs of all rules, whatever the order of the rules."""
    found = hashlib.sha256()
    for one in sorted(populations, key=lambda one: (one.similarity, one.name)):
        for rows in (one.query, one.document):
            found.update(np.ascontiguousarray(rows, dtype="<i8").tobytes())
    return found.hexdigest()


def check_state(folder: Path, wanted: dict[str, Any], *, begun: bool) -> None:
    """Store what a judgement is started with, or raise if the folder belongs to another one.

    Args:
        folder: The folder of the judgement.
        wanted: Values that must not change, by their name in errors.
        begun: Whether there are answers; without any, the judgement starts anew.

    Raises:
        DataChanged: If an input or an option differs from that of the first run.
        Damaged: If the file cannot be read.
    """
    path, wanted = folder / "state.json", json.loads(json.dumps(wanted, default=str))
    known = read_json(path, _fix, who="judge") if path.exists() else None
    if known is None or (known != wanted and not begun):
        for name in ("populations.npz", "answers.jsonl")[: 1 if begun else 2]:
            (folder / name).unlink(missing_ok=True)
        write_json(path, wanted, run_again)
        return
    for name in {**known, **wanted}:
        if known.get(name) == wanted.get(name):
            continue
        before, now = known.get(name), wanted.get(name)
        if isinstance(before, dict) and isinstance(now, dict):
            changed = next(one for one in {**before, **now} if before.get(one) != now.get(one))
            name = f"{name}: {changed}"
        raise DataChanged("judge", "the inputs and options of its first run", f"another value of {name}", _fix)


def store_populations(path: Path, populations: Sequence[Population]) -> None:
    """Write the mined pairs of every rule."""
    arrays: dict[str, Any] = {"names": np.array([one.name for one in populations])}
    for number, one in enumerate(populations):
        arrays |= {f"query{number}": one.query, f"document{number}": one.document}
    arrays["similarity"] = np.array([one.similarity for one in populations])
    write_atomically(path, sealing(lambda file: np.savez(file, **arrays)), run_again)


def load_populations(path: Path) -> list[Population] | None:
    """Return the mined pairs of every rule; None if there are none yet.

    Raises:
        Damaged: If the file cannot be read.
    """
    if not path.exists():
        return None
    check_seal(path, "judge", _fix)
    with np.load(path, allow_pickle=False) as arrays:
        names = [str(name) for name in arrays["names"]]
        return [
            Population(name, name, arrays[f"query{i}"], arrays[f"document{i}"], float(arrays["similarity"][i]))
            for i, name in enumerate(names)
        ]
