"""What a run records: what was trained, its last figures, and whether it collapsed."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hardneg.core.errors import ArgumentError, HardnegWarning
from hardneg.reporting import write_report
from hardneg.training.augmentation import from_transform
from hardneg.training.data.images import load
from hardneg.training.loop import records
from hardneg.training.loop.data_record import fingerprint
from hardneg.training.loop.records import final_of, has_collapsed
from hardneg.training.loop.runs import Run
from hardneg.training.loop.train import train
from hardneg.training.options import RECIPES
from hardneg.training.recipes.simclr import SimCLR
from hardneg.training.recipes.supervised import Supervised
from support.training_runs import everything, options_of, run, short, stop_after

pytest.importorskip("accelerate", reason="training needs the extra train")


# What was trained.


def test_a_run_records_what_was_trained(data: str, whole: Path) -> None:
    trained = Run(whole).config()["trained"]
    train_split = load(data, "train")
    assert trained["data"]["train"] == {
        "images": 96,
        "shape": [1, 8, 8],
        "classes": 10,
        "fingerprint": fingerprint(train_split),
    }
    assert trained["data"]["test"]["images"] == 120
    assert trained["encoder"]["name"] == "tiny"
    assert trained["encoder"]["class"] == "hardneg.training.encoders.Encoder"
    encoder = SimCLR(RECIPES["simclr"](**options_of(data)), train_split, 1).encoder
    assert trained["encoder"]["parameters"] == sum(weights.numel() for weights in encoder.parameters())
    assert "rotate=10.0" in trained["views"]
    result = Run(whole).result()
    assert result is not None
    assert result["trained"] == trained


def test_other_encoders_weights_and_views_have_other_records(data: str, whole: Path, tmp_path: Path) -> None:
    def trained(name: str, recipe: str = "simclr", **options: Any) -> dict[str, Any]:
        run(recipe, tmp_path / name, options_of(data, epochs=1, **options))
        return Run(tmp_path / name).config()["trained"]

    usual = Run(whole).config()["trained"]
    assert trained("same") == usual
    assert trained("seed", seed=1)["encoder"]["initial_weights"] != usual["encoder"]["initial_weights"]
    assert trained("dim", dim=16)["encoder"]["parameters"] < usual["encoder"]["parameters"]
    assert usual["encoder"]["projects"]
    assert trained("views", augment="tiny(rotate=5)")["views"] != usual["views"]
    # The predictor of MoCo v3 is not a part of the encoder that methods are compared by.
    for version in ("v2", "v3"):
        assert trained(version, "moco", version=version, queue=64, head="mlp")["encoder"] == usual["encoder"]


def test_views_of_a_user_are_recorded_by_name(data: str, tmp_path: Path) -> None:
    def mine(image: torch.Tensor) -> torch.Tensor:
        return image + 0.1 * torch.randn_like(image)

    run("simclr", tmp_path, options_of(data, epochs=1), views=from_transform(mine))
    assert "mine" in Run(tmp_path).config()["trained"]["views"]
    assert "0x" not in Run(tmp_path).config()["trained"]["views"]


def test_a_run_does_not_go_on_with_another_encoder(data: str, begun: Path) -> None:
    def build(*what: Any) -> SimCLR:
        method = SimCLR(*what)
        method.encoder = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 32))
        return method

    with pytest.raises(ArgumentError) as error:
        train("simclr", build, RECIPES["simclr"](**options_of(data)), begun, resume=True, quiet=True)
    assert "Encoder with" in error.value.what
    assert error.value.got.endswith("Sequential with 2080 parameters")


# Further records at chosen moments, and the seconds of each part.


def test_similarities_and_the_exact_loss_are_those_of_the_step(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ProSampler, Fig. 7: pairs of a batch, by loops in float64; the exact loss of the final weights."""
    last: dict[int, Any] = {}
    diagnose = SimCLR.diagnose

    def watched(self: SimCLR, bins: int = 0) -> Any:
        if bins:
            last[len(last)] = self.last
        return diagnose(self, bins)

    monkeypatch.setattr(SimCLR, "diagnose", watched)
    options = options_of(data, record="similarities, global_loss", record_at="2,9", temperature=0.3)
    result = run("simclr", tmp_path, options)
    found = [record for record in Run(tmp_path).metrics() if "similarities" in record]
    assert [(one["step"], one["epoch"]) for one in found] == [(2, 0), (9, 2)]
    for record, (z1, z2, ids, labels) in zip(found, last.values(), strict=True):
        assert record["similarities"] == counted_by_loops(z1, z2, ids.tolist(), labels.tolist())
    state = Run(tmp_path).load()
    assert state is not None
    items = load(data, "train").prepared(RECIPES["simclr"](**options))
    method = SimCLR(RECIPES["simclr"](**options), items, 9)
    method.load_state_dict(state["method"])
    method.double().eval()
    with torch.no_grad():
        views = torch.cat(items.views(torch.arange(96), 2, 0)).double()
        z = torch.nn.functional.normalize(method.encoder(views), dim=1)
        s = z @ z.T / 0.3
        loss = torch.logsumexp(s.fill_diagonal_(-float("inf")), 1) - s[torch.arange(192), torch.arange(192).roll(96)]
    assert found[-1]["global_loss"] == pytest.approx(loss.mean().item(), rel=1e-5)
    assert result["final"]["records"] == 3, "moments are not records of the loss"
    page = write_report(tmp_path).read_text()
    for record in found:
        counts = record["similarities"]["positives"]
        mean = sum(n * (2 * i - 99) / 100 for i, n in enumerate(counts)) / sum(counts)  # of the middles of the bins
        assert f"step {record['step']}: positives have mean similarity {mean:.3f}" in page


