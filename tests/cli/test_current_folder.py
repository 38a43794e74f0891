"""Python files that lie in the current folder are run by no verb, nor by the processes that a verb starts."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

import hardneg
from hardneg.batching.background import PlanningProcess
from hardneg.comparing.runs import in_a_process
from hardneg.io.functions import load_function
from hardneg.io.processes import python, safe_children
from hardneg.training.loop.runs import Run
from hardneg.training.options import RECIPES

OURS = ("hardneg", "own", "usercustomize", "sitecustomize")
STANDARD = (
    "asyncio", "concurrent", "csv", "ctypes", "dataclasses", "gzip", "hashlib", "inspect", "json", "logging",
    "multiprocessing", "pickle", "platform", "queue", "random", "secrets", "shutil", "signal", "socket", "sqlite3",
    "statistics", "struct", "subprocess", "tempfile", "threading", "typing", "unittest", "urllib", "uuid",
)  # fmt: skip
LIBRARIES = (
    "accelerate", "bm25s", "click", "cloudpickle", "datasets", "faiss", "filelock", "flax", "fsspec",
    "huggingface_hub", "ir_measures", "jax", "jinja2", "kornia", "numba", "numpy", "packaging", "pandas", "PIL",
    "psutil", "pyarrow", "pymetis", "ray", "requests", "rich", "safetensors", "scipy", "sentence_transformers",
    "sklearn", "sympy", "tensorboard", "tensorflow", "tokenizers", "torch", "torch_geometric", "torchvision", "tqdm",
    "trackio", "transformers", "triton", "typer", "wandb", "yaml",
)  # fmt: skip
MARK = "was-run.txt"
SCRIPT = "import sys\nfrom hardneg.cli.app import main\n\nif __name__ == '__main__':\n    sys.exit(main())\n"


def plant(folder: Path) -> Path:
    """Modules that leave a mark when they are imported, and then fail; their bytecode is none of anything else."""
    mark = f"import builtins, sys\nwith builtins.open({str(folder / MARK)!r}, 'a') as file:\n"
    mark += "    file.write(f'{__file__} {sys.argv}\\n')\nraise ImportError(f'{__file__} was run')\n"
    for name in (*OURS, *STANDARD, *LIBRARIES):
        (folder / f"{name}.py").write_text(mark)
    return folder


def was_run(folder: Path) -> str:
    return (folder / MARK).read_text() if (folder / MARK).exists() else ""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A current folder with such modules, and data beside them."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "hardneg").write_text(SCRIPT)  # as pip installs it
    folder = plant_data(tmp_path / "data")
    return plant(folder)


def plant_data(folder: Path) -> Path:
    folder.mkdir()
    numbers = np.random.default_rng(0)
    images = numbers.integers(0, 255, (96, 8, 8), dtype=np.uint8)
    np.savez(folder / "images.npz", images=images, labels=np.arange(96) % 4)
    vectors = numbers.standard_normal((90, 8)).astype(np.float32)
    np.save(folder / "corpus.npy", vectors)
    np.save(folder / "queries.npy", vectors[:30] + 0.1)
    (folder / "pairs.csv").write_text("query_id,corpus_id\n" + "".join(f"{row},{row}\n" for row in range(30)))
    rows = [{"query": f"question {row}", "positive": f"answer {row} of {row % 7}"} for row in range(30)]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def ran(folder: Path, *arguments: str) -> str:
    """What a verb prints that is started as ``hardneg``; it must succeed and run nothing of this folder."""
    command = [sys.executable, str(folder.parent / "bin" / "hardneg"), *arguments]
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    paths = os.pathsep.join([str(Path(hardneg.__file__).parents[1]), *map(os.path.abspath, others)])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    environment.pop("PYTHONSAFEPATH", None)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert was_run(folder) == "", arguments
    assert done.returncode == 0, f"{arguments}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


SHORT = ["--data", "npz:images.npz", "--epochs", "1", "--batch-size", "32"]
COMPARE = ["compare", "--arm", "simclr()", "--arm", "hcl()", "--seeds", "2", *SHORT, "--out", "runs/compared"]
MINE = ["mine", "queries.npy", "--corpus-embeddings", "corpus.npy", "--judgements", "pairs.csv", "--format", "ids"]
MINE += ["-k", "3", "-n", "Uniform()"]


def test_the_modules_here_would_be_run_by_an_unsafe_python(folder: Path) -> None:
    unsafe = [sys.executable, "-c", "import accelerate"]
    subprocess.run(unsafe, cwd=folder, capture_output=True, check=False)
    assert was_run(folder).startswith(str(folder))


def test_explain_and_mine_run_nothing_of_the_current_folder(folder: Path) -> None:
    assert "Tilt" in ran(folder, "explain", "OtherLabel() * Tilt(1.0)")
    assert "Wrote" in ran(folder, *MINE, "-o", "mined.jsonl", "--jobs", "2", "--shards", "4")


@pytest.mark.long
def test_no_verb_runs_anything_of_the_current_folder(folder: Path) -> None:
    own = folder / "own-code"
    own.mkdir()
    (own / "rules.py").write_text(RULES)
    (own / "encoders.py").write_text(ENCODERS)
    model = _text_model(folder)
    assert "simclr" in ran(folder, *COMPARE, "--jobs", "2")
    ran(folder, "train", "simclr", *SHORT, "--out", "runs/simclr")
    ran(folder, "train", "simclr", *SHORT, "--encoder", "own-code/encoders.py:build", "--out", "runs/own")
    planned = ["--batches", "proximity(num_candidates=20, num_neighbours=10, refresh=2)", "--epochs", "3"]
    ran(folder, "train", "simclr", *SHORT[:2], *SHORT[4:], *planned, "--out", "runs/planned")
    ran(folder, *MINE, "-o", "a.jsonl", "--jobs", "2", "--shards", "4", "--import", "own-code/rules.py")
    texts = ["mine", "texts.jsonl", "-n", "Uniform()", "-k", "2"]
    ran(folder, *texts, "-o", "b.jsonl", "--encoder", "own-code/encoders.py:encode", "--bm25", "--jobs", "2")
    ran(folder, *texts, "-o", "c.parquet", "--model", model, "--jobs", "1")
    ran(folder, "audit", "runs/simclr", "--out", "audited")
    ran(folder, "audit", "a.jsonl", "--corpus-embeddings", "corpus.npy", "--query-embeddings", "queries.npy",
        "--judgements", "pairs.csv", "--out", "mined-audit")  # fmt: skip
    ran(folder, "evaluate", "runs/simclr", "--json")
    ran(folder, "evaluate", "runs/own", "--on", "npz:images.npz", "--run-code")
    ran(folder, "report", "runs/compared", "runs/simclr", "--out", "report.html")
    ran(folder, "export", "runs/simclr", "--format", "safetensors", "--out", "exported")
    ran(folder, "explain")


@pytest.mark.long
def test_ray_workers_run_nothing_of_the_current_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs the extra 'ray'")
    ran(folder, *MINE, "-o", "one.jsonl", "--jobs", "1")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with tempfile.TemporaryDirectory() as sockets:  # a short path, in which no other cluster is found
        monkeypatch.setenv("RAY_TMPDIR", sockets)
        ran(folder, *MINE, "-o", "ray.jsonl", "--engine", "ray", "--jobs", "2", "--shards", "3")
    assert (folder / "ray.jsonl").read_text() == (folder / "one.jsonl").read_text()


RULES = "import hardneg as hn\n"
ENCODERS = """
import numpy as np
from torch import nn

