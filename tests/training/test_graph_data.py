"""Graphs of PyG, batches of them, and their files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hardneg.core.errors import ArgumentError, FileError, NoFile
from hardneg.training.augmentation.graphs import Graphs
from hardneg.training.data.graph_files import MAX_DEGREE, from_geometric, graph_path, read_graphs, save_graphs
from support.errors import raises
from support.graphs import adjacency, packed, random_graphs

pytest.importorskip("torch_geometric", reason="graphs need the extra graphs")
from torch_geometric.data import Data
from torch_geometric.datasets import TUDataset


def same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a.x, b.x) and torch.equal(a.edge_index, b.edge_index) for a, b in pairs)


def degrees(graphs: Sequence[Any]) -> list[int]:
    return [degree for one in graphs for degree in one.x.argmax(1).tolist()]


def test_a_batch_is_its_graphs_one_by_one() -> None:
    graphs = random_graphs(7)
    batch = Graphs.collate([graphs[i] for i in (4, 0, 4, 6)])
    assert batch.num_nodes.tolist() == [graphs[i].num_nodes for i in (4, 0, 4, 6)]
    for place, i in enumerate((4, 0, 4, 6)):
        assert torch.equal(batch.x[batch.batch == place], graphs[i].x)
        assert torch.equal(adjacency(batch)[place], adjacency(Graphs.collate([graphs[i]]))[0])
    whole = Graphs.collate(graphs)
    again = whole[0:1].joined([whole[1:5], whole[5:]])
    for name in ("x", "edge_index", "batch"):
        assert torch.equal(getattr(again, name), getattr(whole, name))
    assert len(again) == 7
    assert len(whole[3:3]) == len(whole[5:2]) == 0


def test_edges_are_held_in_both_directions_and_seen_once() -> None:
    (graph,) = packed([torch.zeros(3, 1)], [torch.tensor([[1, 0, 1, 2, 2], [0, 1, 2, 1, 2]])])
    assert graph.edge_index.tolist() == [[0, 1, 1, 2], [1, 0, 2, 1]]
    assert Graphs.collate([graph, graph]).edges.tolist() == [[0, 1, 3, 4], [1, 2, 4, 5]]


def test_graphs_without_edges_are_graphs() -> None:
    graphs, _ = from_geometric([Data(edge_index=torch.zeros(2, 0, dtype=torch.int64), num_nodes=n) for n in (1, 2)])
    assert [one.num_edges for one in graphs] == [0, 0]
    assert [one.x.shape for one in graphs] == [(1, MAX_DEGREE + 1), (2, MAX_DEGREE + 1)]
    assert degrees(graphs) == [0, 0, 0]


def test_high_degrees_share_the_last_column() -> None:
    ends = torch.arange(1, MAX_DEGREE + 5)
    graphs, _ = from_geometric([Data(edge_index=torch.stack([torch.zeros_like(ends), ends]), num_nodes=len(ends) + 1)])
    assert degrees(graphs) == [MAX_DEGREE, *[1] * len(ends)]


def test_files_round_trip(tmp_path: Path) -> None:
    graphs = random_graphs(5)
    save_graphs(tmp_path / "mine.npz", graphs, np.array(["b", "a", "b", "a", "a"]))
    found = read_graphs(str(tmp_path / "mine.npz"))
    assert same(found.graphs, graphs)
    assert found.classes == ("a", "b")
    assert found.labels is not None
    assert found.labels.tolist() == [1, 0, 1, 0, 0]


def test_differences_that_wrap_around_are_edges(tmp_path: Path) -> None:
    edges = np.array([[0, 1, 0], [2, 2, 1]], dtype=np.uint16)  # a triangle of which one falls back, and an edge
    delta = np.diff(edges, axis=1, prepend=np.zeros((2, 1), np.uint16))
    path = tmp_path / "tu-graphs" / "SMALL.npz"
    path.parent.mkdir()
    np.savez(path, node_ptr=[0, 3, 5], edge_ptr=[0, 2, 3], edges_delta=delta, node_label=[4, 4, 7, 4, 4], y=[1, 0])
    found = read_graphs("SMALL", tmp_path)
    assert [one.edge_index.tolist() for one in found.graphs] == [[[0, 1, 2, 2], [2, 2, 0, 1]], [[0, 1], [1, 0]]]
    assert [one.x.tolist() for one in found.graphs] == [[[1, 0], [1, 0], [0, 1]], [[1, 0], [1, 0]]]
    np.savez(path, node_ptr=[0, 3, 5], edge_ptr=[0, 2, 3], edges_delta=delta, node_label=[0] * 5)
    found = read_graphs("SMALL", tmp_path)
    assert found.labels is None
    assert degrees(found.graphs) == [1, 1, 2, 1, 1]


def written(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / f"TOY_{name}.txt").write_text(text)
    return folder


TOY = {"A": "1, 2\n2, 1\n2, 3\n3, 2\n5, 4\n4, 5\n", "graph_indicator": "1\n1\n1\n2\n2\n"}


def test_text_files_of_the_tu_collection(tmp_path: Path) -> None:
    folder = written(tmp_path / "TOY" / "raw", **TOY, graph_labels="-1\n1\n", node_labels="0\n2\n0\n2\n2\n")
    found = read_graphs("TOY", tmp_path)
    assert [one.edge_index.tolist() for one in found.graphs] == [[[0, 1, 1, 2], [1, 0, 2, 1]], [[0, 1], [1, 0]]]
    assert [one.x.tolist() for one in found.graphs] == [[[1, 0], [0, 1], [1, 0]], [[0, 1], [0, 1]]]
    assert found.classes == ("-1", "1")
    assert found.labels is not None
    assert found.labels.tolist() == [0, 1]
    assert graph_path(str(folder)) == folder


def test_a_name_is_of_the_root_before_it_is_of_a_folder_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "root"
    written(tmp_path / "TOY" / "raw", **TOY)
    monkeypatch.chdir(tmp_path)
    assert graph_path("TOY", root) == graph_path("./TOY", root) == Path("TOY/raw")
    assert graph_path("TOY", root) != graph_path("TOY", written(root / "TOY", **TOY).parent) == root / "TOY"


def test_attributes_are_used_where_nodes_have_no_label(tmp_path: Path) -> None:
    attributes = "0.5, 1\n1, 2\n2, 3\n3, 4\n4, 5\n"
    written(tmp_path / "TOY", **TOY, node_attributes=attributes)
    assert read_graphs("TOY", tmp_path).graphs[0].x[0].tolist() == [0.5, 1.0]
    written(tmp_path / "both" / "TOY", **TOY, node_attributes=attributes, node_labels="0\n2\n0\n2\n2\n")
    assert read_graphs("TOY", tmp_path / "both").graphs[1].num_features == 2


def test_any_list_of_data_objects() -> None:
    edges = torch.tensor([[0, 1], [1, 0]])
    items = [Data(x=torch.ones(2, 3), edge_index=edges, y=torch.tensor([i])) for i in (1, 0)]
    graphs, labels = from_geometric(items)
    assert same(graphs, items)
    assert labels is not None
    assert labels.tolist() == [1, 0]
    bare = [Data(edge_index=edges, num_nodes=2)] * 2
    graphs, labels = from_geometric(bare)
    assert labels is None
    assert degrees(graphs) == [1] * 4
    with raises(ArgumentError, who="Graphs", got="1 of 2 without"):
        from_geometric([items[0], bare[0]])


def test_a_data_set_of_torch_geometric_is_what_its_text_files_are(tmp_path: Path) -> None:
    written(tmp_path / "TOY" / "raw", **TOY, graph_labels="-1\n1\n", node_labels="0\n1\n0\n1\n1\n")
    save_graphs(tmp_path / "toy.npz", TUDataset(str(tmp_path), "TOY"))
    saved, read = read_graphs(str(tmp_path / "toy.npz")), read_graphs("TOY", tmp_path)
    assert same(saved.graphs, read.graphs)
    assert saved.labels.tolist() == read.labels.tolist() == [0, 1]


def test_bad_graphs_raise() -> None:
    with raises(ArgumentError, who="Graphs", got="the edge [0, 2] in graph 1 with 2 nodes"):
        packed([torch.ones(3, 1), torch.ones(2, 1)], [torch.tensor([[0], [2]]), torch.tensor([[0], [2]])])
    with raises(ArgumentError, who="Graphs", got="sizes=[]"):
        from_geometric([])
    with raises(ArgumentError, who="Graphs", got="sizes=[0]"):
        packed([torch.ones(0, 1)], [torch.zeros(2, 0, dtype=torch.int64)])


def test_bad_files_raise(tmp_path: Path) -> None:
    (tmp_path / "NONE").mkdir()
    with raises(NoFile, who="data", what="NAME_graph_indicator.txt", got="which has none"):
        graph_path(str(tmp_path / "NONE"))
    with pytest.raises(NoFile, match=r"tu-graphs/NONE\.npz"):
        read_graphs("NONE", tmp_path)
    path = tmp_path / "bad.npz"
    good = {"node_ptr": [0, 2], "edge_ptr": [0, 1], "edges": [[0], [1]]}
    for change, message in [
        ({"edges": [[0, 1], [1, 0]]}, "edges"),
        ({"node_ptr": [1, 2]}, "from 0"),
        ({"node_ptr": [0, 3, 2], "edge_ptr": [0, 1, 1]}, "non-decreasing node_ptr"),
        ({"x": [[np.nan], [0.0]]}, "finite"),
        ({"x": [[1.0]]}, "each of 2 nodes"),
        ({"x": np.ones((2, 0))}, "at least one feature"),
        ({"x": [["a"], ["b"]]}, "numbers .* as x"),
        ({"x": 1.0}, "numbers .* as x"),
        ({"edges": [[0.5], [1.0]]}, "whole numbers .* as edges, .* float64"),
        ({"edges": [0]}, "whole numbers .* as edges"),
        ({"node_label": [[0], [1]]}, "as node_label"),
        ({"node_label": [0.0, np.nan]}, "as node_label"),
        ({"class_values": "one"}, "as class_values"),
        ({"y": [0, 1]}, "each of 1 graphs"),
    ]:
        np.savez(path, **(good | change))
        with pytest.raises(FileError, match=message):
            read_graphs(str(path))
    np.savez(path, node_ptr=[0, 2], edge_ptr=[0, 1], edges_delta=[0])
    with pytest.raises(FileError, match="as edges_delta"):
        read_graphs(str(path))
    np.savez(path, node_ptr=[0, 2], edge_ptr=[0, 1])
    with pytest.raises(FileError, match="neither"):
        read_graphs(str(path))


def test_bad_text_files_raise(tmp_path: Path) -> None:
    written(tmp_path / "a", **(TOY | {"A": "1, 6\n"}))
    with pytest.raises(FileError, match="nodes 1 to 5"):
        read_graphs(str(tmp_path / "a"))
    written(tmp_path / "b", **(TOY | {"graph_indicator": "1\n2\n1\n2\n2\n"}))
    with raises(FileError, who="data", what="their graphs", got="whose nodes are in a different order"):
        read_graphs(str(tmp_path / "b"))
    written(tmp_path / "c", **(TOY | {"A": "one, two\n"}))
    with pytest.raises(FileError, match="numbers"):
        read_graphs(str(tmp_path / "c"))
    for number, (change, message) in enumerate([
        ({"graph_indicator": ""}, "which has none"),
        ({"graph_indicator": "1\n1\n3\n3\n3\n"}, "without gaps"),
        ({"graph_indicator": "1\n1\n2\n2\n9000000000000\n"}, "without gaps"),
        ({"A": ""}, "which has none"),
        ({"A": "1, 2, 3\n"}, "two nodes per line.* which has 3"),
        ({"node_labels": "1\n"}, "labels for each of 5 nodes"),
        ({"graph_labels": ""}, "which has none"),
    ]):  # fmt: skip
        written(tmp_path / f"e{number}", **(TOY | change))
        with pytest.raises(FileError, match=message):
            read_graphs(str(tmp_path / f"e{number}"))
    written(tmp_path / "d", graph_indicator="1\n1\n")
    with raises(FileError, who="data", what="per line", got="which does not exist"):
        read_graphs(str(tmp_path / "d"))
