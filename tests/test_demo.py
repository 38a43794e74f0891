"""The scripts beside the library run: the demo on little data, and what the benchmark checks before it measures."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import hardneg as hn

ROOT = Path(__file__).resolve().parent.parent
SMALL = {"seeds": 1, "epochs": 5, "batch_size": 64, "train_images": 512, "neighbours": 5}
needs_extras = pytest.mark.skipif(
    importlib.util.find_spec("sklearn") is None or importlib.util.find_spec("matplotlib") is None,
    reason="the demo needs the extras eval and report",
)


def run_demo(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "experiments" / "demo.py"), *flags],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"COLUMNS": "100"} | environment,
    )


def load_script(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@needs_extras
def test_the_demo_trains_and_leaves_its_figures(tmp_path):
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    done = run_demo(f"--out={tmp_path / 'new' / 'demo'}", *flags)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "new" / "demo" / "results.json").read_text())

    picture = (tmp_path / "new" / "demo" / "demo.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 20_000

    assert results["versions"]["torch"] == torch.__version__
    assert results["versions"]["hardneg"] == hn.__version__
    assert "experiments/demo.py" in results["command"]
    assert "--train-images=512" in results["command"]
    assert results["options"] | SMALL == results["options"]
    assert [arm["name"] for arm in results["arms"]] == ["SimCLR 0.5", "SimCLR 0.25", "HCL 0.5"]
    untuned, untilted, tilted = (arm["runs"][0] for arm in results["arms"])

    for run in (untuned, untilted, tilted):
        first, final = run["history"][0], run["final"]
        assert first["knn"] == untuned["history"][0]["knn"]  # the same weights to begin with
        assert final["knn"] > first["knn"] + 0.03  # measured: 0.07 to 0.11
        assert final["knn"] > 0.65  # chance is 0.1
        assert [seen["epoch"] for seen in run["history"]] == [0, 2, 4, 5]
        assert final["loss"] < run["history"][1]["loss"]
        assert final["cpu_seconds"] > 0

    assert untuned["final"]["effective_temperature"] == pytest.approx(0.5)
    assert untilted["final"]["effective_temperature"] == pytest.approx(0.25)
    assert tilted["final"]["effective_temperature"] == pytest.approx(0.25, rel=1e-3)
    for run in (untuned, untilted):
        assert run["final"]["hardness"] == pytest.approx(run["final"]["uniform_hardness"])
        assert run["final"]["clamped"] == 0
    assert tilted["final"]["hardness"] > tilted["final"]["uniform_hardness"] + 0.1
    assert tilted["final"]["false_negatives"] > 1.5 * untuned["final"]["false_negatives"]
    assert tilted["tilts"][3]["beta"] == 1.0
    assert tilted["tilts"][3]["hardness"] == pytest.approx(tilted["final"]["hardness"], rel=1e-5)

    assert results["verdict"]["outcome"] == "unknown"  # one seed has no spread
    said = " ".join(done.stdout.split())
    assert results["verdict"]["sentence"] in said
    for arm in results["arms"]:
        assert f"{100 * arm['runs'][0]['final']['knn']:.1f}" in said


@needs_extras
@pytest.mark.parametrize(
    ("tilted", "untilted", "outcome"),
    [
        ((0.90, 0.91, 0.92), (0.87, 0.88, 0.89), "beats"),
        ((0.90, 0.91, 0.92), (0.87, 0.88, 0.90), "tie"),
        ((0.84, 0.85, 0.86), (0.87, 0.88, 0.89), "loses"),
        ((0.99,), (0.10,), "unknown"),
    ],
)
def test_the_demo_claims_no_gain_within_the_spread_of_the_seeds(tilted, untilted, outcome):
    demo = load_script("experiments/demo.py")
    runs = {
        arm.name: [{"history": [{"knn": value}], "final": {"knn": value}} for value in values]
        for arm, values in ((demo.TILTED, tilted), (demo.UNTILTED, untilted))
    }
    judged = demo.judge(runs)
    assert judged["outcome"] == outcome
    gain = 100 * (sum(tilted) / len(tilted) - sum(untilted) / len(untilted))
    assert f"{gain:+.1f} points" in judged["sentence"]


@needs_extras
def test_the_views_of_the_demo_differ_image_by_image():
    demo = load_script("experiments/demo.py")
    options = demo.Options(noise=0.0)
    dot = torch.zeros(1, 1, 8, 8)
    dot[..., 2:5, 2:6] = 1.0
    views = demo.two_views(dot.repeat(6, 1, 1, 1), options, torch.Generator().manual_seed(0))
    assert views.shape == (12, 1, 8, 8)
    assert torch.pdist(views.flatten(1)).min() > 1e-2
    again = demo.two_views(dot.repeat(6, 1, 1, 1), options, torch.Generator().manual_seed(0))
    torch.testing.assert_close(views, again, rtol=0, atol=0)
    still = demo.Options(noise=0.0, shift=0.0, rotation=0.0, zoom=0.0)
    torch.testing.assert_close(demo.moved(dot, still, torch.Generator()), dot)


@needs_extras
def test_the_neighbours_of_the_demo_vote():
    demo = load_script("experiments/demo.py")
    known, asked = torch.eye(4), torch.tensor([[1.0, 0.1, 0.0, 0.0], [0.0, 0.0, 0.1, 1.0]])
    digits = {"train": known, "train_labels": torch.tensor([3, 3, 5, 7])}
    digits |= {"moved": asked, "moved_labels": torch.tensor([3, 7]), "test": asked, "test_labels": torch.tensor([3, 5])}
    assert demo.knn_accuracy(torch.nn.Identity(), digits, neighbours=2) == {"knn": 1.0, "knn_as_given": 0.5}


@needs_extras
@pytest.mark.parametrize(
    "flags", [("--train-images=1500",), ("--batch-size=512", "--train-images=256"), ("--seeds=0",), ("--epochs=0",)]
)
def test_the_demo_refuses_what_it_cannot_do(flags, monkeypatch, capsys):
    demo = load_script("experiments/demo.py")
    monkeypatch.setattr(sys, "argv", ["demo.py", *flags])
    with pytest.raises(SystemExit) as stopped:
        demo.read_options()
    assert stopped.value.code == 2
    name = flags[0].removeprefix("--").split("=")[0].replace("-", "_")
    assert f"demo.py needs {name} in [" in capsys.readouterr().err


def test_the_demo_names_the_extras_it_misses(tmp_path):
    (tmp_path / "sklearn.py").write_text("raise ImportError('not here', name='sklearn')")
    (tmp_path / "matplotlib.py").write_text("raise ImportError('not here', name='matplotlib')")
    done = run_demo(f"--out={tmp_path}", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "pip install 'hardneg[eval,report]'" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "results.json").exists()


def test_the_benchmark_compares_equal_losses():
    pytest.importorskip("pytorch_metric_learning", reason="the benchmark's peer is not installed (extra bench)")
    benchmark = load_script("benchmarks/dense_loss.py")
    assert len(benchmark.check_agreement(rows=32, dim=16, temperature=0.2)) == 4


def test_the_benchmark_refuses_to_compare_losses_that_differ(monkeypatch):
    benchmark = load_script("benchmarks/dense_loss.py")
    build = benchmark.build
    colder = {benchmark.PML: lambda temperature: build(benchmark.PLAIN, 0.99 * temperature)}
    monkeypatch.setattr(benchmark, "build", lambda name, t: colder.get(name, lambda t: build(name, t))(t))
    with pytest.raises(AssertionError, match="differ by"):
        benchmark.check_agreement(rows=32, dim=16, temperature=0.2)


def test_the_benchmark_pairs_the_rounds():
    benchmark = load_script("benchmarks/dense_loss.py")

    def rounds(*milliseconds: float, mib: float | None) -> list[dict[str, float | None]]:
        return [{"milliseconds": ms, "clock_milliseconds": 2 * ms, "extra_mib": mib} for ms in milliseconds]

    found = benchmark.summarise({benchmark.OURS: rounds(1, 2, 4, mib=2.0), "other": rounds(10, 40, 20, mib=None)})
    assert found["other"]["milliseconds"] == 20
    assert found["other"]["milliseconds_ratios"] == [10, 20, 5]
    assert found["other"]["milliseconds_ratio"] == 10
    assert found["other"]["extra_mib_ratio"] is None
    assert found[benchmark.OURS]["extra_mib_ratio"] == 1


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak cannot be reset here")
def test_the_benchmark_sees_a_peak_of_memory():
    benchmark = load_script("benchmarks/dense_loss.py")
    before = benchmark.reset_peak()
    torch.ones(16 * 2**20).sum()  # 64 MiB, and gone
    seen = (benchmark.peak() - before) / 2**20
    assert 60 < seen < 72
