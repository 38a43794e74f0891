"""Readers of graphs: .npz files, and the text files of the TU collection (Morris et al. 2020).

    graphs:MUTAG            $HARDNEG_DATA/tu-graphs/MUTAG.npz, or TU text files in $HARDNEG_DATA/MUTAG or its raw/
    graphs:data/mine.npz    a file; ``save_graphs`` writes one
    graphs:data/MUTAG       a folder with MUTAG_A.txt, MUTAG_graph_indicator.txt ...

Arrays of an .npz file, for g graphs with n nodes and m edges in total:

    node_ptr [g + 1]        graph i has the nodes node_ptr[i] to node_ptr[i + 1]
    edge_ptr [g + 1]        and the edges edge_ptr[i] to edge_ptr[i + 1]
    edges [2, m]            nodes of their graph, counted from 0; one direction is enough
    edges_delta [2, m]      alternatively the differences along each row as uint16 with wrap-around; compresses better
    x [n, f]                features of the nodes, optional
    node_label [n]          or labels of the nodes, 0 to k - 1, which become one-hot features
    y [g]                   the class of each graph, optional; class_values may name the classes

TU's text files contribute node labels where there are any, else node attributes. Graphs whose nodes have neither, or
all the same label, get one-hot degrees; GraphCL's and InfoGraph's code gives those a constant. Edge labels are ignored.

Graphs are lists of PyG's ``Data``: undirected, without self-loops and repeated edges. ``from_geometric`` makes such a
list of any sequence of ``Data``, such as a ``TUDataset``. The text files are read here, since ``TUDataset`` drops a
last line without a newline, does not check the order of the nodes, forgets the names of classes, and writes to the
folder.

``read_graphs`` is called by ``GraphData.read`` (graphs.py).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from hardneg.core.errors import ArgumentError, FileError, NoFile, optional
from hardneg.io.arrays import Array, known_labels, read_arrays
from hardneg.training.augmentation.graphs import Counts
from hardneg.training.data.named import default_root

FOLDER = "tu-graphs"

MAX_DEGREE = 100
"""Degrees with their own feature; higher ones share the last."""


class GraphPart(NamedTuple):
    """Graphs as they were read.

    Attributes:
        graphs: The graphs, PyG's ``Data``.
        labels: Class of each graph as an index into ``classes`` [g], or None.
        classes: Names of the classes.
    """

    graphs: list[Any]
    labels: Array | None
    classes: tuple[str, ...]


def read_graphs(name: str, root: Path | None = None) -> GraphPart:
    """Read the graphs of a name, a file or a folder.

    Args:
        name: Name of a TU data set, or a path.
        root: Folder of named data sets; by default HARDNEG_DATA.

    Raises:
        NoFile: If there are no such graphs.
        FileError: If a file cannot be used.
    """
    path = graph_path(name, root)
    return _read_npz(path) if path.is_file() else _read_text(path)


def graph_path(name: str, root: Path | None = None) -> Path:
    """Return the path of the graphs of a name; raise NoFile if there are none."""
    given, root = Path(name), default_root() if root is None else root
    own = [given, given / "raw"]
    named = [root / FOLDER / f"{name}.npz", root / f"{name}.npz", root / name, root / name / "raw"]
    bare = len(given.parts) == 1 and not given.suffix  # names of data sets take precedence over folders
    for place in named + own if bare else own + named:
        if place.is_file() or list(place.glob("*_graph_indicator.txt")):
            return place
    if given.is_dir():
        raise NoFile("data", "TU text files such as NAME_graph_indicator.txt", given, "which has none")
    fix = "set HARDNEG_DATA or --data-root; for your own files use graphs:FILE.npz or graphs:FOLDER"
    raise NoFile("data", f"{FOLDER}/{name}.npz or TU text files of {name}", root, "which has neither", fix)


_ADVICE = {
    **dict.fromkeys(("node_ptr", "edge_ptr", "edges", "edges_delta", "node_label"), "save integers"),
    "x": "np.array(x, dtype=np.float32) has none",
    "y": "np.array(y, dtype=str) converts them to text",
    "class_values": "np.array(names, dtype=str) converts them to text",
}


_SHAPES = {
    "edges": ("whole numbers [2, m]", "iu", (2,)),
    "edges_delta": ("whole numbers [2, m]", "iu", (2,)),
    "x": ("numbers [n, f]", "fiub", (1, 2)),
    "node_label": ("whole numbers or texts [n]", "iuU", (1,)),
    "class_values": ("a name for each class", "iuU", (1,)),
}
"""Requirements of each array: in words, as NumPy's kinds, and numbers of dimensions."""


