"""A killed run resumes where it was, a full disk leaves the old output whole, and two ranks give what one gives."""

from __future__ import annotations

import glob
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hardneg.io.tables import read_table
from hardneg.mining.job import run
from hardneg.mining.options import MineOptions
from support.forks import CONTEXT
from support.ranks import free_port

KILLS = max(20, int(os.environ.get("HARDNEG_KILLS", "20")))  # fewer do not always reach each phase three times
TEXTS = [f"document {i} {'word ' * (i % 7)}" for i in range(600)]


def encode(texts: list[str]) -> np.ndarray:
    time.sleep(0.02)
    seeds = [int(text.split()[1]) + 1000 * text.startswith("query") for text in texts]
    return np.stack([np.random.default_rng(seed).standard_normal(16) for seed in seeds])


def work(options: MineOptions) -> None:
    from hardneg.mining import encode as module

    torch.set_num_threads(1)
    module._piece = 20  # 24 pieces of queries and 30 of documents
    run(options)


def finish(target: Any, *arguments: Any) -> int | None:
    child = CONTEXT.Process(target=target, args=arguments)
    child.start()
    child.join(120)
    return child.exitcode


@pytest.fixture
def job(tmp_path: Path) -> MineOptions:
    rows = [{"id": i, "query": f"query {i}", "positive": [i % 600, (7 * i) % 600]} for i in range(480)]
    corpus = [{"id": i, "text": text} for i, text in enumerate(TEXTS)]
    for name, table in (("queries", rows), ("corpus", corpus)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
    return MineOptions(
        queries=str(tmp_path / "queries.jsonl"),
        corpus=str(tmp_path / "corpus.jsonl"),
        out=str(tmp_path / "mined.jsonl"),
        encoder="test_mine_resume:encode",
        cache_key="1",
        negatives="BelowPositive(absolute=-0.5) * Ring(0.0, 0.9) * Tilt(1.0)",
        draw="gumbel",
        k=4,
        format="ids",
        query_block=16,
    )


def content(options: MineOptions) -> tuple[Any, dict[str, Any]]:
    manifest = json.loads(Path(f"{options.out}.manifest.json").read_text())
    return written(options), {name: manifest[name] for name in ("counts", "explain", "statistics")}


def written(options: MineOptions) -> Any:
    return Path(options.out).read_bytes() if Path(options.out).is_file() else read_table(options.out)


def number(folder: str, pattern: str) -> int:
    """Of files; 0 if the folder goes away meanwhile, where Path.glob would raise."""
    return len(glob.glob(f"{glob.escape(folder)}/{pattern}"))


def phase(options: MineOptions) -> str:
    """What a run that was killed has been doing, by what it left."""
    if number(f"{options.out}.embeddings", "*.npy") < 54:
        return "encoding"
    if number(f"{options.out}.work", "*-lists*.npz") < 6:
        return "searching"
    return "choosing" if number(f"{options.out}.work", "*-chosen*.npz") < 15 else "finishing"


def killed_in(options: MineOptions, wanted: str, delays: random.Random) -> str | None:
    """Starts the run and kills it a moment after it has come further in the wanted phase; None if it was done first."""
    home = f"{options.out}.{'embeddings' if wanted == 'encoding' else 'work'}"
    files = {"encoding": "*.npy", "searching": "*.npz", "choosing": "*-chosen*", "finishing": "output*"}[wanted]
    before = number(home, files)
    child = CONTEXT.Process(target=work, args=(options,))
    child.start()
    while child.is_alive() and number(home, files) <= before:
        time.sleep(0.002)
    child.join(delays.uniform(0.0, 0.003 if wanted == "finishing" else 0.03))
    if child.is_alive():
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
    child.join()
    return phase(options) if child.exitcode == -signal.SIGKILL else None


@pytest.mark.parametrize("name", ["mined.jsonl", "mined"])
def test_kills_in_every_phase_and_the_same_output(job: MineOptions, tmp_path: Path, name: str) -> None:
    if name == "mined":
        pytest.importorskip("datasets", reason="needs an extra")
    job = replace(job, out=str(tmp_path / name), shards=6, query_block=32)
    plain = replace(job, out=str(tmp_path / f"plain-{name}"))
    assert finish(work, plain) == 0
    phases, delays = [], random.Random(0)
    for _ in range(3 * KILLS):
        order = ["encoding", "searching", "choosing", "finishing"]
        wanted = order[max(order.index(phase(job)), min(len(phases) // (3 * KILLS // 10), 3))]
        found = killed_in(job, wanted, delays)
        phases += [found] if found else []
        if Path(job.out).exists():  # whole, whenever it is there
            assert written(job) == written(plain)
            shutil.rmtree(job.out) if Path(job.out).is_dir() else Path(job.out).unlink()
        if len(phases) == KILLS:
            break
    assert len(phases) == KILLS
    assert all(phases.count(each) >= 3 for each in ("encoding", "searching", "choosing"))
    assert finish(work, job) == 0
    assert content(job) == content(plain)
    left = [path.name for path in tmp_path.rglob("*")]
    assert not [name for name in left if name.endswith((".partial", ".work", ".new", ".old"))]


@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_kill_while_a_data_set_is_put_in_place(
    job: MineOptions, tmp_path: Path, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where two folders cannot be exchanged at once: before the old one is moved away, before the new one takes its
    place, and before the old one is removed."""
    pytest.importorskip("datasets", reason="needs an extra")
    from hardneg.mining import output

    new = replace(job, out=str(tmp_path / "mined"), k=2)
    plain = replace(new, out=str(tmp_path / "plain.jsonl"))
    run(replace(new, k=4))
    before = written(new)
    steps: list[int] = []

    def step(original: Any) -> Any:
        def wrapped(path: Any, *given: Any, **options: Any) -> Any:
            if Path(new.out) in (Path(path), *given) or Path(path).name.endswith(".old"):
                steps.append(1)
                if len(steps) == after:
                    raise KeyboardInterrupt
            return original(path, *given, **options)

        return wrapped

    with monkeypatch.context() as patched:
        patched.setattr("hardneg.io.outputs._exchange", lambda first, second: False)
        patched.setattr(os, "replace", step(os.replace))
        patched.setattr(shutil, "rmtree", step(shutil.rmtree))
        with pytest.raises(KeyboardInterrupt):
            run(new)
    run(plain)
    if after < 3:
        output.recover(Path(new.out))
        assert written(new) == before
    run(new)
    assert written(new) == read_table(plain.out)
    assert not [path.name for path in tmp_path.iterdir() if path.name.endswith((".old", ".new"))]


def interrupted(job: MineOptions, monkeypatch: pytest.MonkeyPatch, pieces: int) -> list[str]:
    """A run that is stopped after some pieces; which they were."""
    from hardneg.mining.stages import FileStore

    done: list[str] = []
    original = FileStore.write

    def write(self: FileStore, stage: str, piece: int, content: Any) -> None:
        if len(done) == pieces:
            raise KeyboardInterrupt
        done.append(f"{stage} {piece}")
        original(self, stage, piece, content)

    with monkeypatch.context() as patched:
        patched.setattr(FileStore, "write", write)
        if pieces < 10**6:
            with pytest.raises(KeyboardInterrupt):
                run(job)
        else:
            run(job)
    return done


def test_blocks_of_another_device_are_not_used(
    job: MineOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU takes more queries at a time: the first block there is not the first block here."""
    from hardneg.mining import search

    job = replace(job, query_block=0)
    plain = replace(job, out=str(tmp_path / "plain.jsonl"))
    monkeypatch.setitem(search._query_blocks, "cpu", 50)
    run(plain)
    monkeypatch.setitem(search._query_blocks, "cpu", 200)
    interrupted(job, monkeypatch, 1)
    monkeypatch.setitem(search._query_blocks, "cpu", 50)
    run(job)
    assert content(job) == content(plain)


def test_blocks_of_another_rescorer_are_not_used(
    job: MineOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "rescorer_of_this_test.py"
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, module.stem, raising=False)
    source = "def scores(pairs):\n    return [float({} * len(d) % 17) for _, d in pairs]\n"
    job = replace(job, rescore=f"{module.stem}:scores", negatives="Uniform()", draw="top", candidates=40)
    module.write_text(source.format(1))
    interrupted(job, monkeypatch, 30)
    module.write_text(source.format(-1))
    monkeypatch.delitem(sys.modules, module.stem, raising=False)
    run(job)
    plain = replace(job, out=str(tmp_path / "plain.jsonl"))
    run(plain)
    assert content(job) == content(plain)


@pytest.mark.parametrize("pieces", [3, 40, 100])
def test_finished_pieces_are_not_computed_again(job: MineOptions, monkeypatch: pytest.MonkeyPatch, pieces: int) -> None:
    job = replace(job, shards=6, query_block=32)
    first = interrupted(job, monkeypatch, pieces)
    second = interrupted(job, monkeypatch, 10**6)
    assert not set(first) & set(second)
    searched = [name for name in (*first, *second) if "lists" in name]
    assert len(searched) == len(set(searched)) >= 6


def test_blocks_of_other_options_are_not_used(
    job: MineOptions, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from hardneg.mining import job as module

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_finish", stop)
    with pytest.raises(KeyboardInterrupt):
        run(job)
    monkeypatch.undo()
    run(replace(job, seed=1))
    first = Path(job.out).read_bytes()
    run(replace(job, seed=1, out=str(tmp_path / "fresh.jsonl")))
    assert first == (tmp_path / "fresh.jsonl").read_bytes()
    run(job)
    assert Path(job.out).read_bytes() != first  # two seeds differ


def limited(options: MineOptions, most: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    try:
        work(options)
    except OSError as error:
        advice = "free disk space, then run the same command again"
        os._exit(7 if advice in str(error) else 8)


@pytest.mark.parametrize("name", ["mined.jsonl", "mined.parquet", "mined"])
def test_a_full_disk_leaves_the_old_output(job: MineOptions, tmp_path: Path, name: str) -> None:
    if name != "mined.jsonl":
        pytest.importorskip("datasets" if name == "mined" else "pyarrow", reason="needs an extra")
    old = replace(job, out=str(tmp_path / name), cache=str(tmp_path / "cache"))
    run(old)
    files = sorted(path for path in [*tmp_path.glob(f"{name}/*"), tmp_path / name] if path.is_file())
    before = [path.read_bytes() for path in files]
    size = max(len(each) for each in before)
    new = replace(old, k=60, seed=3, query_block=4)  # a larger output, whose blocks still fit
    assert finish(limited, new, size + 5000) == 7
    assert [path.read_bytes() for path in files] == before
    assert not list(tmp_path.glob(".*.partial"))
    run(new)
    assert [path.read_bytes() for path in files] != before


def as_rank(options: MineOptions, rank: int, port: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(port)
    work(options)


def test_two_ranks_give_the_output_of_one(job: MineOptions, tmp_path: Path) -> None:
    port = free_port()
    children = [CONTEXT.Process(target=as_rank, args=(job, rank, port)) for rank in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
    assert [child.exitcode for child in children] == [0, 0]
    alone = replace(job, out=str(tmp_path / "alone.jsonl"))
    run(alone)
    assert content(job) == content(alone)
