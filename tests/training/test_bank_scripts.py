"""Instance discrimination and CMC, the scripts with memory banks: they learn, and draw what the expression says."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn.functional import normalize

import hardneg as hn

pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
FOLDER = Path(__file__).resolve().parents[2] / "experiments"


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"script_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def run(name: str, out: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> tuple[dict[str, Any], list[Any]]:
    """The result of the script, and its records."""
    module = script(name, monkeypatch)
    monkeypatch.setattr(sys, "argv", [name, "--out", str(out), *flags])
    result: dict[str, Any] = module.main()
    assert json.loads((out / "result.json").read_text()) == result
    return result, [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def loss_of_one_that_tells_nothing_apart(num_draws: int) -> float:
    """NCE where all similarities are equal: P is 1 / N for the positive and for each of the K draws."""
    return math.log(1 + num_draws) + num_draws * math.log1p(1 / num_draws)


@pytest.mark.parametrize(("name", "directions"), [("instance_discrimination", 1), ("cmc", 2)])
def test_a_script_learns(name: str, directions: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result, records = run(name, tmp_path, monkeypatch, "--epochs", "6")
    assert [record["epoch"] for record in records] == list(range(6))
    assert result["options"]["loss"] == "nce"
    assert records[0]["loss"] == 0.0, "the first epoch fills the bank and has nothing to compare with"
    assert records[-1]["loss"] < 0.97 * directions * loss_of_one_that_tells_nothing_apart(128)
    assert records[-1]["loss"] < records[-2]["loss"] < records[-3]["loss"]
    for when in ("before", "after"):
        assert set(result[when]) == {"knn", "1nn", "linear"}
    assert result["after"]["linear"] > 0.9


def test_a_ring_is_falser_than_uniform_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = ("--epochs", "3", "--num-draws", "64")
    _, uniform = run("instance_discrimination", tmp_path / "u", monkeypatch, *few)
    result, ring = run("instance_discrimination", tmp_path / "r", monkeypatch, *few, "--negatives", "Ring(0.0, 0.1)")
    assert result["options"]["loss"] == "softmax", "binary NCE is for uniform noise"
    assert uniform[-1]["false_negatives"] == pytest.approx(0.1, abs=0.01)
    assert ring[-1]["false_negatives"] > 1.15 * uniform[-1]["false_negatives"]


def test_cmc_with_a_ring_is_a_softmax(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result, records = run("cmc", tmp_path, monkeypatch, "--epochs", "2", "--negatives", "Ring(0.5, 1.0)")
    assert result["options"]["loss"] == "softmax"
    assert records[0]["loss"] == 0.0
    assert 0.0 < records[1]["loss"] < 2 * math.log(1 + 128), "the farther half is easier than what tells nothing apart"


@pytest.mark.parametrize("flags", [("--loss", "local-aggregation"), ("--negatives", "SameCluster()")])
def test_clusters_of_the_bank(flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result, records = run(
        "instance_discrimination",
        tmp_path,
        monkeypatch,
        *flags,
        "--clusters",
        "20",
        "--epochs",
        "3",
        "--num-draws",
        "64",
    )
    assert all(math.isfinite(record["loss"]) for record in records)
    assert records[-1]["loss"] > 0
    assert result["after"]["linear"] > 0.9
    if "--negatives" in flags:
        assert records[-1]["false_negatives"] > 0.14, "more than the tenth that chance gives"


@pytest.mark.parametrize("name", ["instance_discrimination", "cmc"])
def test_draws_are_from_the_ring_and_never_the_anchor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = script(name, monkeypatch)
    options = module.Options(num_draws=200, temperature=0.5)
    vectors = normalize(torch.randn(50, 8), dim=-1)
    bank = hn.Bank(60, 8)
    bank.push(hn.Keys(vectors, torch.arange(50)))  # the last ten are not known yet
    ids = torch.tensor([3, 55])
    z = normalize(torch.randn(2, 8), dim=-1)
    clusters = (None,) if name == "instance_discrimination" else ()
    generator = torch.Generator().manual_seed(0)
    drawn = module.draw_ids(z, ids, bank, *clusters, hn.Ring(0.0, 0.2), options, generator)
    assert drawn.shape == (2, 200)
    for i, own in enumerate(ids.tolist()):
        others = [j for j in range(50) if j != own]
        closest = sorted(others, key=lambda j: -float(vectors[j] @ z[i]))[: int(0.2 * len(others))]
        assert set(drawn[i].tolist()) == set(closest)
    assert module.draw_ids(z, ids, hn.Bank(60, 8), *clusters, hn.Uniform(), options, generator) is None


@pytest.mark.parametrize("name", ["instance_discrimination", "cmc"])
def test_a_batch_of_all_that_the_bank_knows_draws_from_the_others(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = script(name, monkeypatch)
    bank = hn.Bank(3, 8)
    z, ids = normalize(torch.randn(3, 8), dim=-1), torch.arange(3)
    bank.push(hn.Keys(z, ids))
    clusters = (None,) if name == "instance_discrimination" else ()
    drawn = module.draw_ids(z, ids, bank, *clusters, hn.Rank(0, 1), module.Options(), torch.Generator().manual_seed(0))
    similarity = (z @ z.T).fill_diagonal_(-2.0)
    assert torch.equal(drawn, similarity.argmax(1)[:, None].expand(3, 128)), "the closest of the others, each time"


def test_aspects_of_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    cmc = script("cmc", monkeypatch)
    colours = torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.5, 0.5, 0.5]])
    known = torch.tensor(
        [[100.0, 0.0, 0.0], [0.0, 0.0, 0.0], [53.24, 80.09, 67.20], [32.30, 79.19, -107.86], [53.39, 0.0, 0.0]]
    )
    found = cmc.lab_of(colours[:, :, None, None])[:, :, 0, 0]
    torch.testing.assert_close(found, known, atol=0.05, rtol=0)
    lightness, colour = cmc.aspects_of(colours[:, :, None, None].expand(-1, -1, 8, 8))
    assert (lightness.shape, colour.shape) == ((5, 1, 8, 8), (5, 2, 8, 8))

    ramp = (torch.arange(8.0) / 8).expand(1, 1, 8, 8)
    _, gradients = cmc.aspects_of(ramp)
    torch.testing.assert_close(gradients[0, 0, :, 1:-1], torch.full((8, 6), 0.5))  # 2 * (2 / 8)
    torch.testing.assert_close(gradients[0, 1], torch.zeros(8, 8))


@pytest.mark.parametrize(
    ("name", "flags", "reported"),
    [
        ("instance_discrimination", ("--loss", "mse"), "--loss is auto, nce, softmax or local-aggregation, got mse"),
        ("instance_discrimination", ("--negatives", "SameCluster()"), "--clusters of at least 1 is needed"),
        ("cmc", ("--loss", "local-aggregation"), "--loss is auto, nce or softmax"),
        *(
            (name, flags, reported)
            for name in ("instance_discrimination", "cmc")
            for flags, reported in [
                (("--epochs", "0"), "--epochs of at least 1 is needed, got 0"),
                (("--batch-size", "0"), "--batch-size of at least 1 is needed, got 0"),
                (("--batch-size", "1438"), "--batch-size of at most the 1437 images of digits is needed, got 1438"),
                (("--negatives", "Rung(0.1)"), "--negatives: 'Rung' is not known. Did you mean Ring?"),
                (("--loss", "nce", "--negatives", "Ring(0.0, 0.5)"), "--loss nce needs uniform noise, got --negatives"),
            ]
        ),
    ],
)
def test_wrong_flags(name: str, flags: tuple[str, ...], reported: str, monkeypatch: Any, capsys: Any) -> None:
    module = script(name, monkeypatch)
    monkeypatch.setattr(sys, "argv", [name, *flags])
    with pytest.raises(SystemExit) as stopped:
        module.main()
    assert stopped.value.code == 2
    assert reported in capsys.readouterr().err