def _read_npz(path: Path) -> GraphPart:
    found = read_arrays("data", path, _ADVICE, needed=("node_ptr", "edge_ptr"))
    for name, (what, allowed, dimensions) in _SHAPES.items():
        array = found.get(name)
        if array is not None and not (array.dtype.kind in allowed and array.ndim in dimensions):
            raise FileError("data", f"{what} as {name}", path, f"which has {array.dtype} {array.shape}")
    node_ptr, edge_ptr = (_pointers(path, name, found[name]) for name in ("node_ptr", "edge_ptr"))
    if "edges" in found:
        edges = found["edges"]
    elif "edges_delta" in found:
        edges = np.cumsum(found["edges_delta"], axis=1, dtype=found["edges_delta"].dtype)
    else:
        raise FileError("data", "an array `edges` or `edges_delta`", path, "which has neither")
    if edges.shape != (2, edge_ptr[-1]) or len(node_ptr) != len(edge_ptr):
        got = f"with edges {edges.shape}, node_ptr {node_ptr.shape} and edge_ptr {edge_ptr.shape} to {edge_ptr[-1]}"
        raise FileError("data", "edges [2, m] and as many node_ptr as edge_ptr", path, got)
    kinds, x = found.get("node_label"), found.get("x")
    graphs = _featured(path, edges.astype(np.int64), np.diff(node_ptr), np.diff(edge_ptr), kinds, x)
    return _labelled(path, graphs, found.get("y"), found.get("class_values"))


def _pointers(path: Path, name: str, array: Array) -> Array:
    if array.ndim != 1 or len(array) < 2 or array.dtype.kind not in "iu" or array[0] != 0:
        raise FileError("data", f"{name} [g + 1] of whole numbers from 0", path, f"with {array.dtype} {array.shape}")
    wide = array.astype(np.int64)
    if (np.diff(wide) < 0).any():
        raise FileError("data", f"non-decreasing {name}", path, "which has decreasing values")
    return wide


def _featured(
    path: Path, edges: Array, num_nodes: Array, num_edges: Array, kinds: Array | None, x: Array | None
) -> list[Any]:
    """Return graphs with, in this order, given features, one-hot node labels, or one-hot degrees."""
    n = int(num_nodes.sum())
    for name, part in (("labels", kinds), ("features", x)):
        if part is not None and len(part) != n:
            raise FileError("data", f"{name} for each of {n} nodes", path, f"which has {len(part)}")
    features = None
    if x is not None:
        features = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32)).reshape(n, math.prod(x.shape[1:]))
        if features.shape[1] == 0:
            raise FileError("data", "x with at least one feature, or no x", path, f"which has x {x.shape}")
        if not bool(torch.isfinite(features).all()):
            raise FileError("data", "finite node features", path, "which has NaN or infinite values")
    elif kinds is not None and len(values := np.unique(kinds)) > 1:
        features = one_hot(torch.from_numpy(np.searchsorted(values, kinds)), len(values)).to(torch.uint8)
    return simple(features, *(torch.from_numpy(part.astype(np.int64)) for part in (edges, num_nodes, num_edges)))


def _labelled(path: Path, graphs: list[Any], y: Array | None, names: Array | None = None) -> GraphPart:
    labels = None if y is None else known_labels(y, f"y of {path}")
    if labels is None:
        return GraphPart(graphs, None, ())
    if len(labels) != len(graphs):
        raise FileError("data", f"one label in y for each of {len(graphs)} graphs", path, f"which has {len(labels)}")
    values, numbers = np.unique(labels, return_inverse=True)
    if names is not None and values.dtype.kind == "i" and values[-1] < len(names):
        values = names[values]
    return GraphPart(graphs, numbers, tuple(str(value) for value in values))


