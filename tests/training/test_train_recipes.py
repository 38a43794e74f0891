"""Every recipe trains with every kind of negatives, and what it records says which negatives they were."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hardneg.core.diagnose import Diagnosis
from hardneg.core.errors import ArgumentError
from hardneg.training.evaluation.embeddings import evaluate_file
from hardneg.training.loop.checks import try_negatives
from hardneg.training.loop.records import final_of
from hardneg.training.loop.runs import Run
from hardneg.training.loop.train import Loop
from hardneg.training.options import RECIPES
from support.errors import raises
from support.training_runs import BATCH_SIZE, NUM_IMAGES, STEPS, assert_same, everything, few_digits, run, short

pytest.importorskip("accelerate", reason="training needs the extra train")

PROXIMITY = "proximity(num_candidates=300, num_neighbours=8, restart=0.3)"
COLUMNS = {"step", "epoch", "loss", *(field.name for field in fields(Diagnosis) if field.name != "counts")}
SUPERVISED = {"num_negatives": "candidates", "reduction": "pairs"}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "simclr": ("simclr", {}),
    "moco v2": ("moco", {"queue": BATCH_SIZE, "momentum": 0.9}),
    "moco v3": ("moco", {"version": "v3", "momentum": 0.9, "head": "mlp", "head_norm": "layer"}),
    "supcon": ("supervised", {"positives_in_denominator": "all"}),
    "scl": ("supervised", SUPERVISED),
    "hscl": ("supervised", {**SUPERVISED, "negatives": "OtherLabel() * Tilt(0.5)"}),
}
ARMS = ("uniform", "tilt", "ring", "proximity")


@dataclass(frozen=True)
class Trained:
    path: Path
    result: dict[str, Any]
    records: list[dict[str, Any]]
    batches: list[list[Any]]  # of each epoch, the positions in each batch

    def column(self, name: str) -> np.ndarray:
        return np.array([math.nan if record[name] is None else record[name] for record in self.records])


class Runs(dict[tuple[str, str], Trained]):
    """Runs of methods and arms, each trained when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.data = folder, few_digits(folder / "digits.npz")

    def __missing__(self, key: tuple[str, str]) -> Trained:
        self[key] = train(self.folder, self.data, *key)
        return self[key]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("recipes"))


def train(folder: Path, data: str, method: str, arm: str) -> Trained:
    recipe, options = METHODS[method]
    factors = {"tilt": "Tilt(1.0)", "ring": "Ring(0.1, 0.5)"}
    before = options.get("negatives", "OtherLabel()" if recipe == "supervised" else None)
    if arm in factors:
        options = options | {"negatives": f"{before} * {factors[arm]}" if before else factors[arm]}
    if arm == "proximity":
        options = options | {"batches": PROXIMITY}
    seen: list[list[Any]] = [[], []]
    step, path = Loop._one_step, folder / f"{method}-{arm}"

    def watched(self: Loop, epoch: int, index: torch.Tensor, *rest: Any) -> None:
        seen[epoch].append(index.numpy())
        step(self, epoch, index, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "_one_step", watched)
        result = run(recipe, path, short(data, learning_rate=2e-3, temperature=0.4, **options))
    return Trained(path, result, Run(path).metrics(), seen)


every_run = pytest.mark.parametrize("arm", ARMS)
every_method = pytest.mark.parametrize("method", METHODS)


@every_method
@every_run
def test_it_learns_and_leaves_a_whole_run(trained: Runs, method: str, arm: str) -> None:
    one = trained[method, arm]
    loss = one.column("loss")
    assert np.isfinite(loss).all()
    # MoCo's queue is empty at step 1, which costs nothing. Hard batches cost more: the uniform epoch is looked at.
    begin, end = (1 if method == "moco v2" else 0), (STEPS if arm == "proximity" else 2 * STEPS)
    falls = 0.1 if method != "moco v3" else 0.1 / (4.0 * 0.4)  # of a loss that is 4 * temperature times as steep
    assert loss[end - 2 : end].mean() < loss[begin] - falls
    assert [record["step"] for record in one.records] == list(range(1, 2 * STEPS + 1))
    assert [record["epoch"] for record in one.records] == [0] * STEPS + [1] * STEPS
    assert all(record.keys() == COLUMNS for record in one.records)
    assert one.result["steps"] == 2 * STEPS
    assert one.result["final"] == final_of(one.records)
    assert Run(one.path).result() == one.result
    for batches in one.batches:  # each image once an epoch
        assert sorted(np.concatenate(batches).tolist()) == list(range(NUM_IMAGES))


