"""The studies of the papers run from one command each and leave figures and a plot; here on little data."""

from __future__ import annotations

import argparse
import gzip
import importlib
import importlib.util
import json
import lzma
import sys
from pathlib import Path

import pytest

import hardneg.comparing.runs
from hardneg.training.recipes import run_recipe
from support.graphs import graph_file
from support.texts import sentences, sts_file, vector_file

pytest.importorskip("matplotlib", reason="the studies plot")
pytest.importorskip("sklearn", reason="the digits come with scikit-learn")

FOLDER = Path(__file__).parents[2] / "experiments"


def run(
    name: str, arguments: list[str], out: Path, monkeypatch: pytest.MonkeyPatch, *, plots: bool = True
) -> dict[str, dict[str, object]]:
    spec = importlib.util.spec_from_file_location(f"study_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", [name, "--out", str(out), *arguments])
    module.main()
    assert not plots or (out / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    found: dict[str, dict[str, object]] = json.loads((out / "results.json").read_text(), parse_constant=pytest.fail)
    return found


@pytest.fixture
def few_sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """$HARDNEG_DATA with a few sentences of each set, and runs of comparisons in this process."""
    texts, topics = sentences(60)
    for name in ("sentences", "sts", "textcls"):
        (tmp_path / "data" / name).mkdir(parents=True)
    with lzma.open(tmp_path / "data/sentences/wiki_en_sentences.tsv.xz", "wt", encoding="utf-8") as file:
        file.writelines(f"{i // 5}\t{text}\n" for i, text in enumerate(texts))
    with gzip.open(tmp_path / "data/sts/sts.tsv.gz", "wt", encoding="utf-8") as file:
        file.write(Path(sts_file(tmp_path / "sts.tsv").partition(":")[2]).read_text())
    rows = [
        f"toy\t{('train', 'test')[i % 2]}\t{topic}\t{text}"
        for i, (text, topic) in enumerate(zip(texts, topics, strict=True))
    ]
    with gzip.open(tmp_path / "data/textcls/textcls.tsv.gz", "wt", encoding="utf-8") as file:
        file.write("\n".join(["task\tsplit\tlabel\ttext", *rows]))
    for module in ("sentences", "simcse", "quick_thoughts"):
        monkeypatch.setattr(importlib.import_module(module), "DATA", tmp_path / "data")
    monkeypatch.setattr(
        hardneg.comparing.runs,
        "in_a_process",
        lambda recipe, options, one, environ, **_: run_recipe(recipe, options, one.path, quiet=True),
    )


@pytest.mark.filterwarnings("ignore::hardneg.core.errors.HardnegWarning")  # of clamped terms, which the study counts
@pytest.mark.usefixtures("few_sentences")
def test_simcse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import simcse

    where = ["--out", str(tmp_path / "runs"), "--result", str(tmp_path / "found.json"), "--jobs", "1"]
    monkeypatch.setattr(simcse, "ARMS", {name: simcse.ARMS[name] for name in ("InfoNCE", "debiased")})
    small = ["--sentences", "50", "--batch-size", "16", "--seeds", "2"]
    monkeypatch.setattr(sys, "argv", ["simcse", "static", *small, *where])
    simcse.main()
    found = json.loads((tmp_path / "found.json").read_text(), parse_constant=pytest.fail)["encoders"]["static"]
    assert found["after"].keys() == simcse.ARMS.keys()
    assert len(found["before"]["sts"]["seeds"]) == len(found["after"]["InfoNCE"]["sts"]["seeds"]) == 2
    assert min(found["after"]["debiased"]["clamped"]) > 0.5 > max(found["after"]["InfoNCE"]["clamped"])


@pytest.mark.usefixtures("few_sentences")
def test_quick_thoughts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import quick_thoughts
    from sentences import articles, write_lines

    lines = write_lines(tmp_path / "lines.txt", articles(50))
    mixed = list(quick_thoughts.shuffled(articles(50)))
    assert [len(one) for one in mixed] == [len(one) for one in articles(50)]
    assert {text for one in mixed for text in one} == {text for one in articles(50) for text in one}
    options = argparse.Namespace(epochs=1, tasks=["toy"])
    arms = ("untrained", "quick-thoughts")
    monkeypatch.setitem(quick_thoughts.ARMS, "quick-thoughts", {"batch_size": 16})
    found = {(arm, 0): quick_thoughts.measured(arm, 0, lines, tmp_path, options) for arm in arms}
    table = quick_thoughts.table(found)
    assert table["untrained"]["mean"]["mean"] > 50.0, "three topics with words of their own"
    assert table["quick-thoughts"]["tasks"].keys() == {"toy"}


def test_clip_embeddings(tmp_path: Path) -> None:
    import clip_embeddings

    vector_file(tmp_path / "vectors_100.npz")
    data = {"data": f"embeddings:{tmp_path / 'vectors_100.npz'}", "epochs": 1}
    options = clip_embeddings.CLIPOptions(**data)
    splits = clip_embeddings.VectorPairs.splits(options)
    assert clip_embeddings.least_squares(splits) > 0.9, "the second vectors are a linear map of the first"
    assert clip_embeddings.untrained(options, splits) < 0.5


def test_ring_mutual_information(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--seeds", "1", "--epochs", "1", "--points", "200", "--num-draws", "20", "--passes", "2"]
    found = run("ring_mutual_information", arguments, tmp_path, monkeypatch)
    assert found["true"] == pytest.approx(0.02041, abs=1e-5)
    assert set(found["results"]) == {"0", "10", "25", "50", "75", "90", "95"}


def test_gradient_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--seeds", "1", "--items", "24", "--num-batches", "6", "--warm-up", "1", "--pretraining", "2"]
    found = run("gradient_error", [*arguments, "--batch-sizes", "4,12"], tmp_path, monkeypatch, plots=False)
    assert len(found["results"]) == 8
    assert all(set(sizes) == {"4", "12"} for sizes in found["results"].values())
    simclr = found["runs"]["SimCLR"]
    assert 0.0 < simclr["12"][0]["variance"] < simclr["4"][0]["variance"]


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="the experiment plots")
    import limits

    monkeypatch.setattr(sys, "argv", ["limits.py", "--out", str(tmp_path / "limits.svg")])
    limits.main()
    assert (tmp_path / "limits.svg").read_text().lstrip().startswith("<?xml")
    assert "Theorem 4, ten classes on a circle, smallest: value 0.382" in capsys.readouterr().out


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
