"""Damaged files, kills and two processes on one output: the same bytes in the end, or an error that names the file.

``HARDNEG_KILLS=30 pytest tests/mining/test_damage.py -s`` runs the full number of kills.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hardneg.auditing.files import AuditOptions, audit_files
from hardneg.auditing.options import Settings
from hardneg.core.errors import Damaged, HardnegError, HardnegWarning, InUse, forget_warnings
from hardneg.mining import encode
from hardneg.mining.job import run
from hardneg.mining.options import MineOptions
from support.damage import KINDS as DAMAGES
from support.damage import damage
from support.errors import raises
from support.forks import CONTEXT
from support.mining_jobs import make_job

SOME, ALL = 8, pytest.param(200, marks=pytest.mark.long)
"""Damages: a sample, and all of the long tests."""
KILLS = int(os.environ.get("HARDNEG_KILLS", "2"))
QUIET = Settings(frontier=False)
KINDS = {
    "cache": ("mined.jsonl.embeddings", "*.npy"),
    "pieces": ("mined.jsonl.work", "*.npz"),
    "job": ("mined.jsonl.work", "job.json"),
}


def heard(function: Any) -> tuple[Any, int]:
    """What a function gives, and how many warnings of ours it gave."""
    forget_warnings()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        result = function()
    return result, sum(issubclass(each.category, HardnegWarning) for each in found)


@pytest.fixture(scope="module")
def half_done(tmp_path_factory: pytest.TempPathFactory) -> tuple[MineOptions, bytes]:
    """A job that was stopped before it wrote its output, with all its pieces and blocks, and what it would write."""
    folder = tmp_path_factory.mktemp("half")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(encode, "_piece", 16)
        job = replace(make_job(folder), query_block=4)
        run(job)
        whole = Path(job.out).read_bytes()
        stop_before_output(job)
    return job, whole


@pytest.mark.parametrize("times", [SOME, ALL])
@pytest.mark.parametrize("kind", list(KINDS))
def test_damaged_files_of_a_job_are_made_again(
    kind: str, times: int, half_done: tuple[MineOptions, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode, "_piece", 16)
    job, whole = half_done
    chance, found = random.Random(kind), Counter[str]()
    home = Path(job.out).parent
    for number in range(times):
        folder = tmp_path / str(number)
        shutil.copytree(home, folder)
        (folder / "mined.jsonl").unlink()
        (folder / "mined.jsonl.manifest.json").unlink()
        here = replace(
            job, **{name: str(folder / Path(getattr(job, name)).name) for name in ("queries", "corpus", "out")}
        )
        if kind != "cache":  # the paths are part of a job
            shutil.rmtree(f"{here.out}.work")
            stop_before_output(here)
        files = sorted((folder / KINDS[kind][0]).glob(KINDS[kind][1]))
        what = damage(chance.choice(files), DAMAGES[number % len(DAMAGES)], chance)
        _, warned = heard(lambda here=here: run(here))
        assert Path(here.out).read_bytes() == whole, what
        found["made again with a warning" if warned else "the same without"] += 1
        shutil.rmtree(folder)
    print(f"\n{kind}: {times} damages, {dict(found)}")
    assert found["made again with a warning"] > times / 2


def stop_before_output(job: MineOptions) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("hardneg.mining.job.write_output", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(job)


@pytest.mark.parametrize("times", [SOME, ALL])
@pytest.mark.parametrize("kind", ["manifest", "output", "cache", "embeddings"])
def test_damaged_files_that_an_audit_reads_are_found(kind: str, times: int, tmp_path: Path) -> None:
    """The same rows, a refusal that names the file, or a note that the embeddings are not there."""
    import numpy as np

    from support.mining_jobs import encode as encoded
    from support.mining_jobs import make_rows

    job = make_job(tmp_path)
    if kind == "embeddings":
        queries, corpus = make_rows()
        np.save(tmp_path / "q.npy", encoded([row["query"] for row in queries]))
        np.save(tmp_path / "d.npy", encoded([row["text"] for row in corpus]))
        job = replace(job, query_embeddings=str(tmp_path / "q.npy"), corpus_embeddings=str(tmp_path / "d.npy"))
    run(job)
    wanted = audit_files(AuditOptions(job.out, settings=QUIET))
    files = {
        "manifest": [Path(f"{job.out}.manifest.json")],
        "output": [Path(job.out)],
        "cache": sorted(Path(f"{job.out}.embeddings").glob("*.npy")),
        "embeddings": [tmp_path / "q.npy", tmp_path / "d.npy"],
    }[kind]
    chance, found = random.Random(kind), Counter[str]()
    for number in range(times):
        path = chance.choice(files)
        before = path.read_bytes()
        what = damage(path, DAMAGES[number % len(DAMAGES)], chance)
        audited, refused = None, ""
        try:
            audited, _ = heard(lambda: audit_files(AuditOptions(job.out, settings=QUIET)))
        except HardnegError as error:
            refused = str(error)
        if audited is None:
            assert path.name in refused, what
            found["refused by name"] += 1
        else:
            same = (audited.rows, audited.mined) == (wanted.rows, wanted.mined)
            assert same or (kind == "cache" and not audited.rows and "not in" in " ".join(audited.notes)), what
            found["the same" if same else "without vectors, which is noted"] += 1
        path.write_bytes(before)
    print(f"\naudit, {kind}: {times} damages, {dict(found)}")
    assert found["the same"] < times / 2


def test_a_damaged_manifest_is_named_by_mine(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    run(job)
    manifest = Path(f"{job.out}.manifest.json")
    manifest.write_text(manifest.read_text().replace('"seed": 0', '"seed": 4'))
    with raises(Damaged, who="mine", path="mined.jsonl.manifest.json", got="its checksum differs", fix="--overwrite"):
        run(job)
    run(replace(job, overwrite=True))
    assert json.loads(manifest.read_text())["seed"] == 0


def slow_job(folder: Path, name: str) -> MineOptions:
    rows = [{"id": i, "query": f"query {i}", "positive": [i % 300]} for i in range(240)]
    corpus = [{"id": i, "text": f"document {i}"} for i in range(300)]
    for table, content in (("queries", rows), ("corpus", corpus)):
        (folder / f"{table}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    return MineOptions(
        queries=str(folder / "queries.jsonl"),
        corpus=str(folder / "corpus.jsonl"),
        out=str(folder / name),
        encoder="test_mine_resume:encode",
        cache_key="1",
        negatives="Ring(0.0, 0.9) * Tilt(1.0)",
        draw="gumbel",
        k=4,
        format="ids",
        query_block=8,
    )


def mining(options: MineOptions) -> None:
    torch.set_num_threads(1)
    encode._piece = 40
    try:
        run(options)
    except InUse:
        os._exit(3)


def killed(target: Any, given: Any, after: list[float], both: bool) -> list[int | None]:
    """Exit codes of one or two processes that are killed some moments after they began."""
    children = [CONTEXT.Process(target=target, args=(given,)) for _ in range(1 + both)]
    for child in children:
        child.start()
    for child, delay in zip(children, after, strict=False):
        child.join(delay)
        if child.is_alive():
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)
    for child in children:
        child.join(60)
    return [child.exitcode for child in children]


def finish(target: Any, given: Any) -> int | None:
    child = CONTEXT.Process(target=target, args=(given,))
    child.start()
    child.join(120)
    return child.exitcode


@pytest.mark.parametrize("name", ["mined.jsonl", "mined"])
@pytest.mark.parametrize("both", [False, True])
def test_kills_of_mine(name: str, both: bool, tmp_path: Path) -> None:
    """At random moments, also of two that were started on one output; then one run to the end."""
    from hardneg.io.tables import read_table

    if name == "mined":
        pytest.importorskip("datasets", reason="needs the extra 'text'")
    job, plain = slow_job(tmp_path, name), slow_job(tmp_path, f"plain-{name}")
    finish(time.sleep, 0)  # the server that starts the others loads its modules
    began = time.monotonic()
    assert finish(mining, plain) == 0
    usual = time.monotonic() - began
    chance, codes = random.Random(name + str(both)), Counter[Any]()
    for _ in range(KILLS):
        found = killed(mining, job, [chance.uniform(0, usual) for _ in range(2)], both)
        codes.update(found)
        if Path(job.out).exists():
            assert read_table(job.out) == read_table(plain.out)
        if 0 in found:  # begin anew
            shutil.rmtree(f"{job.out}.embeddings")
    assert set(codes) <= {-signal.SIGKILL, 0, 3}
    assert finish(mining, job) == 0
    assert read_table(job.out) == read_table(plain.out)
    if name == "mined.jsonl":
        assert Path(job.out).read_bytes() == Path(plain.out).read_bytes()
    audit_files(AuditOptions(job.out, settings=QUIET))  # raises if output and manifest are of two jobs
    assert not [path for path in tmp_path.rglob("*") if path.name.endswith((".partial", ".work", ".old"))]
    print(f"\n{name}, {'two processes' if both else 'one process'}: {KILLS} rounds, exit codes {dict(codes)}")


def auditing(arguments: list[str]) -> None:
    import sys

    from hardneg.cli.app import main

    torch.set_num_threads(1)
    sys.argv = ["hardneg", *arguments]
    main()


@pytest.mark.parametrize("both", [False, True])
def test_kills_of_audit(both: bool, tmp_path: Path) -> None:
    job = make_job(tmp_path)
    run(job)

    def arguments(out: str) -> list[str]:
        return ["audit", job.out, "-o", str(tmp_path / out)]

    finish(time.sleep, 0)
    began = time.monotonic()
    assert finish(auditing, arguments("plain")) == 0
    usual = time.monotonic() - began
    finish(auditing, arguments("found"))
    names = ("audit.html", "audit.json")
    wanted = {name: (tmp_path / "found" / name).read_bytes() for name in names}
    shutil.rmtree(tmp_path / "found")
    chance, codes = random.Random(both), Counter[Any]()
    for _ in range(KILLS):
        codes.update(killed(auditing, arguments("found"), [chance.uniform(0, 1.2 * usual) for _ in range(2)], both))
        for name in names:
            if (tmp_path / "found" / name).exists():
                assert (tmp_path / "found" / name).read_bytes() == wanted[name]
    assert finish(auditing, arguments("found")) == 0
    assert {name: (tmp_path / "found" / name).read_bytes() for name in names} == wanted
    assert set(codes) <= {-signal.SIGKILL, 0, 2}  # 2: the other one was writing
    print(f"\naudit, {'two processes' if both else 'one process'}: {KILLS} rounds, exit codes {dict(codes)}")
