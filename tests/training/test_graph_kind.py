"""Graphs as a data kind: what a run records, how it is evaluated, compared and shown."""

from __future__ import annotations

import base64
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hardneg.comparing import Comparison, compare
from hardneg.core.errors import ArgumentError, DataChanged, MissingExtra
from hardneg.io.embeddings import load_evaluated, unpack_bits
from hardneg.pages.graph_drawing import MOST_NODES, SIDE, graph_drawing
from hardneg.reporting import write_report
from hardneg.training.augmentation.graphs import Graphs
from hardneg.training.data.graph_files import save_graphs
from hardneg.training.data.graphs import GraphData, augment_for
from hardneg.training.data.kinds import kind_of
from hardneg.training.evaluation.svm import svm_correct
from hardneg.training.loop.data_record import fingerprint
from hardneg.training.loop.records import has_collapsed
from hardneg.training.loop.runs import Run
from hardneg.training.options import GraphCLOptions
from support.errors import raises
from support.graphs import graph_file, random_graphs
from support.html_page import Page
from support.training_runs import run

pytest.importorskip("accelerate", reason="training needs the extra train")
pytest.importorskip("sklearn", reason="graphs need the extra graphs")
pytest.importorskip("torch_geometric", reason="graphs need the extra graphs")


@pytest.fixture
def file(tmp_path: Path) -> str:
    return graph_file(tmp_path / "two.npz", 32)


def short(data: str, **options: Any) -> dict[str, Any]:
    return {"data": data, "epochs": 1, "batch_size": 16, "log_every": 1, "dim": 8, "device": "cpu", **options}


def test_the_accuracy_is_that_of_all_graphs_in_cross_validation(file: str, tmp_path: Path) -> None:
    result = run("graphcl", tmp_path / "run", short(file))
    x, y = load_evaluated(tmp_path / "run" / "embeddings.npz")
    assert y is not None
    right = svm_correct(x, y)
    assert result["svm"] == pytest.approx(float(right.double().mean()))
    found = unpack_bits(result["correct"]["svm"], result["num_test"])
    assert found is not None
    assert found.tolist() == right.tolist()
    assert result["trained"]["data"]["train"] == result["trained"]["data"]["test"]
    assert result["trained"]["data"]["train"]["noun"] == "graph"


def test_the_fingerprint_is_of_nodes_edges_and_labels() -> None:
    graphs, labels, ids = random_graphs(6), torch.arange(6) % 2, torch.arange(6)
    data = GraphData(graphs, labels, ids, "one", ("a", "b"))
    x, rewired = graphs[3].clone(), graphs[3].clone()
    x.x, rewired.edge_index = x.x + 1, rewired.edge_index.flip(0)
    changed = [GraphData(graphs, labels.flip(0), ids, "one", ("a", "b"))]
    changed += [GraphData([*graphs[:3], one, *graphs[4:]], labels, ids, "one", ("a", "b")) for one in (x, rewired)]
    assert fingerprint(data) == fingerprint(GraphData(graphs, labels, ids, "other", ("c", "d")))
    assert fingerprint(data) not in {fingerprint(one) for one in changed}
    part = data.take(torch.tensor([4, 1]))
    assert [one.num_nodes for one in part.graphs] == [graphs[4].num_nodes, graphs[1].num_nodes]
    assert part.ids.tolist() == [4, 1]
    with raises(ArgumentError, who="GraphData 'short'", got="5 ids"):
        GraphData(graphs, None, torch.arange(5), "short")


def test_other_graphs_under_the_same_name_are_noticed(file: str, tmp_path: Path) -> None:
    run("graphcl", tmp_path / "run", short(file))
    (Run(tmp_path / "run").path / "result.json").unlink()
    graph_file(tmp_path / "two.npz", 34)
    with pytest.raises(DataChanged, match="32 train graphs"):
        run("graphcl", tmp_path / "run", short(file), resume=True)


@pytest.mark.usefixtures("runs_here")
def test_graphs_are_compared_and_drawn(file: str, tmp_path: Path) -> None:
    arms = ("graphcl()", "graphcl(negatives='Tilt(1.0)')", "infograph()")
    summary = compare(Comparison(arms, 3, short(file)), tmp_path / "out", jobs=1, show=lambda line: None)
    assert summary["metric"] == "svm"
    assert summary["verdicts"][0]["half_width"] is not None
    text = write_report(tmp_path / "out").read_text()
    page = Page(text)
    assert "trains an encoder of graphs by" in page.words
    assert "nearest of other classes" in page.words
    assert text.count("data:image/svg+xml;base64,") > 20