@every_method
def test_the_run_directory_evaluates(trained: Runs, method: str) -> None:
    one = trained[method, "tilt"]
    again = evaluate_file(one.path / "embeddings.npz")
    assert again.keys() <= one.result.keys()
    assert {name: one.result[name] for name in again} == again
    assert again["num_train"] == NUM_IMAGES
    assert again["knn"] > 0.3  # chance is 0.1
    assert again["linear"] > 0.5


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("sogclr", {}),
        ("sogclr", {"negatives": "Tilt(1.0)", "batches": PROXIMITY}),
        ("emc2", {}),
        ("emc2", {"forget": True}),
    ],
    ids=["sogclr", "sogclr tilt", "emc2", "emc2 forgets"],
)
def test_losses_over_the_whole_data_set(recipe: str, options: dict[str, Any], tmp_path: Path) -> None:
    data = few_digits(tmp_path / "digits.npz", 160)
    whole = short(data, learning_rate=2e-3, temperature=0.2, **options)
    result = run(recipe, tmp_path / "run", whole)
    records = Run(tmp_path / "run").metrics()
    assert result["linear"] > 0.5
    assert all(record.keys() == COLUMNS for record in records)
    beta = 1.0 if "negatives" in options else 0.0
    assert records[-1]["effective_temperature"] == pytest.approx(0.2 / (1.0 + beta), rel=1e-4)
    # What is recorded is the loss of the batch without the positive in the denominator, not the surrogate's value.
    losses = [record["loss"] for record in records]
    assert losses[0] == pytest.approx(np.log(2 * BATCH_SIZE - 2), abs=1.0)  # all alike at the start
    assert min(losses) < losses[0] - 0.3

    stop = Loop._save
    with pytest.MonkeyPatch.context() as patch:

        def saved(self: Loop) -> None:
            stop(self)
            raise KeyboardInterrupt

        patch.setattr(Loop, "_save", saved)
        with pytest.raises(KeyboardInterrupt):
            run(recipe, tmp_path / "stopped", whole)
    run(recipe, tmp_path / "stopped", whole, resume=True)
    assert_same(everything(tmp_path / "stopped"), everything(tmp_path / "run"))


@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        ("emc2", {"tau_plus": 0.1}, "^emc2 needs --tau-plus of 0, .* got 0.1"),
        ("sogclr", {"tau_plus": 0.1}, "^sogclr needs --tau-plus of 0, .* got 0.1"),
        ("emc2", {"negatives": "Tilt(1.0)"}, r"^emc2 needs --negatives to be Uniform\(\), .* got 'Tilt"),
        ("simclr", {"negatives": "SameCluster()"}, "--negatives for candidates of the batch, .* needs clusters"),
        ("simclr", {"negatives": "From('queue')"}, r"--negatives .* From needs a source among \('batch',\)"),
        ("moco", {"negatives": "From('batch')"}, r"--negatives .* From needs a source among \('queue',\)"),
        ("moco", {"negatives": "From('queue')", "version": "v3"}, r"--negatives .* a source among \('batch',\)"),
        ("sogclr", {"negatives": "BelowPositive(0.1, by='guide')"}, "--negatives .* a second model"),
    ],
)
def test_negatives_that_a_recipe_cannot_weigh(recipe: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        try_negatives(RECIPES[recipe](**options))


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("simclr", {"negatives": "From('batch') * OtherLabel() * Tilt(linear(0.0, 1.0))"}),
        ("supervised", {}),
        ("moco", {"negatives": "From('queue') * Ring(0.1, outer=adaptive(1.0, 0.1))"}),
        ("moco", {"negatives": "From('batch')", "version": "v3"}),
        ("emc2", {"negatives": " Uniform( ) "}),
    ],
)
def test_negatives_that_a_recipe_weighs(recipe: str, options: dict[str, Any]) -> None:
    try_negatives(RECIPES[recipe](**options))
    with pytest.raises(ValueError, match="elsewhere"):
        try_negatives(RECIPES[recipe](**options | {"negatives": "From('elsewhere')"}))


def test_negatives_by_label_need_labels() -> None:
    try_negatives(RECIPES["simclr"](), labelled=False)
    with raises(ArgumentError, who="train", what="--negatives", got="negatives='OtherLabel()':"):
        try_negatives(RECIPES["simclr"](negatives="OtherLabel()"), labelled=False)


