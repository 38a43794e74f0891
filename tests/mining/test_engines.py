"""Engines: processes, parts and Ray give the bytes of one process, also when some of them are killed or run twice."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from hardneg.cli.app import app
from hardneg.core.errors import ArgumentError, DataChanged, FileError, HardnegWarning, NotFinite
from hardneg.mining import job as module
from hardneg.mining.engines import ClusterLost, JobPart, Local, PartDone, Ray, Work, WorkerLost
from hardneg.mining.job import run
from hardneg.mining.options import MineOptions
from hardneg.mining.stages import FileStore
from support.errors import raises

RULES = {
    "a margin": {"negatives": "BelowPositive(relative=0.05)"},
    "a ring": {"negatives": "Ring(0.1, 0.4)"},
    "a draw": {"negatives": "BelowPositive(absolute=0.1) * Tilt(2.0)", "draw": "gumbel"},
    "short queries": {"negatives": "Threshold(1.5)", "k": 30},
    "without copies": {"negatives": "Uniform()", "near_negative": 1.0, "near_positive": 1.0},
}


@pytest.fixture
def files(tmp_path: Path) -> MineOptions:
    """Queries with positives in several shards, and a corpus of which each document has a copy elsewhere.

    Products are exact, and many are equal.
    """
    numbers = np.random.default_rng(0)
    corpus = numbers.integers(-2, 3, (450, 12)).astype(np.float32) / 4
    corpus = np.concatenate([corpus, corpus[::-1]])
    own = numbers.integers(0, 900, (70, 2))
    queries = corpus[own[:, 0]] + numbers.integers(-1, 2, (70, 12)).astype(np.float32) / 4
    np.save(tmp_path / "corpus.npy", corpus)
    np.save(tmp_path / "queries.npy", queries)
    lines = "".join(f"{query},{row}\n" for query, rows in enumerate(own) for row in rows)
    (tmp_path / "pairs.csv").write_text("query_id,corpus_id\n" + lines)
    return MineOptions(
        queries=str(tmp_path / "queries.npy"),
        corpus_embeddings=str(tmp_path / "corpus.npy"),
        judgements=str(tmp_path / "pairs.csv"),
        out=str(tmp_path / "mined.jsonl"),
        format="ids",
        similarity="dot",
        query_block=16,
        k=5,
        jobs=1,
    )


def mined(options: MineOptions, **changes: Any) -> bytes:
    options = replace(options, **changes)
    run(options)
    return Path(options.out).read_bytes()


@pytest.mark.parametrize("rule", RULES)
def test_shards_and_processes_change_nothing(files: MineOptions, rule: str) -> None:
    files = replace(files, **RULES[rule])  # type: ignore[arg-type]
    whole = mined(files)
    assert mined(files, shards=7) == whole
    assert mined(files, shards=11, jobs=2, query_block=23) == whole
    rows = [json.loads(line) for line in whole.splitlines()]
    sizes = {len(row["negative_ids"]) for row in rows}
    assert (min(sizes) < files.k) == (rule == "short queries")


def test_a_killed_worker_is_replaced(files: MineOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = mined(files)
    original, killed = module.compute, tmp_path / "killed"

    def compute(context: Any, task: Any) -> None:
        if task[1] == 3 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        original(context, task)

    monkeypatch.setattr(module, "compute", compute)
    sys.modules[__name__].compute = compute  # type: ignore[attr-defined]
    compute.__qualname__, compute.__module__ = "compute", __name__
    with pytest.warns(HardnegWarning, match="killed"):
        assert mined(files, shards=7, jobs=2) == whole
    assert killed.exists()


def test_an_error_of_a_worker_is_raised_here(files: MineOptions) -> None:
    corpus = np.load(files.corpus_embeddings)  # type: ignore[arg-type]
    corpus[777, 3] = np.nan
    np.save(files.corpus_embeddings, corpus)  # type: ignore[arg-type]
    for workers in (1, 2):
        with raises(NotFinite, who="mine", got="row 777"):
            mined(files, shards=5, jobs=workers)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1, 1, 2), (1,), ()])
@pytest.mark.parametrize("rule", ["a margin", "a ring"])
def test_parts_in_any_order_and_twice(
    files: MineOptions, order: tuple[int, ...], rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = replace(files, **RULES[rule])  # type: ignore[arg-type]
    whole = mined(files)
    Path(files.out).unlink()
    parted = replace(files, shards=7)
    for part in order:
        assert run(replace(parted, part=f"{part}/3")) is None
        assert not Path(files.out).exists()
    computed: list[str] = []
    original = FileStore.write
    monkeypatch.setattr(
        FileStore, "write", lambda self, stage, *rest: computed.append(stage) or original(self, stage, *rest)
    )
    assert mined(parted, merge=True) == whole
    if set(order) == {0, 1, 2} and rule == "a margin":
        assert not any("0.0-lists" in name for name in computed)
    assert not list(Path(files.out).parent.glob("*.work*"))


def lengthen_some_rows(files: MineOptions) -> None:
    path = Path(files.corpus_embeddings or "")
    vectors = np.load(path)
    np.save(path, vectors * (1 + np.arange(len(vectors), dtype=np.float32) % 3)[:, None])


def test_a_part_of_other_data_that_still_runs_leaves_nothing_behind(files: MineOptions) -> None:
    files, work = replace(files, shards=4), Path(f"{files.out}.work")
    run(replace(files, part="0/2"))
    late = {path: path.read_bytes() for path in work.glob("*-lists*.npz")}
    lengthen_some_rows(files)
    run(replace(files, part="1/2"))
    for path, content in late.items():  # written after the folder was emptied for the new data
        path.write_bytes(content)
    joined = mined(files, merge=True)
    assert late
    assert not work.exists()
    assert joined == mined(files, out=files.out.replace("mined", "other"))


def test_an_input_that_changes_meanwhile_is_an_error(files: MineOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = module.compute

    def changing(context: Any, task: Any) -> None:
        compute(context, task)
        lengthen_some_rows(files)

    with monkeypatch.context() as patch:
        patch.setattr(module, "compute", changing)
        with raises(DataChanged, who="mine", got="changed since"):
            run(files)
    assert not Path(files.out).exists()
    assert mined(files) == mined(files, out=files.out.replace("mined", "other"))


def test_a_part_makes_the_folder_of_its_output(files: MineOptions, tmp_path: Path) -> None:
    assert run(replace(files, out=str(tmp_path / "new" / "mined.jsonl"), part="0/2", shards=4)) is None
    assert (tmp_path / "new" / "mined.jsonl.work").is_dir()


def test_parts_are_counted_from_zero(files: MineOptions) -> None:
    for text in ("3/3", "1", "a/b", "-1/2"):
        with pytest.raises(ArgumentError, match="a part as i/n"):
            run(replace(files, part=text))
    with raises(ArgumentError, who="mine", got="part='0/2'"):
        run(replace(files, part="0/2", merge=True))


def test_parts_by_command(files: MineOptions, tmp_path: Path) -> None:
    whole = mined(files)
    Path(files.out).unlink()
    command = ["mine", files.queries, "--corpus-embeddings", files.corpus_embeddings, "--judgements", files.judgements]
    command += [
        "-o",
        files.out,
        "--format",
        "ids",
        "--query-block",
        "16",
        "--shards",
        "4",
        "--jobs",
        "1",
        "--similarity",
        "dot",
    ]
    for more in (["--part", "0/2"], ["--part", "1/2"], ["--merge"]):
        done = CliRunner().invoke(app, [*command, *more])  # type: ignore[list-item]
        assert done.exit_code == 0, done.output
        assert Path(files.out).exists() == (more == ["--merge"])
    assert Path(files.out).read_bytes() == whole


@pytest.mark.parametrize("of", [1, 2, 5])
def test_the_share_of_each_part(of: int) -> None:
    ran: list[int] = []
    for number in range(of):
        with nullcontext() if number == of - 1 else pytest.raises(PartDone):
            JobPart(number, of).map(Work(ran.append, range(7), lambda task: task in ran, lambda task: None))
    assert sorted(ran) == list(range(7))


def test_one_process_needs_no_pool() -> None:
    done: list[int] = []
    Local(1).map(Work(lambda task: None, [1, 2, 3], lambda task: task == 2, done.append))
    assert sorted(done) == [1, 2, 3]


def test_whole_rows_in_shards_are_refused_by_name(files: MineOptions) -> None:
    with pytest.raises(ArgumentError, match="draw='categorical'"):
        mined(files, shards=3, draw="categorical", negatives="Tilt(1.0)")


def test_a_full_disk_is_seen_before_the_work(files: MineOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    from hardneg.mining.estimate import estimate

    needed = estimate(files).disk_bytes
    assert needed >= 70 * 18 * 16  # lists of 18 for each of 70 queries
    assert estimate(replace(files, shards=9)).disk_bytes > 5 * needed
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": needed - 1}))
    with raises(FileError, who="mine", got="where 0.0 GiB are free", fix="--shards"):
        run(files)
    assert not Path(f"{files.out}.work").exists()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without processors, and two raylets; the last test kills one of them."""
    ray = pytest.importorskip("ray", reason="needs the extra 'ray'")
    utils = pytest.importorskip("ray.cluster_utils")
    made = utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    made.raylets = [made.add_node(num_cpus=1) for _ in range(2)]
    path = os.pathsep.join([str(Path(module.__file__).parents[2]), *sys.path])
    ray.init(address=made.address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": path}})
    yield made
    ray.shutdown()
    made.shutdown()


def test_ray_gives_the_bytes_of_one_process(files: MineOptions, cluster: Any) -> None:
    for rule in ("a ring", "a draw", "without copies"):
        some = replace(files, **RULES[rule])  # type: ignore[arg-type]
        whole = mined(some)
        assert mined(some, engine="ray", shards=6) == whole, rule


def slow_encode(texts: list[str]) -> np.ndarray:
    """A function of this module, which the workers of Ray import by its name."""
    time.sleep(0.3)
    return np.stack([np.random.default_rng(len(text) * 31 + ord(text[-1])).standard_normal(8) for text in texts])


def test_ray_names_a_task_that_kills_its_workers(cluster: Any) -> None:
    done: list[int] = []
    work = Work(kill_at_2, range(4), lambda task: False, done.append, lambda task: f"block {task}")
    with pytest.warns(HardnegWarning, match="lost"), pytest.raises(WorkerLost) as raised:
        Ray().map(work)
    assert (raised.value.piece, raised.value.tries) == ("block 2", 3)
    assert 2 not in done


def test_ray_goes_on_when_a_raylet_is_killed(
    files: MineOptions, cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hardneg.mining import encode

    monkeypatch.setattr(encode, "_piece", 10)
    words = [f"{'word ' * (i % 9)}{chr(97 + i % 26)}{i}" for i in range(200)]
    rows = [{"query": f"query {i} {words[i]}", "positive": words[i]} for i in range(60)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"text": word}) + "\n" for word in words))
    texts = MineOptions(
        queries=str(tmp_path / "pairs.jsonl"),
        corpus=str(tmp_path / "corpus.jsonl"),
        out=str(tmp_path / "texts.jsonl"),
        encoder="test_engines:slow_encode",
        cache_key="1",
        format="ids",
        query_block=8,
        shards=12,
        jobs=1,
        k=3,
    )
    whole = mined(texts, cache=str(tmp_path / "one"))
    other = tmp_path / "other"
    killer = threading.Thread(target=_kill_when, args=(cluster, other, 8))
    killer.start()
    assert mined(texts, cache=str(other), engine="ray") == whole
    killer.join()
    assert len(cluster.worker_nodes) == 1


