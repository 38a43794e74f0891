"""A killed run resumes where it was, a full disk leaves the old output whole, and two ranks give what one gives."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hardneg.mining.job import run
from hardneg.mining.options import MineOptions

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["hardneg.mining.job"])
TEXTS = [f"document {i} {'word ' * (i % 7)}" for i in range(600)]


def encode(texts: list[str]) -> np.ndarray:
    time.sleep(0.02)
    seeds = [int(text.split()[1]) + 1000 * text.startswith("query") for text in texts]
    return np.stack([np.random.default_rng(seed).standard_normal(16) for seed in seeds])


def work(options: MineOptions) -> None:
    torch.set_num_threads(1)
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
        negatives="BelowPositive(absolute=-0.5) * Ring(0.0, 0.9) * Tilt(1.0)",
        draw="gumbel",
        k=4,
        format="ids",
        query_block=8,
    )


def content(options: MineOptions) -> tuple[bytes, dict[str, Any]]:
    manifest = json.loads(Path(f"{options.out}.manifest.json").read_text())
    return Path(options.out).read_bytes(), {name: manifest[name] for name in ("counts", "explain", "statistics")}


def test_twenty_kills_and_the_same_output(job: MineOptions, tmp_path: Path) -> None:
    plain = replace(job, out=str(tmp_path / "plain.jsonl"))
    assert finish(work, plain) == 0
    begin = time.perf_counter()
    assert finish(work, replace(plain, out=str(tmp_path / "again.jsonl"))) == 0
    length = time.perf_counter() - begin
    killed, delays = 0, random.Random(0)
    for _ in range(60):
        child = CONTEXT.Process(target=work, args=(job,))
        child.start()
        child.join(delays.uniform(0.0, 0.6) * length)
        if child.is_alive():
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)
            child.join()
            killed += 1
        if Path(job.out).exists():  # whole, whenever it is there
            assert Path(job.out).read_bytes() == Path(plain.out).read_bytes()
            Path(job.out).unlink()
        if killed == 20:
            break
    assert killed == 20
    assert finish(work, job) == 0
    assert content(job) == content(plain)
    left = {path.name for path in tmp_path.iterdir()}
    assert not [name for name in left if name.endswith((".partial", ".work"))]


def test_finished_blocks_are_not_mined_again(job: MineOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    from hardneg.mining import job as module

    mined: list[int] = []
    original = module._save

    def save(file: Any, miner: Any, low: int, high: int) -> None:
        if len(mined) == 30:
            raise KeyboardInterrupt
        mined.append(low)
        original(file, miner, low, high)

    monkeypatch.setattr(module, "_save", save)
    with pytest.raises(KeyboardInterrupt):
        run(job)
    monkeypatch.setattr(module, "_save", lambda *given: mined.append(given[2]) or original(*given))
    run(job)
    assert mined == list(range(0, 480, 8))


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
        os._exit(7 if "unchanged" in str(error) else 8)


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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = [CONTEXT.Process(target=as_rank, args=(job, rank, port)) for rank in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
    assert [child.exitcode for child in children] == [0, 0]
    alone = replace(job, out=str(tmp_path / "alone.jsonl"))
    run(alone)
    assert content(job) == content(alone)
