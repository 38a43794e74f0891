"""What the benchmark of losses checks before it measures, and how it counts."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load_script(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


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


PEAK = """
import dense_loss
import torch
before = dense_loss.reset_peak()
torch.ones(16 * 2**20).sum()  # 64 MiB, and gone
print((dense_loss.peak() - before) / 2**20)
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak cannot be reset here")
def test_the_benchmark_sees_a_peak_of_memory():
    """In a process of its own: in this one, memory that other tests left may be freed between the two readings."""
    paths = os.pathsep.join([str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", PEAK], env=environment, capture_output=True, text=True, check=True)
    assert 60 < float(done.stdout) < 72


def test_the_comparison_with_peers_measures_equal_results():
    against = load_script("benchmarks/against.py")
    figure = against.measure("Ring", size=32, rounds=1, threads=1)
    assert figure["ratio"] == pytest.approx(figure["ours_s"] / figure["theirs_s"])
    assert figure["difference"] < 1e-5
    assert against.differs((1.0, 2.0), (1.0, 1.0)) == 1.0


def test_the_comparison_with_peers_skips_a_peer_that_is_not_installed(monkeypatch):
    against = load_script("benchmarks/against.py")
    monkeypatch.setitem(against.CASES, "Ring", against.CASES["Ring"]._replace(needs=("no_such_library",)))
    assert "no_such_library" in against.measure_case("Ring", None)["skipped"]


def test_the_comparison_with_peers_fits_the_growth():
    against = load_script("benchmarks/against.py")
    assert against.exponent([10, 100, 1000], [0.3, 3.0, 30.0]) == pytest.approx(1.0)