def test_graphs_without_labels_are_judged_by_retrieval(tmp_path: Path) -> None:
    save_graphs(tmp_path / "bare.npz", random_graphs(32))
    result = run("graphcl", tmp_path / "run", short(f"graphs:{tmp_path / 'bare.npz'}"))
    assert result["headline"] == "retrieval"
    assert result["num_test"] == 7  # a fifth, which is not trained on
    assert 0.0 <= result["retrieval"] <= 1.0


def test_a_validation_split_is_a_part_of_the_graphs(file: str) -> None:
    splits = kind_of(file).splits(GraphCLOptions(data=file, evaluate_on="validation"))
    assert (len(splits.train), len(splits.test)) == (25, 7)
    assert not set(splits.train.ids.tolist()) & set(splits.test.ids.tolist())


def test_labels_of_the_test_graphs_choose_neither_weights_nor_values(file: str, tmp_path: Path) -> None:
    with raises(ArgumentError, who="train", what="--monitor", got="--data", fix="--monitor"):
        run("graphcl", tmp_path / "run", short(file, monitor_every=1))
    run("graphcl", tmp_path / "other", short(file, monitor_every=1, monitor="retrieval"))
    tuned = Comparison(("graphcl()", "infograph()"), 2, short(file), {"learning_rate": (0.01, 0.1)})
    with raises(ArgumentError, who="compare", what="--tune", got="--data", fix="--data"):
        compare(tuned, tmp_path / "out", show=lambda line: None)


@pytest.mark.parametrize("library", ["torch_geometric", "sklearn"])
def test_a_missing_library_is_named_before_training(
    library: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    package = {"torch_geometric": "torch-geometric", "sklearn": "scikit-learn"}[library]
    with raises(MissingExtra, who="graphs", what=package, fix="'hardneg[graphs]'"):
        run("graphcl", tmp_path / "run", short(file))
    assert not (tmp_path / "run").exists()


def test_own_views_take_the_place_of_the_augmentation(file: str, tmp_path: Path) -> None:
    seen = []

    def same(graphs: Graphs, ids: torch.Tensor, epoch: int, seed: int) -> tuple[Graphs, Graphs]:
        seen.append(ids.tolist())
        return graphs.float(), graphs.float()

    result = run("graphcl", tmp_path / "run", short(file), views=same)
    assert seen
    assert result["alignment"] == pytest.approx(0.0, abs=1e-6)
    with pytest.raises(ArgumentError, match="views"):
        run("graphcl", tmp_path / "other", short(file), views=3)


def test_the_texts_of_augmentations() -> None:
    assert augment_for("auto") == augment_for("graphcl") == augment_for("graphcl()")
    assert augment_for("none").first == augment_for("none").second == "none"
    assert augment_for("graphcl(first='none', ratio=0.1)").ratio == 0.1
    with pytest.raises(ArgumentError, match="ratio"):
        augment_for("graphcl(ratio=1.5)")


def test_a_drawing_has_every_node_and_edge_inside_its_frame() -> None:
    edges = np.array([[0, 1, 2], [1, 2, 3]])
    drawn = graph_drawing(edges, [0, 1, 9, 0])
    assert drawn is not None
    svg = base64.b64decode(drawn.partition(",")[2]).decode()
    assert svg.count("<circle") == 4
    assert svg.count("L") == 3
    places = [float(word.partition('"')[0]) for word in svg.split('cx="')[1:] + svg.split('cy="')[1:]]
    assert min(places) >= 2.9
    assert max(places) <= SIDE - 2.9
    assert graph_drawing(edges, [0, 1, 9, 0]) == drawn
    assert graph_drawing(np.zeros((2, 0), dtype=np.int64), [0]) is not None
    assert graph_drawing(edges, [0] * (MOST_NODES + 1)) is None


def test_large_graphs_are_shown_by_their_sizes() -> None:
    data = GraphData(random_graphs(1, low=100, high=101), None, torch.arange(1), "large")
    assert data.shown(0).text.startswith("100 nodes, ")


def test_dot_products_above_one_are_no_collapse() -> None:
    record = {"uniform_hardness": 0.999, "loss": 4.8, "effective_number": 127.0}
    assert has_collapsed(record)
    assert not has_collapsed(record | {"uniform_hardness": 1.6})