def build(in_channels):
    return nn.Sequential(nn.Flatten(), nn.Linear(64 * in_channels, 8))

def encode(texts):
    return np.stack([np.random.default_rng(len(text) + ord(text[-1])).standard_normal(8) for text in texts])
"""


def _text_model(folder: Path) -> str:
    """A tiny model of sentence-transformers, whose folder names modules to import."""
    pytest.importorskip("sentence_transformers", reason="needs the extra text")
    from support.tiny_bert import tiny_bert

    tiny_bert(folder.parent / "bert").save(str(folder.parent / "model"))
    return str(folder.parent / "model")


# Children of a process that uses the library.


def test_a_run_of_a_comparison_runs_nothing_of_the_current_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate", reason="training needs the extra train")
    monkeypatch.chdir(folder)
    options = RECIPES["simclr"](data="npz:images.npz", epochs=1, batch_size=32, device="cpu")
    result = in_a_process("simclr", options, Run(folder / "run"), {"OMP_NUM_THREADS": "1"})
    assert (result["steps"] > 0, was_run(folder)) == (True, "")


def test_the_planning_process_runs_nothing_of_the_current_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    process = PlanningProcess()
    process._process.stdin.close()  # its jobs are over
    assert process._process.wait(timeout=120) == 0
    assert (was_run(folder), capfd.readouterr().err) == ("", "")


def test_python_is_started_with_a_safe_path_and_pythonpath(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = folder.parent / "mine"
    mine.mkdir()
    (mine / "helper_of_mine.py").write_text("print('mine')\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(mine))
    code = "import helper_of_mine, json"
    assert subprocess.run(python("-c", code), capture_output=True, check=True).stdout.split() == [b"mine"]
    with safe_children():
        plain = [sys.executable, "-c", code]
        assert subprocess.run(plain, capture_output=True, check=True).stdout.split() == [b"mine"]
    assert was_run(folder) == ""


def test_a_function_by_its_module_does_not_put_the_folder_before_what_is_installed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(folder))])
    before = list(sys.path)
    assert load_function("json:dumps", "test") is json.dumps
    assert sys.path == before
    (folder / "encoder_of_mine.py").write_text("import numpy\n\ndef encode():\n    return numpy.pi\n")
    assert load_function("encoder_of_mine:encode", "test")() == np.pi
    assert sys.path == [*before, str(folder)]
    sys.modules.pop("encoder_of_mine")
