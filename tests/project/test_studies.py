"""The studies of the papers run from one command each and leave figures and a plot; here on little data."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="the studies plot")
pytest.importorskip("sklearn", reason="the digits come with scikit-learn")

FOLDER = Path(__file__).parents[2] / "experiments"


def run(name: str, arguments: list[str], out: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, object]]:
    spec = importlib.util.spec_from_file_location(f"study_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", [name, "--out", str(out), *arguments])
    module.main()
    assert (out / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    found: dict[str, dict[str, object]] = json.loads((out / "results.json").read_text(), parse_constant=pytest.fail)
    return found


def test_ring_mutual_information(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--seeds", "1", "--epochs", "1", "--points", "200", "--num-draws", "20", "--passes", "2"]
    found = run("ring_mutual_information", arguments, tmp_path, monkeypatch)
    assert found["true"] == pytest.approx(0.02041, abs=1e-5)
    assert set(found["results"]) == {"0", "10", "25", "50", "75", "90", "95"}


def test_emc2_global_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--seeds", "1", "--steps", "60", "--items", "40", "--evaluations", "2"]
    found = run("emc2_global_loss", arguments, tmp_path, monkeypatch)
    curves = found["curves"]
    assert len(curves) == 8
    starts = {curve[0]["loss"][0] for curve in curves.values()}
    assert len(starts) == 1  # the same weights for all
    assert all(curve[0]["loss"][-1] < curve[0]["loss"][0] for curve in curves.values())
