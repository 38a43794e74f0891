"""Packed graphs, and their files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hardneg.core.errors import ArgumentError, FileError, NoFile
from hardneg.training.data.graph_files import graph_path, read_graphs, save_graphs
from hardneg.training.data.packed import Graphs, degrees, from_geometric, pack, with_degrees
from support.errors import raises
from support.graphs import adjacency, random_graphs


def same(one: Graphs, other: Graphs) -> bool:
    return all(
        torch.equal(getattr(one, name), getattr(other, name)) for name in ("x", "edges", "num_nodes", "num_edges")
    )


def test_a_batch_is_its_graphs_one_by_one() -> None:
    graphs = random_graphs(7)
    index = torch.tensor([4, 0, 4, 6])
    batch = graphs[index]
    assert batch.num_nodes.tolist() == graphs.num_nodes[index].tolist()
    for place, i in enumerate(index.tolist()):
        assert torch.equal(batch.x[batch.batch == place], graphs.x[graphs.batch == i])
        assert torch.equal(adjacency(batch)[place], adjacency(graphs)[i])
    assert same(graphs[0:1].joined([graphs[1:5], graphs[5:]]), graphs)
    assert same(graphs[torch.arange(7) % 2 == 0], graphs[torch.tensor([0, 2, 4, 6])])
    assert len(graphs[torch.tensor([], dtype=torch.int64)]) == 0


def test_edges_are_held_once_and_seen_from_both_sides() -> None:
    graphs = pack([torch.zeros(3, 1)], [torch.tensor([[1, 0, 1, 2, 2], [0, 1, 2, 1, 2]])])
    assert graphs.edges.tolist() == [[0, 1], [1, 2]]
    assert graphs.edge_index.tolist() == [[0, 1, 1, 2], [1, 2, 0, 1]]
    assert degrees(graphs).tolist() == [1, 2, 1]


def test_graphs_without_edges_are_graphs() -> None:
    graphs = pack([torch.ones(1, 2), torch.ones(2, 2)], [torch.zeros(2, 0, dtype=torch.int64)] * 2)
    assert graphs.num_edges.tolist() == [0, 0]
    assert with_degrees(graphs, 3).x.tolist() == [[1, 0, 0, 0]] * 3


def test_high_degrees_share_the_last_column() -> None:
    star = pack([torch.zeros(6, 1)], [torch.stack([torch.zeros(5, dtype=torch.int64), torch.arange(1, 6)])])
    assert with_degrees(star, 2).x.argmax(1).tolist() == [2, 1, 1, 1, 1, 1]


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
    assert found.graphs.edges.tolist() == [[0, 1, 3], [2, 2, 4]]
    assert found.graphs.x.tolist() == [[1, 0], [1, 0], [0, 1], [1, 0], [1, 0]]
    np.savez(path, node_ptr=[0, 3, 5], edge_ptr=[0, 2, 3], edges_delta=delta, node_label=[0] * 5)
    found = read_graphs("SMALL", tmp_path)
    assert found.labels is None
    assert found.graphs.x.argmax(1).tolist() == [1, 1, 2, 1, 1]  # degrees


def written(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / f"TOY_{name}.txt").write_text(text)
    return folder


TOY = {"A": "1, 2\n2, 1\n2, 3\n3, 2\n5, 4\n4, 5\n", "graph_indicator": "1\n1\n1\n2\n2\n"}


def test_text_files_of_the_tu_collection(tmp_path: Path) -> None:
    folder = written(tmp_path / "TOY" / "raw", **TOY, graph_labels="-1\n1\n", node_labels="0\n2\n0\n2\n2\n")
    found = read_graphs("TOY", tmp_path)
    assert found.graphs.edges.tolist() == [[0, 1, 3], [1, 2, 4]]
    assert found.graphs.x.tolist() == [[1, 0], [0, 1], [1, 0], [0, 1], [0, 1]]
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
    assert read_graphs("TOY", tmp_path).graphs.x[0].tolist() == [0.5, 1.0]
    written(tmp_path / "both" / "TOY", **TOY, node_attributes=attributes, node_labels="0\n2\n0\n2\n2\n")
    assert read_graphs("TOY", tmp_path / "both").graphs.num_features == 2


def test_any_list_of_data_objects() -> None:
    edges = torch.tensor([[0, 1], [1, 0]])
    items = [SimpleNamespace(num_nodes=2, x=torch.ones(2, 3), edge_index=edges, y=torch.tensor([i])) for i in (1, 0)]
    graphs, labels = from_geometric(items)
    assert graphs.edges.tolist() == [[0, 2], [1, 3]]
    assert labels is not None
    assert labels.tolist() == [1, 0]
    bare = [SimpleNamespace(num_nodes=2, x=None, edge_index=edges, y=None)] * 2
    graphs, labels = from_geometric(bare)
    assert labels is None
    assert graphs.x.argmax(1).tolist() == [1] * 4
    with raises(ArgumentError, who="Graphs", got="1 of 2 without"):
        from_geometric([items[0], bare[0]])


def test_data_of_torch_geometric() -> None:
    data = pytest.importorskip("torch_geometric.data", reason="torch-geometric is not installed")
    graphs, _ = from_geometric([data.Data(x=torch.ones(3, 2), edge_index=torch.tensor([[0, 1], [1, 2]]))] * 2)
    assert graphs.num_edges.tolist() == [2, 2]


def test_bad_graphs_raise() -> None:
    with raises(ArgumentError, who="Graphs", got="the edge [0, 2] in graph 1 with 2 nodes"):
        pack([torch.ones(3, 1), torch.ones(2, 1)], [torch.tensor([[0], [2]]), torch.tensor([[0], [2]])])
    with raises(ArgumentError, who="Graphs", got="0 and 0 tensors"):
        from_geometric([])
    with raises(ArgumentError, who="Graphs", got="sizes=[0]"):
        pack([torch.ones(0, 1)], [torch.zeros(2, 0, dtype=torch.int64)])


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
    with raises(FileError, who="data", what="their graphs", got="which has another order"):
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
        ({"node_labels": "1\n"}, "labels of each of 5 nodes"),
        ({"graph_labels": ""}, "which has none"),
    ]):  # fmt: skip
        written(tmp_path / f"e{number}", **(TOY | change))
        with pytest.raises(FileError, match=message):
            read_graphs(str(tmp_path / f"e{number}"))
    written(tmp_path / "d", graph_indicator="1\n1\n")
    with raises(FileError, who="data", what="per line", got="which does not exist"):
        read_graphs(str(tmp_path / "d"))
