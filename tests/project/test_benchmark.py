"""What the benchmark of losses checks before it measures, and how it counts."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

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


AGAINST = f"""
import runpy, sys
sys.path.insert(0, {str(ROOT / "benchmarks" / "against")!r})
import cases, losses
cases.CASES["Ring"] = cases.CASES["Ring"]._replace(sizes=(32, 64, 128))
cases.CASES["SupCon beside PML"] = cases.CASES["SupCon beside PML"]._replace(needs=("no_such_library",))
sys.argv = ["against", "--only", sys.argv[1], "--out", sys.argv[2]]
runpy.run_path({str(ROOT / "benchmarks" / "against" / "__main__.py")!r}, run_name="__main__")
"""


def test_the_comparison_with_peers_skips_a_peer_that_is_not_installed(tmp_path: Path) -> None:
    out = tmp_path / "against.json"
    subprocess.run([sys.executable, "-c", AGAINST, "beside PML", str(out)], check=True, capture_output=True)
    found = json.loads(out.read_text())
    assert list(found["cases"]) == ["SupCon beside PML"]
    assert "no_such_library" in found["cases"]["SupCon beside PML"]["skipped"]


def made_case(cases: ModuleType, **fields: Any) -> None:
    """A case whose work takes as long as its size, and the peer's a tenth longer, by a clock that only work moves."""
    clock = [0.0]

    def both(size: int) -> Any:
        def work(seconds: float) -> Any:
            def done() -> float:
                clock[0] += seconds
                return size * (1.0 if seconds == size else 1.01)

            return done

        return work(size), work(1.1 * size)

    setattr(cases, "_processor_seconds", lambda: clock[0])  # noqa: B010  mypy knows no attributes of a loaded script
    cases.CASES["made"] = cases.Case(both, **fields)


def test_the_comparison_with_peers_takes_the_ratio_of_both_sides() -> None:
    cases = load_script("benchmarks/against/cases.py")
    made_case(cases, goal=1.0, at=(8,))
    figure = cases.measure("made", 8, rounds=3, budget=60.0)
    assert figure == {
        "ours_s": 8.0, "rounds": 3, "theirs_s": 8.8, "ratio": 0.9091, "quartiles": [0.9091] * 2, "difference": 0.009901,
    }  # fmt: skip
    assert cases.summary("made", {8: figure}) == {"met": True}
    assert not cases.summary("made", {8: figure | {"ratio": 1.01}})["met"]
    assert cases.summary("made", {9: figure}) == {}


def test_the_comparison_with_peers_fits_the_growth() -> None:
    cases = load_script("benchmarks/against/cases.py")
    made_case(cases, growth=1.0)
    found = cases.summary("made", {size: {"ours_s": 0.5 * size} for size in (10, 100, 1000)})
    assert found == {"exponent": 1.0, "exponent_of_larger": 1.0, "needed_exponent": 1.0}


def test_the_picture_shows_which_goals_are_met() -> None:
    picture = load_script("benchmarks/against/picture.py").picture
    case = {"goal": 1.0, "at": [20], "unit": "rows", "sizes": {"10": {"ratio": 3.0}, "20": {"ratio": 0.5}}}
    drawn = picture({"some work": case, "without a peer": {"goal": None, "sizes": {"1": {"ours_s": 1.0}}}})
    assert "some work" in drawn
    assert "without a peer" not in drawn
    assert drawn.count("<circle") == 2
    assert "20 rows: 0.50" in drawn
