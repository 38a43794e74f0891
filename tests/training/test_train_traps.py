"""What went wrong in training without a word: weights that are not finite, batches that never begin, lost schedules."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hardneg.core.errors import ArgumentError, FileError, HardnegWarning, NotFinite, forget_warnings
from hardneg.io.embeddings import load_embeddings
from hardneg.training.data.images import load
from hardneg.training.loop.checks import check_words
from hardneg.training.loop.runs import Run
from hardneg.training.options import RECIPES
from hardneg.training.recipes.sogclr import SogCLRMethod
from support.errors import raises
from support.training_runs import few_digits, run, short

Accelerator = pytest.importorskip("accelerate", reason="training needs the extra train").Accelerator


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return few_digits(tmp_path_factory.mktemp("data") / "digits.npz")


def test_weights_that_are_not_finite_are_never_saved(data: str, tmp_path: Path) -> None:
    """Also where no loss is looked at before the end of an epoch."""
    with raises(NotFinite, who="train", got="NaN or infinite weights at step 10"):
        run("simclr", tmp_path / "run", short(data, learning_rate=1e30, log_every=1000))
    assert Run(tmp_path / "run").load() is None


def test_alignment_is_among_the_figures(data: str, tmp_path: Path) -> None:
    result = run("simclr", tmp_path / "run", short(data))
    assert 0.0 < result["alignment"] < 2.0
    again = run("simclr", tmp_path / "again", short(data))
    assert again["alignment"] == result["alignment"]


def test_runs_of_one_process_may_differ_in_precision(data: str, tmp_path: Path) -> None:
    """Accelerate remembers the precision of a process, and refuses another: in a notebook, of the second run."""
    state = pytest.importorskip("accelerate.state").AcceleratorState
    before = dict(state._shared_state)
    state._reset_state()
    try:
        losses = [
            run("simclr", tmp_path / str(i), short(data, precision=precision, epochs=1))["final"]["loss"]
            for i, precision in enumerate(("no", "bf16", "no"))
        ]
        state._reset_state()
        Accelerator(cpu=True, mixed_precision="bf16")  # somebody else's is not forgotten
        with pytest.raises(ValueError, match="already been initialized"):
            run("simclr", tmp_path / "refused", short(data, precision="no"))
    finally:
        state._reset_state()
        state._shared_state.update(before)
    assert losses[0] == losses[2]
    assert losses[1] == pytest.approx(losses[0], rel=0.1)
    assert losses[1] != losses[0]


def test_an_adaptive_schedule_moves_the_loss_of_sogclr(data: str) -> None:
    options = RECIPES["sogclr"](**short(data, negatives="Tilt(adaptive(0.0, 1.0, rate=0.25))"))
    method = SogCLRMethod(options, load(data, "train"), total=10)
    (schedule,) = method.of_batch.negatives.schedules()
    for reward in (0.0, 1.0, 2.0):
        schedule.observe(reward)  # type: ignore[attr-defined]
    method.set_progress(5, 10)
    assert repr(method.loss.negatives) == repr(method.of_batch.negatives.at(5, 10))
    assert repr(method.loss.negatives) != repr(SogCLRMethod(options, load(data, "train"), 10).negatives.at(5, 10))


def test_sogclr_knows_labels(data: str, tmp_path: Path) -> None:
    result = run("sogclr", tmp_path / "run", short(data, negatives="OtherLabel()"))
    assert result["final"]["false_negatives"] == 0.0


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ("proximity(num_candidates=20, num_neighbours=5, warmup=2)", "more epochs than the warm-up .* epochs=2"),
        ("proximity(num_candidates=0)", "num_candidates"),
        ("proximity(num_candidates=50)", "at most num_candidates=50 neighbours, got num_neighbours=100"),
        ("knn(refresh=2.5)", "a whole number, got refresh=2.5"),
        ("knn(warmup=0.5)", "a whole number, got warmup=0.5"),
        ("knn(coverage='bogus')", "coverage among"),
    ],
)
def test_batches_that_cannot_be_are_reported_at_the_door(batches: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        run("simclr", tmp_path / "run", short("npz:nowhere.npz", batches=batches))


def write_images(folder: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="needs Pillow: pip install 'hardneg[vision]'")
    folder.mkdir(parents=True)
    for number in range(2):
        image.fromarray(np.full((8, 8, 3), 40 * number, dtype=np.uint8)).save(folder / f"{number}.png")


def test_names_of_splits_are_not_classes(tmp_path: Path) -> None:
    for split in ("train", "valid"):
        for name in ("cat", "dog"):
            write_images(tmp_path / "both" / split / name)
            write_images(tmp_path / "alone" / "train" / name) if split == "train" else None
    assert load(f"folder:{tmp_path / 'both'}").classes == ("cat", "dog")
    assert len(load(f"folder:{tmp_path / 'both'}", "test")) == 4
    assert load(f"folder:{tmp_path / 'alone'}", "all").classes == ("cat", "dog")


@pytest.mark.parametrize("content", [b"PK\x03\x04 cut", b"words"])
def test_damaged_files_are_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "torn.npz").write_bytes(content)
    with raises(FileError, who="load_embeddings", path="torn.npz", what="npz file"):
        load_embeddings(tmp_path / "torn.npz")
    with pytest.raises(ValueError, match=r"torn\.npz"):
        load(f"npz:{tmp_path / 'torn.npz'}")


def test_labels_that_are_no_whole_numbers_are_refused(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {"train_x": torch.randn(4, 2).numpy(), "test_x": torch.randn(4, 2).numpy()}
    labels = np.array([0.2, 0.7, 1.2, 1.7])
    np.savez(tmp_path / "x.npz", train_y=labels, test_y=labels, **arrays)
    with raises(ArgumentError, who="load_embeddings", what="or text"):
        load_embeddings(tmp_path / "x.npz")


def test_views_by_any_callable(data: str, tmp_path: Path) -> None:
    """What training and evaluation see is what the callable gives; the same run with the same callable."""
    seen: list[tuple[int, ...]] = []

    def shifted(images: torch.Tensor, ids: torch.Tensor, epoch: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append((len(images), epoch, seed))
        floats = images.float() / 255.0
        return floats, floats.roll(1 + epoch, dims=-1)

    results = [run("simclr", tmp_path / str(i), short(data, seed=5), views=shifted) for i in range(2)]
    assert results[0]["final"] == results[1]["final"]
    assert {(epoch, seed) for size, epoch, seed in seen if size == 32} == {(0, 5), (1, 5)}
    usual = run("simclr", tmp_path / "usual", short(data, seed=5))
    assert usual["final"]["loss"] != results[0]["final"]["loss"]
    with raises(ArgumentError, who="Training", what="32", got="[(32, 1, 8, 8), (32, 1, 8, 8), (32, 1, 8, 8)]"):
        run("simclr", tmp_path / "three", short(data), views=lambda images, *rest: (images.float(),) * 3)


class Plain(torch.nn.Module):
    """An encoder of the user's, without ``features``."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layer, self.shape = torch.nn.Linear(64, 16), shape

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layer(images.flatten(1)).unflatten(1, self.shape)