def counted_by_loops(z1: torch.Tensor, z2: torch.Tensor, ids: list[int], labels: list[int]) -> dict[str, list[int]]:
    rows, b = torch.cat([z1, z2]).detach().double(), len(z1)
    found = {name: [0] * 100 for name in ("positives", "negatives", "false_negatives")}
    for i in range(2 * b):
        for j in range(2 * b):
            place = min(99, int((float(rows[i] @ rows[j]) + 1.0) * 50))
            if i != j and i % b == j % b:
                found["positives"][place] += 1
            elif ids[i % b] != ids[j % b]:
                found["negatives"][place] += 1
                found["false_negatives"][place] += labels[i % b] == labels[j % b]
    return found


def test_recording_does_not_change_the_run(data: str, whole: Path, tmp_path: Path) -> None:
    run("simclr", tmp_path, options_of(data, record="similarities,global_loss", record_at="4"))
    before, after = everything(whole), everything(tmp_path)
    assert [one for one in Run(tmp_path).metrics() if "loss" in one] == Run(whole).metrics()
    assert before["embeddings"].keys() == after["embeddings"].keys()
    assert all((before["embeddings"][key] == after["embeddings"][key]).all() for key in before["embeddings"])


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("simclr", {"record": "losses"}),
        ("simclr", {"record": "similarities", "record_at": "0"}),
        ("simclr", {"record": "similarities", "record_at": "one"}),
        ("simclr", {"record": "similarities", "record_at": "1,1000"}),
        ("supervised", {"record": "global_loss"}),
        ("cmc", {"record": "global_loss"}),
    ],
)
def test_wrong_moments_are_refused_before_training(
    recipe: str, options: dict[str, Any], data: str, tmp_path: Path
) -> None:
    with pytest.raises(ArgumentError) as raised:
        run(recipe, tmp_path / "run", options_of(data, **options))
    assert raised.value.what.startswith("--record")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("recipe", "options"),
    [("moco", {"queue": 64}), ("moco", {"version": "v3"}), ("sogclr", {}), ("isogclr", {}), ("instance", {})],
)
def test_other_recipes_record_moments(recipe: str, options: dict[str, Any], data: str, tmp_path: Path) -> None:
    run(recipe, tmp_path, options_of(data, epochs=1, record="similarities,global_loss", **options))
    found = [record for record in Run(tmp_path).metrics() if "global_loss" in record]
    assert [one["step"] for one in found] == [1, 2, 3]
    assert all(np.isfinite(one["global_loss"]) for one in found)
    assert sum(found[-1]["similarities"]["positives"]) >= 32


def test_the_seconds_of_the_parts_add_up(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = options_of(data, batches="proximity(num_candidates=20, num_neighbours=5, refresh=2, encode=True)")
    with monkeypatch.context() as patch:
        stop_after(2, patch)
        with pytest.raises(KeyboardInterrupt):
            run("simclr", tmp_path, options)
    before = Run(tmp_path).load()["epoch_seconds_of"]  # type: ignore[index]
    result = run("simclr", tmp_path, options, resume=True)
    parts = result["seconds_of"]
    assert set(parts) == {"sampling", "graph", "encoding", "views", "recording", "training"}
    assert sum(parts.values()) == pytest.approx(sum(result["epoch_seconds"]), abs=1e-3)
    assert all(parts[name] > before[name] > 0.0 for name in before), "the seconds of the stopped attempt count"


def test_a_part_inside_another_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 3.0, 10.0])
    monkeypatch.setattr("hardneg.training.loop.records.time.perf_counter", lambda: next(times))
    seconds = records.Seconds({"views": 0.5})
    with seconds.part("graph"), seconds.part("encoding"):
        pass
    wanted = {"sampling": 0.0, "graph": 8.0, "encoding": 2.0, "views": 0.5, "recording": 0.0, "training": 1.5}
    assert seconds.of_run(12.0) == wanted