def _read_text(folder: Path) -> GraphPart:
    """Read TU's format: NAME_A.txt has an edge "i, j" per line, the other files a line per node or graph, from 1."""
    indicator = next(iter(sorted(folder.glob("*_graph_indicator.txt"))))
    name = indicator.name.removesuffix("_graph_indicator.txt")

    def read(part: str, kind: type = int) -> Array | None:
        path = folder / f"{name}_{part}.txt"
        return _numbers(path, kind) if path.is_file() else None

    graph, edges = _numbers(indicator, int)[:, 0] - 1, read("A")
    if edges is None or edges.shape[1] != 2:
        got = "which does not exist" if edges is None else f"which has {edges.shape[1]}"
        raise FileError("data", "a file of edges with two nodes per line", folder / f"{name}_A.txt", got)
    if graph[0] != 0 or not set(np.diff(graph).tolist()) <= {0, 1}:
        what = "nodes in the order of their graphs, numbered 1, 2, ... without gaps"
        raise FileError("data", what, indicator, "whose nodes are in a different order")
    if edges.size and not 1 <= edges.min() <= edges.max() <= len(graph):
        got = f"which has nodes from {edges.min()} to {edges.max()}"
        raise FileError("data", f"edges between the nodes 1 to {len(graph)}", folder / f"{name}_A.txt", got)
    num_nodes, owner = np.bincount(graph), graph[edges[:, 0] - 1]
    order = np.argsort(owner, kind="stable")
    local = edges[order] - 1 - (np.cumsum(num_nodes) - num_nodes)[owner[order], None]
    kinds, attributes, y = read("node_labels"), read("node_attributes", float), read("graph_labels")
    one_kind = None if kinds is None else np.unique(kinds, axis=0, return_inverse=True)[1].reshape(-1)
    x = attributes if one_kind is None or one_kind.max() == 0 else None
    graphs = _featured(folder, local.T, num_nodes, np.bincount(owner, minlength=len(num_nodes)), one_kind, x)
    # In TU files, labels -1 and 1 are two classes; elsewhere a negative label means none.
    classes, numbers = (None, None) if y is None else np.unique(y[:, 0], return_inverse=True)
    return _labelled(folder, graphs, numbers, classes)


def _numbers(path: Path, kind: type) -> Array:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about an empty file, for which an error is raised below
            found: Array = np.loadtxt(path, delimiter=",", dtype=kind, ndmin=2)
    except ValueError as error:
        got = f"which cannot be parsed: {str(error).rstrip('.')}"
        raise FileError("data", "comma-separated numbers", path, got) from None
    if not found.size:
        raise FileError("data", "comma-separated numbers", path, "which has none")
    return found


def simple(
    x: Annotated[Tensor, "n f"] | None, edges: Annotated[Tensor, "2 m"], num_nodes: Counts, num_edges: Counts
) -> list[Any]:
    """Return undirected graphs without self-loops and repeated edges, as PyG's ``Data``.

    Args:
        x: Features of all nodes [n, f], grouped by graph; None for one-hot degrees, of which those above ``MAX_DEGREE``
            share the last column. Augmentations do not change the features, so they keep the original degrees.
        edges: Edges [2, m] in one or both directions, grouped by graph, counting the nodes of their graph from 0.
        num_nodes: Number of nodes of each graph [g].
        num_edges: Number of edges of each graph [g].

    Raises:
        ArgumentError: If a graph has no node or an edge is out of range.
        MissingExtra: If torch-geometric is not installed.
    """
    who, size = "Graphs", num_nodes.repeat_interleave(num_edges)
    if len(num_nodes) == 0 or int(num_nodes.min()) < 1:
        raise ArgumentError(who, "at least one graph, and a node in each", f"sizes={num_nodes.tolist()[:5]}")
    if edges.numel() and bool(((edges < 0) | (edges >= size)).any()):
        wrong = int(torch.nonzero(((edges < 0) | (edges >= size)).any(0))[0, 0])
        graph = int(torch.searchsorted(num_edges.cumsum(0), wrong, right=True))
        got = f"the edge {edges[:, wrong].tolist()} in graph {graph} with {int(num_nodes[graph])} nodes"
        raise ArgumentError(who, "edges between nodes of the same graph", got)
    utils, data = (optional(f"torch_geometric.{name}", "graphs", extra="graphs") for name in ("utils", "data"))
    starts, n = num_nodes.cumsum(0) - num_nodes, int(num_nodes.sum())
    edges, _ = utils.remove_self_loops(edges + starts.repeat_interleave(num_edges))
    edges = utils.to_undirected(edges, num_nodes=n)  # sorted by the first node, and so by the graph
    if x is None:
        x = one_hot(torch.bincount(edges[0], minlength=n).clamp(max=MAX_DEGREE), MAX_DEGREE + 1).to(torch.uint8)
    owner = torch.arange(len(num_nodes)).repeat_interleave(num_nodes)[edges[0]]
    counts = torch.bincount(owner, minlength=len(num_nodes)).tolist()
    parts = zip(torch.split(x, num_nodes.tolist()), torch.split(edges - starts[owner], counts, 1), strict=True)
    return [data.Data(x=nodes, edge_index=edge_index) for nodes, edge_index in parts]


