"""Two processes launched by Accelerate train as one does: the same global batches, losses, keys and parameters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hardneg.training.data.images import ImageData
from hardneg.training.loop.parts import synchronised
from hardneg.training.loop.runs import Run
from hardneg.training.options import MoCoOptions
from hardneg.training.recipes.moco import MoCoV2
from support.image_folders import write_photos
from support.ranks import free_port
from support.training_ranks import run_job
from support.training_runs import BATCH_SIZE, assert_same, everything, few_digits, short

pytest.importorskip("accelerate", reason="training needs the extra train")

ULP = 2.0**-23
LEARNING_RATE = 1e-5
NUM_IMAGES, STEPS = 160, 160 // BATCH_SIZE
# Two ranks make the vectors in batches of half the size, whose convolutions may add in another order, and add the
# gradients of the halves: errors of single ulps of float32. A rectifier that they push over 0 makes a step of it, which
# Adam enlarges, since it divides each gradient by its own size: at a learning rate of 1e-3, one process whose first
# weights are changed by one ulp parts from itself by up to 4e-3 within 20 steps. At 1e-5 and ten steps it does not.
# These are some times the largest deviations of 16 such processes, for each of the methods below (3 ulps, 2e-3, 7e-3);
# wrong scales, anchors or batches would show in the first two digits.
LOSS_TOLERANCE = 16 * ULP
GRADIENT_TOLERANCE = 0.01  # of Adam's first moment, which it does not show in its steps
PARAMETER_TOLERANCE = 0.03  # of the way that Adam can have gone

PROXIMITY = "proximity(num_candidates=150, num_neighbours=8, restart=0.3, refresh=4"
SAME_BATCHES = (
    "uniform",
    "debiased tilt",
    "proximity",
    "moco v2",
    "moco v3",
    "byol",
    "swav",
    "nnclr",
    "fnc",
    "supervised",
    "sogclr",
    "emc2",
    "isogclr",
    "in chunks",
    "iring",
    "cmc",
    "local aggregation",
    "negative cache",
    "files",
)


CUT: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
    ("harvested", (), {"batches": f"{PROXIMITY})", "learning_rate": 1e-3}),
    ("moco v2", ("moco",), {"queue": 100}),
    ("emc2", ("emc2",), {"temperature": 0.3}),
]


def jobs_of(data: str, photos: str) -> list[dict[str, Any]]:
    def job(name: str, recipe: str = "simclr", of: str = data, **options: Any) -> dict[str, Any]:
        return {"name": name, "recipe": recipe, "options": short(of, **{"learning_rate": LEARNING_RATE, **options})}

    return [
        job("uniform"),
        job("debiased tilt", negatives="Tilt(1.0)", tau_plus=0.05),
        job("proximity", batches=f"{PROXIMITY})") | {"fixed_vectors": True},
        job("moco v2", "moco", queue=100),  # not a multiple of the batch
        job("moco v3", "moco", version="v3", head_norm="layer"),
        job("byol", "byol", head_norm="layer"),
        job("swav", "swav", head_norm="layer", num_prototypes=12, queue=64),
        job("nnclr", "nnclr", head_norm="layer", queue=100),
        job("fnc", "fnc", threshold=0.5),
        job("supervised", "supervised", negatives="OtherLabel() * Tilt(1.0)", reduction="pairs", four_losses=True),
        job("sogclr", "sogclr", temperature=0.3),
        job("emc2", "emc2", temperature=0.3),
        job("isogclr", "isogclr", temperature=0.3),
        job("in chunks", encode_chunk=12),  # of 32 views on each of two ranks, and 64 on one
        job("iring", "instance", negatives="Ring(0.0, 0.5)", num_draws=20),
        job("cmc", "cmc", num_draws=20),
        job("local aggregation", "local-aggregation", warmup=0, clusters=10),
        job("negative cache", "negative-cache", cache=100, num_draws=2),
        job("files", of=photos, encoder="tiny", augment="imagenet", cache_images="none", workers=1),
        job("harvested", batches=f"{PROXIMITY})", learning_rate=1e-3),
        *(job(f"{name}, cut", *how, **options) | {"cut_at": STEPS + 2} for name, how, options in CUT),
        job("batch statistics", batches=f"{PROXIMITY}, encode=True)") | {"batch_statistics": True},
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ranks")
    jobs = jobs_of(few_digits(folder / "digits.npz", NUM_IMAGES), write_photos(folder / "photos", 5 * NUM_IMAGES // 4))
    (folder / "jobs.json").write_text(json.dumps(jobs))
    flags = f"--multi_gpu --num_processes 2 --num_machines 1 --main_process_port {free_port()} --mixed_precision no"
    script = Path(__file__).parents[1] / "support" / "training_ranks.py"
    command = [sys.executable, "-m", "accelerate.commands.launch", *flags.split(), "--dynamo_backend", "no"]
    launched = subprocess.Popen(
        [*command, str(script), str(folder / "jobs.json"), str(folder / "two")],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(script.parents[1]), *sys.path])},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    for job in jobs:
        if "batch_statistics" not in job and "cut_at" not in job:
            run_job(job, folder / "one")
    out, errors = launched.communicate(timeout=300)
    assert launched.returncode == 0, errors
    return {"one": folder / "one", "two": folder / "two", "errors": errors + out}


def column(path: Path, name: str) -> np.ndarray:
    return np.array([record[name] for record in Run(path).metrics()], dtype=float)


def tensors(path: Path) -> dict[str, np.ndarray]:
    state = Run(path).load()
    assert state is not None
    return {name: value.numpy() for name, value in state["method"].items() if isinstance(value, torch.Tensor)}


def batches(path: Path) -> list[list[int]]:
    """The global batches, the ranks one after the other."""
    ranks = [json.loads(file.read_text()) for file in sorted(path.glob("batches-*.json"))]
    return [[i for _, index in parts for i in index] for parts in zip(*ranks, strict=True)]


def test_views_of_files_are_those_of_one_process(runs: dict[str, Any]) -> None:
    """Bit by bit, in the order of the global batches."""
    found = [
        [
            [one for part in parts for one in part]
            for parts in zip(*(json.loads(file.read_text()) for file in files), strict=True)
        ]
        for files in (sorted((runs[name] / "files").glob("views-*.json")) for name in ("one", "two"))
    ]
    assert len(found[0]) == 2 * STEPS
    assert found[0] == found[1]


@pytest.mark.parametrize("name", SAME_BATCHES)
def test_losses_and_diagnostics_are_those_of_one_process(runs: dict[str, Any], name: str) -> None:
    one, two = runs["one"] / name, runs["two"] / name
    assert batches(one) == batches(two)
    assert len(list(two.glob("batches-*.json"))) == 2
    losses = column(one, "loss")
    assert len(losses) == 2 * STEPS
    assert np.ptp(losses) > 1000 * LOSS_TOLERANCE  # there is something to agree on
    assert np.allclose(column(two, "loss"), losses, rtol=LOSS_TOLERANCE, atol=0)
    more = ("loss_ucl", "loss_h_scl", "assumption") if name == "supervised" else ()
    for diagnostic in (
        "hardness",
        "uniform_hardness",
        "effective_number",
        "false_negatives",
        "clamped",
        "empty",
        *more,
    ):
        # Similarities are of size 1, whatever their mean; numbers and shares follow their own size.
        expected = column(one, diagnostic)
        tolerance = 32 * ULP * max(1.0, np.nanmax(np.abs(expected)))
        assert np.allclose(column(two, diagnostic), expected, rtol=0, atol=tolerance, equal_nan=True), diagnostic


@pytest.mark.parametrize("name", SAME_BATCHES)
def test_parameters_and_queue_are_those_of_one_process(runs: dict[str, Any], name: str) -> None:
    one, two = tensors(runs["one"] / name), tensors(runs["two"] / name)
    assert one.keys() == two.keys()
    way = LEARNING_RATE * 2 * STEPS
    for key, expected in one.items():
        if expected.dtype.kind == "f":
            # NaN is the step of a loss whose progress was never set.
            assert np.array_equal(np.isnan(two[key]), np.isnan(expected)), key
            with np.errstate(invalid="ignore"):  # -inf is a normaliser that no step has set
                deviation = np.sqrt(np.mean(np.nan_to_num(two[key].astype(float) - expected) ** 2))
            assert deviation < PARAMETER_TOLERANCE * way, key
        else:
            assert np.array_equal(two[key], expected), key  # the ids in the queue, its pointer, the steps taken
    if name == "moco v2":
        ids = [key for key in one if key.startswith("queue") and one[key].dtype.kind == "i" and one[key].size == 100]
        assert ids
        # The queue holds the last hundred keys of the global batches, whichever rank made them.
        assert set(one[ids[0]].tolist()) == set(np.concatenate(batches(runs["two"] / name))[-100:])


@pytest.mark.parametrize("name", SAME_BATCHES)
def test_gradients_are_those_of_one_process(runs: dict[str, Any], name: str) -> None:
    states = [Run(runs[ranks] / name).load() for ranks in ("one", "two")]
    one, two = ([slot["exp_avg"].double() for slot in state["optimizer"]["state"].values()] for state in states)
    assert len(one) == len(two) > 10
    for left, right in zip(one, two, strict=True):
        assert left.norm() > 0
        assert (left - right).norm() < GRADIENT_TOLERANCE * left.norm()


@pytest.mark.parametrize("name", ["harvested", "batch statistics"])
def test_the_ranks_plan_the_same_hard_batches(runs: dict[str, Any], name: str) -> None:
    """A graph of trained vectors follows their last bit, so it is not that of one process; the ranks agree on it."""
    found = batches(runs["two"] / name)
    assert len(found) == 2 * STEPS
    for epoch in (found[:STEPS], found[STEPS:]):
        assert sorted(np.concatenate(epoch)) == list(range(NUM_IMAGES))
        assert all(len(batch) == BATCH_SIZE for batch in epoch)
    with np.load(runs["two"] / name / "embeddings.npz") as file:
        vectors = file["train_x"] / np.linalg.norm(file["train_x"], axis=1, keepdims=True)
    warm, hard = (
        np.mean([(vectors[batch] @ vectors[batch].T).mean() for batch in epoch])
        for epoch in (found[:STEPS], found[STEPS:])
    )
    assert hard > warm


def test_batch_statistics_that_ranks_cannot_share_are_reported(runs: dict[str, Any]) -> None:
    assert runs["errors"].count("cannot share: each rank uses those of its own part of the batch") == 1
    assert "Use an encoder without batch normalisation" in runs["errors"]


@pytest.mark.parametrize("name", [name for name, _, _ in CUT])
def test_two_ranks_resume_exactly(runs: dict[str, Any], name: str) -> None:
    whole, cut = runs["two"] / name, runs["two"] / f"{name}, cut"
    assert_same(everything(whole), everything(cut))
    for rank in range(2):
        seen, again = (json.loads((path / f"batches-{rank}.json").read_text()) for path in (whole, cut))
        assert again == seen[: STEPS + 2] + seen[STEPS:], "two steps of the second epoch were lost, and done again"


def test_the_result_of_two_ranks_is_that_of_one(runs: dict[str, Any]) -> None:
    one, two = (Run(runs[ranks] / "uniform").result() for ranks in ("one", "two"))
    assert one is not None
    assert two is not None
    assert one.keys() == two.keys()
    assert abs(one["uniformity"] - two["uniformity"]) < 1e-3
    assert abs(one["knn"] - two["knn"]) <= 1 / one["num_test"]  # a tie may fall either way


def test_batch_statistics_are_synchronised_where_there_is_cuda() -> None:
    images = torch.zeros(4, 3, 8, 8, dtype=torch.uint8)
    data = ImageData(images, None, torch.arange(4), "black")
    method = MoCoV2(MoCoOptions(encoder="resnet18"), data, total=1)
    names = set(method.state_dict())
    two = SimpleNamespace(num_processes=2, device=torch.device("cuda"), is_main_process=True)
    changed = synchronised(method, two)
    for part in (changed.encoder, changed.slow):  # the momentum encoder, too
        kinds = [type(module) for module in part.modules()]
        assert torch.nn.SyncBatchNorm in kinds
        assert not {torch.nn.BatchNorm1d, torch.nn.BatchNorm2d} & set(kinds)
    assert set(changed.state_dict()) == names  # a checkpoint of one process fits