def test_a_seed_has_a_highest_value(tmp_path: Path) -> None:
    data = few_digits(tmp_path / "digits.npz", 64)
    run(
        "simclr",
        tmp_path / "run",
        short(data, seed=2**31 - 1, batches="proximity(num_candidates=20, num_neighbours=5)"),
    )
    with raises(ArgumentError, who="train", what="--seed", got="2147483648"):
        RECIPES["simclr"](seed=2**31)


def candidates_of(method: str) -> float | None:
    """How many negatives each anchor has where all are alike; None where it depends on the labels."""
    return {"simclr": 2 * BATCH_SIZE - 2, "moco v3": BATCH_SIZE - 1}.get(method)


@every_method
def test_uniform_negatives_are_as_hard_as_all(trained: Runs, method: str) -> None:
    one = trained[method, "uniform"]
    if method == "hscl":
        assert np.allclose(one.column("effective_temperature"), 0.4 / 1.5, rtol=1e-4)
        return
    assert np.allclose(one.column("effective_temperature")[1:], 0.4, rtol=1e-6)
    count = candidates_of(method)
    if count is not None:
        assert np.allclose(one.column("hardness"), one.column("uniform_hardness"), rtol=1e-5, atol=1e-6)
        assert np.allclose(one.column("effective_number"), count, rtol=1e-5)


@every_method
def test_a_tilt_is_harder_and_a_lower_temperature(trained: Runs, method: str) -> None:
    plain, tilted = trained[method, "uniform"], trained[method, "tilt"]
    beta = 1.5 if method == "hscl" else 1.0
    # The slope of the log-weights is estimated in float32 from similarities near 1 at the start.
    assert np.allclose(tilted.column("effective_temperature")[1:], 0.4 / (1.0 + beta), rtol=1e-4)
    assert (tilted.column("effective_number")[1:] < plain.column("effective_number")[1:]).all()
    # The first loss with negatives has the same weights and the same batch behind it, whatever the negatives.
    first = 1 if method == "moco v2" else 0
    assert tilted.column("uniform_hardness")[first] == plain.column("uniform_hardness")[first]
    assert tilted.column("hardness")[first] > plain.column("hardness")[first]


@every_method
def test_a_ring_is_harder_and_narrower(trained: Runs, method: str) -> None:
    plain, ring = trained[method, "uniform"], trained[method, "ring"]
    first = 1 if method == "moco v2" else 0
    assert ring.column("hardness")[first] > plain.column("hardness")[first]
    share = ring.column("effective_number")[first:] / plain.column("effective_number")[first:]
    assert ((share > 0.3) & (share < 0.5)).all()
    if candidates_of(method) is not None:
        count = candidates_of(method)
        assert np.allclose(ring.column("effective_number"), int(0.5 * count) - int(0.1 * count), rtol=1e-5)


@every_method
def test_proximity_batches_are_more_similar(trained: Runs, method: str) -> None:
    plain, hard = trained[method, "uniform"], trained[method, "proximity"]
    assert hard.column("loss")[:STEPS].tolist() == plain.column("loss")[:STEPS].tolist()  # the warm-up
    with np.load(hard.path / "embeddings.npz") as file:
        vectors = file["train_x"] / np.linalg.norm(file["train_x"], axis=1, keepdims=True)

    def similarity(batches: list[Any]) -> float:
        return float(np.mean([(vectors[batch] @ vectors[batch].T).mean() for batch in batches]))

    warm, planned = (similarity(batches) for batches in hard.batches)
    uniform = similarity(plain.batches[1])
    assert abs(warm - uniform) < 0.01
    assert planned > uniform + 0.01  # three deviations of the mean of ten uniform batches
    if method != "moco v2":  # its candidates are those of the batch before
        second = slice(STEPS, None)
        assert hard.column("uniform_hardness")[second].mean() > plain.column("uniform_hardness")[second].mean() + 0.05


def test_false_negatives_are_those_of_the_batches(trained: Runs) -> None:
    with np.load(trained["simclr", "uniform"].path / "embeddings.npz") as file:
        labels = file["train_y"]

    def share(batch: Any) -> float:
        same = (labels[batch][:, None] == labels[batch]).sum() - len(batch)
        return float(same / (len(batch) * (len(batch) - 1)))

    for arm in ("uniform", "proximity"):
        one = trained["simclr", arm]
        expected = [share(batch) for batches in one.batches for batch in batches]
        assert np.allclose(one.column("false_negatives"), expected, atol=1e-6)
    hard, plain = (trained["simclr", arm].column("false_negatives")[STEPS:].mean() for arm in ("proximity", "uniform"))
    assert hard > plain + 0.02
    for method in ("supcon", "scl", "hscl"):
        assert (trained[method, "uniform"].column("false_negatives") == 0.0).all()
