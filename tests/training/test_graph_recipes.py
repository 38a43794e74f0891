"""GraphCL and InfoGraph: their losses against plain loops, and runs that are killed, resumed, or on two ranks."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus
from typer.testing import CliRunner

from hardneg.cli.app import app
from hardneg.core.errors import ArgumentError
from hardneg.training.data.graphs import GraphData
from hardneg.training.data.inputs import joined
from hardneg.training.loop.method import Batch
from hardneg.training.loop.runs import Run
from hardneg.training.options import RECIPES, GraphCLOptions, InfoGraphOptions, SupervisedOptions
from hardneg.training.recipes.graphcl import GraphCL
from hardneg.training.recipes.infograph import InfoGraph
from hardneg.training.recipes.supervised import Supervised
from support.graphs import graph_file, random_graphs
from support.training_ranks import on_two_ranks, run_job
from support.training_runs import assert_same, everything, interrupted, run

pytest.importorskip("accelerate", reason="training needs the extra train")
pytest.importorskip("sklearn", reason="graphs need the extra graphs")
pytest.importorskip("torch_geometric", reason="graphs need the extra graphs")

IDS = torch.tensor([7, 2, 11, 5, 0])
HARD = {"negatives": "Tilt(1.5)", "tau_plus": 0.05}


def data_of(num: int = 12) -> GraphData:
    return GraphData(random_graphs(num), torch.arange(num) % 3, torch.arange(num), "random", ("a", "b", "c"))


def batch_of(data: GraphData, options: Any) -> Batch:
    data = data.prepared(options)
    assert data.labels is not None
    return Batch(joined(data.views(IDS, 0, 0)), IDS, data.labels[IDS])


def vectors(method: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    first, second = (normalize(method.encoder(view).detach(), dim=1) for view in (batch.first, batch.second))
    return first, second


@pytest.mark.parametrize("more", [{}, HARD, {"positives_in_denominator": "own"}], ids=["plain", "hcl", "own"])
def test_graphcl_is_its_formula(more: dict[str, Any]) -> None:
    options = GraphCLOptions(encoder="gin-layer", dim=8, **more)
    data = data_of()
    method, batch = GraphCL(options, data, 10).double(), batch_of(data, options)
    first, second = vectors(method, batch)
    beta, tau = (1.5, 0.05) if more == HARD else (0.0, 0.0)
    terms = []
    for i in range(5):
        own = math.exp(float(first[i] @ second[i]) / 0.2)
        scores = [float(first[i] @ second[j]) / 0.2 for j in range(5) if j != i]
        weights = [math.exp(beta * s) for s in scores]
        mean = sum(w * math.exp(s) for w, s in zip(weights, scores, strict=True)) / sum(weights)
        mean = max((mean - tau * own) / (1 - tau), math.exp(-1 / 0.2)) if tau else mean
        both = 4 * mean + (own if "positives_in_denominator" in more else 0.0)
        terms.append(math.log(both / own))
    assert method.loss_of(method.encoder, batch).item() == pytest.approx(sum(terms) / 5, abs=4e-6)  # float32 inside


@pytest.mark.parametrize("hard", [False, True], ids=["plain", "hcl"])
def test_infograph_is_its_formula(hard: bool) -> None:
    more = {"negatives": "ClippedTilt(3.0)", "tau_plus": 0.2} if hard else {}
    options = InfoGraphOptions(encoder="gin-layer", dim=8, **more)
    data = data_of()
    method, batch = InfoGraph(options, data, 10).double(), batch_of(data, options)
    graphs = data.plain(IDS)
    local, whole = (part.detach() for part in method.encoder(graphs))
    similarity = (local @ whole.T).tolist()
    scale = max(abs(similarity[u][j]) for u in range(len(local)) for j in range(5) if j != int(graphs.batch[u]))
    total = 0.0
    for u, owner in enumerate(graphs.batch.tolist()):
        own = float(softplus(torch.tensor(-similarity[u][owner])))
        others = [j for j in range(5) if j != owner]
        # The paper's sign: graphs that are similar to the node weigh more.
        weights = [math.exp(3.0 * 2.0 * similarity[u][j] / scale) if hard else 1.0 for j in others]
        costs = [math.log1p(math.exp(similarity[u][j])) for j in others]
        negative = sum(w * c for w, c in zip(weights, costs, strict=True)) / sum(weights)
        if hard:
            negative = (negative - 0.2 * math.log1p(math.exp(similarity[u][owner]))) / 0.8
        total += negative + own - 2 * math.log(2)
    assert method.loss_of(method.encoder, batch).item() == pytest.approx(total / len(local), rel=2e-6)


def test_supervised_graphs_have_positives_by_label() -> None:
    options = SupervisedOptions(encoder="gin-layer", dim=8, temperature=0.3, negatives="OtherLabel() * Tilt(1.0)")
    data = data_of()
    method, batch = Supervised(options, data, 10).double(), batch_of(data, options)
    z, labels = torch.cat(vectors(method, batch)), torch.cat([batch.labels, batch.labels])
    terms = []
    for i in range(10):
        negatives = torch.stack([z[i] @ z[j] / 0.3 for j in range(10) if labels[j] != labels[i]])
        mean = (negatives.softmax(0) * negatives.exp()).sum()
        own = [(z[i] @ z[j] / 0.3).exp() for j in range(10) if labels[j] == labels[i] and j != i]
        terms.append(torch.stack([-(p / (p + len(negatives) * mean)).log() for p in own]).mean())
    found = method.loss_of(method.encoder, batch).double()
    torch.testing.assert_close(found, torch.stack(terms).mean(), rtol=0, atol=4e-6)


def test_infograph_trains_the_whole_encoder_and_nothing_else_is_evaluated() -> None:
    options = InfoGraphOptions(dim=8)
    data = data_of()
    method = InfoGraph(options, data, 10)
    method.loss_of(method.encoder, batch_of(data, options)).backward()
    assert all(weights.grad is not None and bool(weights.grad.any()) for weights in method.encoder.parameters())
    assert method.encoder.features(data.plain(torch.arange(12))).shape == (12, 96)
    torch.testing.assert_close(method.harvest().vectors.norm(dim=1), torch.ones(5))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return graph_file(tmp_path_factory.mktemp("graphs") / "two.npz")


def short(data: str, **options: Any) -> dict[str, Any]:
    return {"data": data, "epochs": 3, "batch_size": 16, "log_every": 1, "dim": 16, "device": "cpu", **options}


PROXIMITY = "proximity(num_candidates=30, num_neighbours=8, restart=0.3, refresh=2)"


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("graphcl", {"negatives": "Tilt(linear(0.5, 2.0))"}),
        ("graphcl", {"batches": PROXIMITY}),
        ("infograph", {"negatives": "ClippedTilt(1.0)", "batches": PROXIMITY}),
    ],
    ids=["graphcl", "proximity", "infograph"],
)
def test_a_stopped_run_ends_as_if_it_had_not_been(
    recipe: str, options: dict[str, Any], file: str, tmp_path: Path
) -> None:
    wanted = short(file, **options)
    result = run(recipe, tmp_path / "whole", wanted)
    assert 0.5 < result["svm"] <= 1.0  # the sizes of the graphs differ
    assert result["headline"] == "svm"
    with interrupted(5):
        run(recipe, tmp_path / "stopped", wanted)
    run(recipe, tmp_path / "stopped", wanted, resume=True)
    assert_same(everything(tmp_path / "stopped"), everything(tmp_path / "whole"))


def test_a_killed_process_is_resumed(file: str, tmp_path: Path) -> None:
    wanted = short(file, epochs=3)
    run("graphcl", tmp_path / "whole", wanted)
    script = (
        "import os, sys, json; from hardneg.training.loop.train import Loop; from support.training_runs import run\n"
        "from pathlib import Path; step = Loop._one_step\n"
        "def killed(self, *a):\n"
        "    os.kill(os.getpid(), 9) if self.step == 4 else step(self, *a)\n"
        "Loop._one_step = killed; run('graphcl', Path(sys.argv[1]), json.loads(sys.argv[2]))\n"
    )
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    arguments = [sys.executable, "-c", script, str(tmp_path / "killed"), json.dumps(wanted)]
    threads = str(torch.get_num_threads())  # by which sums differ in the last bit
    ended = subprocess.run(arguments, env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": threads}, check=False)
    assert ended.returncode == -9
    assert Run(tmp_path / "killed").result() is None
    run("graphcl", tmp_path / "killed", wanted, resume=True)
    assert_same(everything(tmp_path / "killed"), everything(tmp_path / "whole"))


JOBS: dict[str, dict[str, Any]] = {
    "graphcl": {"recipe": "graphcl", "options": {"negatives": "Tilt(1.0)"}},
    "infograph": {"recipe": "infograph", "options": {}},
    "infograph hard": {"recipe": "infograph", "options": {"negatives": "ClippedTilt(1.0)", "tau_plus": 0.1}},
}


def test_two_ranks_train_as_one(file: str, tmp_path: Path) -> None:
    common = {"encoder": "gin-layer", "learning_rate": 1e-5}
    jobs = [{"name": name, **job, "options": short(file, **common, **job["options"])} for name, job in JOBS.items()]
    for job in jobs:
        run_job(job, tmp_path / "one")
    on_two_ranks(jobs, tmp_path / "two")
    for name in JOBS:
        one, two = (Run(tmp_path / folder / name) for folder in ("one", "two"))
        losses = [[record["loss"] for record in each.metrics()] for each in (one, two)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        states = [each.load() for each in (one, two)]
        moments = [
            torch.cat([part["exp_avg"].flatten() for part in state["optimizer"]["state"].values()])
            for state in states
            if state is not None
        ]
        assert float((moments[0] - moments[1]).norm() / moments[0].norm()) < 0.01, name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["graphcl", "--data", "graphs:NOTHING"], "NOTHING.npz"),
        (["graphcl", "--augment", "node_drp"], "node_drop"),
        (["graphcl", "--augment", "graphcl(ratio=2.0)"], "ratio"),
        (["graphcl", "--encoder", "resnet18"], "gin"),
        (["graphcl", "--negatives", "OtherLabel()"], "@0/10"),
        (["supervised"], "@0/10"),
        (["graphcl", "--compile"], "no --compile"),
        (["infograph", "--encode-chunk", "8"], "--encode-chunk"),
        (["infograph", "--data", "digits", "--augment", "auto"], "graphs:NAME"),
        (["graphcl", "--batch-size", "64"], "48 graphs"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], words: str, file: str, tmp_path: Path) -> None:
    usual = {"--data": file, "--batch-size": "16", "--out": str(tmp_path / "run")}
    more = [word for name, value in usual.items() if name not in arguments for word in (name, value)]
    found = CliRunner().invoke(app, ["train", *arguments, *more])
    assert found.exit_code != 0
    assert words in " ".join(found.output.split())
    assert "Traceback" not in found.output


def test_folds_divide_the_graphs_and_hold_out_their_labels(file: str) -> None:
    options = RECIPES["supervised"](data=f"{file}@1/4")
    splits = [GraphData.read(f"{file.removeprefix('graphs:')}@{i}/4", options) for i in range(4)]
    assert sorted(i for one in splits for i in one.test.ids.tolist()) == list(range(48))
    for one in splits:
        assert sorted([*one.train.ids.tolist(), *one.test.ids.tolist()]) == list(range(48))
        assert one.test.labels.bincount().tolist() == [6, 6]
    with pytest.raises(ArgumentError, match="counted from 0"):
        GraphData.read("x@4/4", options)


def test_training_with_labels_is_tested_on_other_graphs(file: str, tmp_path: Path) -> None:
    result = run("supervised", tmp_path, short(f"{file}@0/4"))
    assert result["num_test"] == 12
    assert {"svm", "knn", "linear"} <= result.keys()
    with np.load(tmp_path / "embeddings.npz") as arrays:
        assert len(arrays["train_x"]) == 36