def _kill_when(cluster: Any, folder: Path, pieces: int) -> None:
    """Kills a raylet once so many pieces are there."""
    until = time.monotonic() + 120
    while time.monotonic() < until and len(list(folder.glob("*.npy"))) < pieces:
        time.sleep(0.02)
    cluster.remove_node(random.Random(0).choice(cluster.raylets), allow_graceful=False)


RAYLET = """
import sys, threading, time
import psutil
from hardneg.mining.engines import ClusterLost, Work
from hardneg.mining.engines import Ray

def kill(number):
    if number == 0:
        raylets = [one for one in psutil.Process().children(recursive=True) if "raylet" in one.name()]
        assert raylets
        for raylet in raylets:
            raylet.kill()

if __name__ == "__main__":
    try:
        Ray(workers=1).map(Work(time.sleep, [0, 600], lambda task: False, kill))
    except ClusterLost as error:
        print(error)
"""


@pytest.mark.long
@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_a_dead_raylet_of_this_process_is_a_lost_cluster(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs the extra 'ray'")
    (tmp_path / "job.py").write_text(RAYLET)
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with (
        tempfile.TemporaryDirectory() as folder
    ):  # short, since sockets are made in it; no other cluster is found there
        environment["RAY_TMPDIR"] = folder
        command = [sys.executable, str(tmp_path / "job.py")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert (done.returncode, "raylet" in done.stdout) == (0, True), done.stderr


def test_a_cluster_that_cannot_be_joined_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="needs the extra 'ray'")

    def refuse(**how: Any) -> None:
        raise ConnectionError("no cluster there")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(ClusterLost, match="example:6379"):
        Ray("example:6379").map(Work(kill_at_2, [0], lambda task: False, lambda task: None))


WORKERS = """
import os, sys, time
from pathlib import Path
from hardneg.mining.engines import Work
from hardneg.mining.engines import Local

def sleep(task):
    Path(sys.argv[1], str(os.getpid())).touch()
    time.sleep(600)

if __name__ == "__main__":
    try:
        Local(2).map(Work(sleep, range(4), lambda task: False, lambda task: None))
    except KeyboardInterrupt:
        sys.exit(130)
"""


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A process whose two workers are at work, in a group of their own, and the numbers of the workers."""
    (tmp_path / "job.py").write_text(WORKERS)
    pids = tmp_path / "pids"
    pids.mkdir()
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "job.py"), str(pids)],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    until = time.monotonic() + 120
    while len(list(pids.iterdir())) < 2 and time.monotonic() < until:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    workers = [int(path.name) for path in pids.iterdir()]
    yield process, workers
    for pid in (process.pid, *workers):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.communicate()


def alive(pids: list[int], patience: float = 30.0) -> list[int]:
    """Those of the processes that still run when the patience is over."""
    psutil = pytest.importorskip("psutil", reason="needs the extra train")
    until = time.monotonic() + patience
    while True:
        running = [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
        if not running or time.monotonic() > until:
            return running
        time.sleep(0.05)


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_workers_end_when_their_parent_is_killed(busy: tuple[subprocess.Popen[str], list[int]]) -> None:
    process, workers = busy
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert alive(workers) == []


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
@pytest.mark.parametrize("group", [True, False], ids=["the group", "the parent alone"])
def test_ctrl_c_ends_busy_workers_without_a_traceback(
    group: bool, busy: tuple[subprocess.Popen[str], list[int]]
) -> None:
    process, workers = busy
    os.killpg(process.pid, signal.SIGINT) if group else process.send_signal(signal.SIGINT)
    _, reported = process.communicate(timeout=30)
    assert (process.returncode, reported) == (130, "")
    assert alive(workers) == []


def kill_at_2(task: int) -> None:
    if task == 2:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_task_that_kills_its_workers_is_named() -> None:
    work = Work(kill_at_2, range(4), lambda task: False, lambda task: None, lambda task: f"block {task}")
    with pytest.warns(HardnegWarning, match="killed"), pytest.raises(WorkerLost, match="block") as raised:
        Local(2).map(work)
    assert raised.value.tries == 3
    assert isinstance(pickle.loads(pickle.dumps(raised.value)), WorkerLost)
