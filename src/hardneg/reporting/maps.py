"""Maps of the embeddings in two dimensions, with lines from some anchors to their hardest negatives.

``maps_of`` is called by write.py. The plane is that of the two largest principal components (PCA), or of UMAP if
umap-learn is installed. Neighbours are found in all dimensions, so a line may be long on the map.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated

import torch
from markupsafe import Markup
from torch import Tensor

from hardneg.core.errors import optional, warn_once
from hardneg.io.embeddings import load_evaluated
from hardneg.pages.charts.axes import NUM_COLOURS
from hardneg.pages.charts.maps import SHAPES, MapEdge, MapPoint, class_mark, map_chart
from hardneg.reporting.contents import ArmRuns, PageContents, SeedRun, class_name
from hardneg.training.evaluation.pairs import directions

NUM_MAPPED, NUM_FITTED = 300, 2_000
"""Random items on a map, and items from which its plane is computed."""
NUM_MAP_ANCHORS, NUM_EDGES = 30, 3
"""Anchors on a map, and edges to the hardest negatives of each."""
MOST_MAPS = 8


@dataclass(frozen=True)
class EmbeddingMap:
    """The map of one arm.

    Attributes:
        arm: The arm.
        chart: The drawing.
        caption: Sentences on the edges and on the plane.
    """

    arm: ArmRuns
    chart: Markup
    caption: str


@dataclass(frozen=True)
class EmbeddingMaps:
    """The maps of a page.

    Attributes:
        cards: One map for each arm with embeddings.
        legend: Mark and name of each class; empty without labels or with more classes than there are marks.
        method: Name of the projection.
        labelled: Whether the classes are known.
        left_out: Number of arms that are not drawn.
    """

    cards: list[EmbeddingMap]
    legend: list[tuple[Markup, str]]
    method: str
    labelled: bool
    left_out: int


def maps_of(page: PageContents, names: tuple[str, ...]) -> EmbeddingMaps | None:
    """Return the maps of the arms; None if no finished run has saved its embeddings.

    Args:
        page: Contents of the page.
        names: Names of the classes; empty where the data could not be read.
    """
    found = [(arm, vectors) for arm in page.arms if (vectors := _vectors(arm)) is not None]
    if not found:
        return None
    method = "UMAP" if find_spec("umap") is not None else "PCA"
    cards = [_map(arm, *vectors, names, method, page.noun) for arm, vectors in found[:MOST_MAPS]]
    classes = sorted({label for _, (_, labels) in found if labels is not None for label in labels.tolist()})
    legend = [(class_mark(label, name), name) for label in classes if (name := class_name(label, names))]
    shown = legend if len(classes) <= NUM_COLOURS * SHAPES else []
    return EmbeddingMaps(cards, shown, method, bool(classes), len(found) - len(cards))


def _vectors(arm: ArmRuns) -> tuple[Tensor, Tensor | None] | None:
    """Return the features [n, d] and labels [n] of the first finished run that has some; None without any."""
    for one in arm.seeds:
        if one.result is not None and (loaded := _of_run(one)) is not None:
            return loaded
    return None


def _of_run(one: SeedRun) -> tuple[Tensor, Tensor | None] | None:
    file = one.run.path / "embeddings.npz"
    if not file.is_file():
        return None
    try:
        features, labels = load_evaluated(file)
    except (OSError, ValueError) as error:
        warn_once(f"damaged embeddings: {file}", f"The maps leave out a run: {error}")
        return None
    usable = len(features) > NUM_EDGES and bool(torch.isfinite(features).all())
    return (directions(features), labels) if usable else None


def _map(
    arm: ArmRuns, x: Tensor, labels: Tensor | None, names: tuple[str, ...], method: str, noun: str
) -> EmbeddingMap:
    """Draw the map of one arm: random items, anchors, and the hardest negatives of these."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(2))
    anchors = order[:NUM_MAP_ANCHORS]
    similarity = x[anchors] @ x.T
    similarity[torch.arange(len(anchors)), anchors] = -2.0
    if arm.uses_labels and labels is not None:  # items of the anchor's class are no negatives of such an arm
        similarity[labels[anchors, None] == labels] = -2.0
    hardest = similarity.topk(min(NUM_EDGES, len(x) - 1), dim=1)
    kept = hardest.values > -2.0
    drawn = list(dict.fromkeys([*order[:NUM_MAPPED].tolist(), *hardest.indices[kept].tolist()]))
    place = {item: i for i, item in enumerate(drawn)}
    fitted = torch.tensor(list(dict.fromkeys([*drawn, *order[:NUM_FITTED].tolist()])))
    plane, about = _pca(x[fitted]) if method == "PCA" else _umap(x[fitted])
    chosen = set(anchors.tolist())
    points = [
        MapPoint(across, up, _named(item, labels, names, noun), _label(item, labels), item in chosen)
        for item, (across, up) in zip(drawn, plane[: len(drawn)].tolist(), strict=True)
    ]
    edges = [
        MapEdge(place[anchor], place[item], labels is not None and bool(labels[anchor] == labels[item]))
        for anchor, row, keep in zip(anchors.tolist(), hardest.indices.tolist(), kept.tolist(), strict=True)
        for item, there in zip(row, keep, strict=True)
        if there
    ]
    false = sum(one.false for one in edges)
    counted = f"{false} of {len(edges)} lines lead to a false negative. " if labels is not None else ""
    if arm.uses_labels:
        counted = "Training uses labels, so negatives are of other classes. "
    return EmbeddingMap(arm, map_chart(f"Map of {arm.text}", points, edges), f"{counted}{about}".strip())


def _pca(x: Annotated[Tensor, "n d"]) -> tuple[Annotated[Tensor, "n 2"], str]:
    """Project onto the two directions of largest variance; their signs are fixed, so that reports are equal."""
    centred = x.double() - x.double().mean(dim=0)
    values, vectors = torch.linalg.eigh(centred.T @ centred)
    axes = vectors[:, -2:].flip(1)
    axes = axes * axes.gather(0, axes.abs().argmax(dim=0, keepdim=True)).sign()
    plane = centred @ axes
    if plane.shape[1] < 2:
        plane = torch.cat([plane, torch.zeros(len(plane), 1, dtype=plane.dtype)], dim=1)
    share = float(values[-2:].sum() / values.sum().clamp(min=1e-12))
    return plane, f"Both axes together show {100 * share:.0f} % of the variance."


def _umap(x: Annotated[Tensor, "n d"]) -> tuple[Annotated[Tensor, "n 2"], str]:
    """Embed into the plane by UMAP with a fixed seed."""
    umap = optional("umap", "report", extra="report")
    reducer = umap.UMAP(n_components=2, metric="cosine", random_state=0, n_neighbors=min(15, len(x) - 1))
    return torch.as_tensor(reducer.fit_transform(x.numpy())).double(), ""


def _label(item: int, labels: Tensor | None) -> int | None:
    return None if labels is None else int(labels[item])


def _named(item: int, labels: Tensor | None, names: tuple[str, ...], noun: str) -> str:
    """Return the text of the tooltip."""
    return f"{noun} {item}" + ("" if labels is None else f", class {class_name(int(labels[item]), names)}")
