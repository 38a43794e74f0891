"""Mutated manifests: no code runs, nothing is written, and every error has a sentence.

``HARDNEG_FUZZ=2000 pytest tests/auditing/test_manifest_fuzz.py`` runs the full number.
"""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hardneg.auditing.files import AuditOptions, audit_files
from hardneg.auditing.options import Settings
from hardneg.core.errors import HardnegError
from hardneg.io.sealed import CHECKSUM, with_checksum
from hardneg.mining.job import run
from support.mining_jobs import make_job

FUZZ = int(os.environ.get("HARDNEG_FUZZ", "100"))
ODD: tuple[Any, ...] = (
    None, True, 0, -1, 10**30, 1e308, "", "/", "..", "../../etc/passwd", "/dev/zero", "\0", "x" * 5000,
    "subprocess:getoutput", "os:system", [], [[]], {}, {"path": "/etc/passwd", "sha256": "0" * 64, "bytes": 1},
    {"path": "/", "sha256": ""},
    {"path": ".", "sha256": "0" * 64}, "bm25", "dot", {"queries": "x"},
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if not isinstance(value, (dict, list)):
        return [path]
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    return [path, *(place for key in keys for place in places(value[key], (*path, key)))]


def mutated(record: dict[str, Any], chance: random.Random) -> Any:
    record = copy.deepcopy(record)
    for _ in range(chance.randint(1, 3)):
        *above, last = chance.choice([place for place in places(record) if place])
        holder: Any = record
        for key in above:
            holder = holder[key]
        if chance.random() < 0.2 and isinstance(holder, dict):
            del holder[last]
        else:
            holder[last] = copy.deepcopy(chance.choice(ODD))
    return record


def test_mutated_manifests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(tmp_path)
    run(job)
    manifest = Path(f"{job.out}.manifest.json")
    record = json.loads(manifest.read_text())
    record.pop(CHECKSUM)
    chance, found, ran = random.Random(0), Counter[str](), []
    for place, name in ((subprocess, "Popen"), (subprocess, "getoutput"), (os, "system")):
        monkeypatch.setattr(place, name, lambda *given, **options: ran.append(given))
    monkeypatch.setattr("hardneg.auditing.files.environment", dict)
    before = sorted(path for path in tmp_path.rglob("*"))
    for number in range(FUZZ):
        odd = mutated(record, chance)
        text = json.dumps(with_checksum(odd) if isinstance(odd, dict) and number % 4 else odd)
        if number % 10 == 0:
            cut = chance.randrange(len(text))
            text = text[:cut] + chance.choice(["", "[" * 2000, "\x00", "1" * 5000]) + text[cut + 1 :]
        manifest.write_text(text)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                audited = audit_files(AuditOptions(job.out, settings=Settings(frontier=False)))
                found["vectors" if audited.rows else "lists only"] += 1
            except (HardnegError, OSError, ValueError) as error:
                found[type(error).__name__] += 1
    assert ran == []
    assert sorted(path for path in tmp_path.rglob("*")) == before
    assert len(found) > 2
    print(f"\n{FUZZ} manifests: {dict(found)}")