def from_geometric(items: Sequence[Any]) -> tuple[list[Any], Annotated[Tensor, "g"] | None]:
    """Return any PyG graphs as ``GraphData`` needs them: undirected, without repeated edges, and with features.

    Without ``x``, the features are one-hot degrees. Edge attributes are ignored.

    Args:
        items: PyG's ``Data`` with ``edge_index`` and, optionally, ``x`` and ``y``: a list or a data set.

    Returns:
        The graphs, and their labels [g] if every item has one in ``y``, else None.

    Raises:
        ArgumentError: If there is no graph, only some have ``x``, or an edge is out of range.

    Example:
        >>> from torch_geometric.data import Data
        >>> graphs, _ = from_geometric([Data(edge_index=torch.tensor([[0, 1, 1], [1, 2, 1]]), num_nodes=3)])
        >>> graphs[0].edge_index.tolist(), graphs[0].x.argmax(1).tolist()
        ([[0, 1, 1, 2], [1, 0, 2, 1]], [1, 2, 1])
    """
    bare = [getattr(item, "x", None) is None for item in items]
    if any(bare) and not all(bare):
        got = f"{sum(bare)} of {len(bare)} without"
        raise ArgumentError("Graphs", "node features in all graphs or in none", got)
    num_nodes = torch.tensor([int(item.num_nodes) for item in items], dtype=torch.int64)
    num_edges = torch.tensor([item.edge_index.shape[1] for item in items], dtype=torch.int64)
    edges = torch.cat([torch.zeros(2, 0, dtype=torch.int64), *(item.edge_index.long() for item in items)], dim=1)
    x = None if all(bare) else torch.cat([item.x.reshape(int(item.num_nodes), -1) for item in items])
    labels = [getattr(item, "y", None) for item in items]
    known = all(isinstance(label, Tensor) and label.numel() == 1 for label in labels)
    graphs = simple(x, edges, num_nodes, num_edges)
    return graphs, torch.stack([label.reshape(()) for label in labels]) if known else None  # type: ignore[union-attr]


def save_graphs(path: str | Path, graphs: Sequence[Any], labels: Array | Tensor | None = None) -> None:
    """Write an .npz file that ``graphs:FILE.npz`` reads.

    Args:
        path: Path of the file.
        graphs: PyG's ``Data``, as ``from_geometric`` reads them: a list or a data set.
        labels: Class of each graph [g]; by default ``y`` of the graphs.

    Raises:
        ArgumentError: If the number of labels differs from that of graphs.
    """
    found, known = from_geometric(graphs)
    parts = [one.edge_index[:, one.edge_index[0] < one.edge_index[1]] for one in found]  # each edge once
    arrays = {
        "node_ptr": np.cumsum([0, *(one.num_nodes for one in found)]),
        "edge_ptr": np.cumsum([0, *(part.shape[1] for part in parts)]),
        "edges": torch.cat(parts, dim=1).numpy(),
        "x": torch.cat([one.x for one in found]).numpy(),
    }
    labels = known if labels is None else labels
    if labels is not None:
        if len(labels) != len(found):
            raise ArgumentError("save_graphs", f"a label for each of {len(found)} graphs", f"{len(labels)} labels")
        arrays["y"] = np.asarray(labels)
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]