def test_any_module_is_an_encoder_and_a_wrong_one_is_reported_at_once(data: str, tmp_path: Path) -> None:
    from hardneg.training.loop.train import train
    from hardneg.training.recipes.simclr import SimCLR

    def build(shape: tuple[int, ...], *what: Any) -> SimCLR:
        method = SimCLR(*what)
        method.encoder = Plain(shape)
        return method

    options = RECIPES["simclr"](**short(data))
    result = train("simclr", lambda *what: build((16,), *what), options, tmp_path / "plain", quiet=True)
    assert result["knn"] > 0.5
    with pytest.raises(ArgumentError) as error:
        train("simclr", lambda *what: build((4, 4), *what), options, tmp_path / "square", quiet=True)
    assert error.value.got.startswith("(2, 4, 4) for 2 images")


def test_a_queue_that_is_still_empty_knows_labels(data: str, tmp_path: Path) -> None:
    """MoCo with negatives of other labels, from its first step on."""
    result = run("moco", tmp_path / "run", short(data, queue=4096, negatives="OtherLabel() * Tilt(1.0)"))
    assert result["final"]["false_negatives"] == 0.0
    assert result["final"]["effective_number"] > 100


@pytest.mark.parametrize("recipe", ["simclr", "moco"])
def test_negatives_that_need_labels_are_refused_where_there_are_none(recipe: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", images=np.random.default_rng(0).integers(0, 255, (64, 8, 8), dtype=np.uint8))
    options = short(f"npz:{tmp_path / 'data.npz'}", negatives="OtherLabel()")
    with raises(ArgumentError, who="train", what="--negatives", got="negat"):
        run(recipe, tmp_path / "run", options)
    assert Run(tmp_path / "run").metrics() == []


@pytest.mark.parametrize(
    "options", [{"negatives": "Tilt(linear(1.0, -1.0))"}, {"batches": "proximity(restart=linear(0.1, 2.0))"}]
)
def test_a_schedule_that_would_end_badly_is_refused_at_the_door(options: dict[str, str], tmp_path: Path) -> None:
    with raises(ArgumentError, what="in [0"):
        run("simclr", tmp_path / "run", short("npz:nowhere.npz", **options))


@pytest.mark.parametrize(("batches", "warns"), [("knn()", True), ("proximity()", True), ("uniform()", False)])
def test_emc2_says_that_planned_batches_change_what_its_chains_draw(batches: str, warns: bool) -> None:
    forget_warnings()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        check_words(RECIPES["emc2"](batches=batches))
    assert [one.message.kind for one in found if isinstance(one.message, HardnegWarning)] == [
        "emc2.planned_batches"
    ] * warns
