"""The studies of the papers run from one command each and leave figures and a plot; here on little data."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from support.graphs import graph_file

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


def test_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Two folds and one epoch of every arm on few graphs; a second call trains nothing."""
    pytest.importorskip("accelerate", reason="training needs the extra train")
    spec = importlib.util.spec_from_file_location("study_graphs", FOLDER / "graphs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    (tmp_path / "tu-graphs").mkdir()
    graph_file(tmp_path / "tu-graphs" / "MUTAG.npz", 32)
    monkeypatch.setenv("HARDNEG_DATA", str(tmp_path))
    monkeypatch.setattr(module, "SIZES", {"MUTAG": 32})
    monkeypatch.setattr(module, "FOLDS", 2)
    for study in module.STUDIES.values():
        monkeypatch.setitem(study.common, "epochs", 2)
    arguments = ["graphs", "--out", str(tmp_path / "out"), "--seeds", "1", "--jobs", "1"]
    monkeypatch.setattr(sys, "argv", arguments)
    module.main()
    found = json.loads((tmp_path / "out" / "graphs.json").read_text(), parse_constant=pytest.fail)["accuracy"]["MUTAG"]
    assert len(found) == 1 + 6 + 5
    assert all(0.0 <= row["mean"] <= 100.0 and len(row["seeds"]) == 1 for row in found.values())
    printed = capsys.readouterr().out
    assert "H-SCL Table II, InfoGraph" in printed
    monkeypatch.setattr(module, "run_recipe", lambda *_, **__: pytest.fail("trained again"))
    monkeypatch.setattr(sys, "argv", [*arguments, "--minutes", "0"])
    module.main()
    assert "not begun" not in capsys.readouterr().out