# Collapse and final figures.


def test_a_collapsed_run_warns_and_is_marked(data: str, whole: Path, tmp_path: Path) -> None:
    def dead(*what: Any) -> SimCLR:
        method = SimCLR(*what)
        head = method.encoder.head
        assert isinstance(head, torch.nn.Sequential)
        head.append(torch.nn.BatchNorm1d(32))  # whose scale of 0 leaves the same vector for all
        torch.nn.init.zeros_(head[-1].weight)
        torch.nn.init.ones_(head[-1].bias)
        for weights in method.encoder.parameters():
            weights.requires_grad_(False)
        head[-1].bias.requires_grad_(True)
        return method

    options = RECIPES["simclr"](**options_of(data))
    with pytest.warns(HardnegWarning, match=r"has collapsed: .*similarity .*1.000.* loss of 4.143"):
        result = train("simclr", dead, options, tmp_path / "dead", quiet=True)
    assert result["collapsed"] is True
    good = Run(whole).result()
    assert good is not None
    assert good["collapsed"] is False


@pytest.mark.parametrize(
    ("recipe", "spread", "collapsed"), [("simclr", 0.03, True), ("supervised", 0.03, False), ("supervised", 0.0, True)]
)
def test_classes_that_begin_close_together_have_not_collapsed(
    recipe: str, spread: float, collapsed: bool, data: str, tmp_path: Path
) -> None:
    """As SupCon's in its first steps: their similarity is 0.999, from which the loss recovers."""

    def close(*what: Any) -> Any:
        method = {"simclr": SimCLR, "supervised": Supervised}[recipe](*what)
        head: Any = method.encoder.head
        head.append(torch.nn.BatchNorm1d(32))
        torch.nn.init.constant_(head[-1].weight, spread)
        torch.nn.init.ones_(head[-1].bias)
        for weights in method.encoder.parameters():
            weights.requires_grad_(False)
        head[-1].bias.requires_grad_(True)
        return method

    options = RECIPES[recipe](**short(data, epochs=1, learning_rate=0.0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HardnegWarning)
        result = train(recipe, close, options, tmp_path / "close", quiet=True)
    assert 0.998 < result["final"]["uniform_hardness"] < 1.001
    assert result["collapsed"] is collapsed


def test_hardness_and_false_negatives_are_means(whole: Path) -> None:
    every, result = Run(whole).metrics(), Run(whole).result()
    assert result is not None
    final = result["final"]
    assert final["records"] == 3
    for name in ("hardness", "false_negatives", "loss"):
        assert final[name] == pytest.approx(np.mean([record[name] for record in every[-3:]]))
        assert final[name] != every[-1][name]
    assert final["step"] == every[-1]["step"]


def test_final_figures_of_records_without_answers() -> None:
    records = [{"step": step, "hardness": 0.1 * step, "false_negatives": None} for step in range(1, 101)]
    final = final_of(records)
    assert final["records"] == 10
    assert final["hardness"] == pytest.approx(0.1 * 95.5)
    assert final["false_negatives"] is None
    assert final_of(records[:1])["records"] == 1
    assert not has_collapsed(final)


@pytest.mark.parametrize(
    ("final", "collapsed"),
    [
        ({"uniform_hardness": 0.99, "loss": 4.1, "effective_number": 62.0}, True),
        (
            {"uniform_hardness": 0.99, "loss": 3.0, "effective_number": 62.0},
            False,
        ),  # a low temperature tells them apart
        ({"uniform_hardness": 0.2, "loss": 4.1, "effective_number": 62.0}, False),  # the loss of a first step
        ({"uniform_hardness": None, "loss": 4.1, "effective_number": 62.0}, False),
    ],
)
def test_collapse_is_similarity_and_loss(final: dict[str, Any], collapsed: bool) -> None:
    assert has_collapsed(final) is collapsed


def test_a_whole_run_warns_of_nothing(data: str, tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", HardnegWarning)
        run("simclr", tmp_path, options_of(data, epochs=1))
    assert not [one for one in caught if issubclass(one.category, HardnegWarning)]
