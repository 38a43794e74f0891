"""What the page shows from the embeddings.npz of the runs: maps, and the accuracy of each class.

``maps_of`` draws the embeddings in two dimensions, with lines from some anchors to their hardest negatives. The plane
is that of the two largest principal components (PCA), or of UMAP if umap-learn is installed. Neighbours are found in
all dimensions, so a line may be long on the map. ``classes_of`` counts the correct test items of each class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated

import numpy as np
import torch
from markupsafe import Markup
from numpy.typing import NDArray
from torch import Tensor

from hardneg.core.errors import optional, warn_once
from hardneg.io.embeddings import load_evaluated, unpack_bits
from hardneg.pages.charts.axes import NUM_COLOURS, WIDTH, Axis, shown, svg
from hardneg.reporting.contents import ArmRuns, PageContents, SeedRun, class_name
from hardneg.training.evaluation.pairs import directions

NUM_MAPPED, NUM_FITTED = 300, 2_000
"""Random items on a map, and items from which its plane is computed."""
NUM_MAP_ANCHORS, NUM_EDGES = 30, 3
"""Anchors on a map, and edges to the hardest negatives of each."""
MOST_MAPS = 8
MAP_HEIGHT, MARGIN = 330, 8
SHAPES = 4
"""Number of different marks; with the colours they distinguish 32 classes."""


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


@dataclass(frozen=True)
class MapPoint:
    """One item of the map.

    Attributes:
        x: Horizontal place.
        y: Vertical place.
        name: Text of the tooltip.
        kind: Number of its class, which chooses colour and mark; None without labels.
        anchor: Whether its hardest negatives are drawn.
    """

    x: float
    y: float
    name: str
    kind: int | None
    anchor: bool


@dataclass(frozen=True)
class MapEdge:
    """A line from an anchor to one of its hardest negatives.

    Attributes:
        anchor: Position of the anchor among the points.
        negative: Position of the negative among the points.
        false: Whether the negative is known to be false.
    """

    anchor: int
    negative: int
    false: bool


def map_chart(name: str, points: Sequence[MapPoint], edges: Sequence[MapEdge]) -> Markup:
    """Draw the items, and above them the edges and the anchors.

    Args:
        name: Name of the figure, for the accessible description.
        points: The items.
        edges: Lines to the hardest negatives; false ones are red and solid, others grey and dashed.
    """
    x = _map_axis([one.x for one in points], MARGIN, WIDTH - MARGIN)
    y = _map_axis([one.y for one in points], MAP_HEIGHT - MARGIN, MARGIN)
    places = [(x(one.x), y(one.y)) for one in points]
    lines = "".join(
        f'<line class="{"edge false" if one.false else "edge"}" x1="{places[one.anchor][0]:.1f}" '
        f'y1="{places[one.anchor][1]:.1f}" x2="{places[one.negative][0]:.1f}" y2="{places[one.negative][1]:.1f}"/>'
        for one in sorted(edges, key=lambda one: one.false)
    )
    drawn = sorted(zip(points, places, strict=True), key=lambda one: one[0].anchor)
    below = "".join(_item_mark(one, *place) for one, place in drawn if not one.anchor)
    above = "".join(_item_mark(one, *place) for one, place in drawn if one.anchor)
    false = sum(one.false for one in edges)
    text = f"{name}: {len(points)} items, {len(edges)} edges to the hardest negatives, {false} of them false."
    return svg(text, below + lines + above, height=MAP_HEIGHT, kind="chart map")


def class_mark(kind: int, name: str) -> Markup:
    """Return the mark of a class for a legend."""
    mark = _item_mark(MapPoint(0, 0, "", kind, False), 6.0, 6.0, radius=4.5, role="sample")
    label = shown(f"mark of class {name}")
    return Markup(
        f'<svg class="sign" role="img" aria-label="{label}" width="12" height="12" viewBox="0 0 12 12">{mark}</svg>'
    )


def _map_axis(values: list[float], start: float, end: float) -> Axis:
    low, high = min(values), max(values)
    return Axis(low, high, start, end) if high > low else Axis(low - 1.0, high + 1.0, start, end)


def _item_mark(point: MapPoint, x: float, y: float, radius: float | None = None, role: str = "item") -> str:
    """Draw an item: the colour is its class modulo 8, the mark its class divided by 8."""
    r = radius or (4.0 if point.anchor else 2.6)
    kind = point.kind or 0
    colour = "plain" if point.kind is None else f"c{kind % NUM_COLOURS}"
    classes = f"{'anchor' if point.anchor else role} {colour}"
    title = f"<title>{shown(point.name)}</title>" if point.name else ""
    shape = kind // NUM_COLOURS % SHAPES
    if shape == 0:
        return f'<circle class="{classes}" cx="{x:.1f}" cy="{y:.1f}" r="{r}">{title}</circle>'
    if shape == 1:
        place = f'x="{x - r:.1f}" y="{y - r:.1f}" width="{2 * r}" height="{2 * r}"'
        return f'<rect class="{classes}" {place}>{title}</rect>'
    corners = ((0, -1.3), (1.2, 0.9), (-1.2, 0.9)) if shape == 2 else ((0, -1.4), (1.4, 0), (0, 1.4), (-1.4, 0))
    path = "L".join(f"{x + r * dx:.1f} {y + r * dy:.1f}" for dx, dy in corners)
    return f'<path class="{classes}" d="M{path}Z">{title}</path>'


FEW_CLASSES = 20
"""Number of classes up to which the table is open."""


@dataclass(frozen=True)
class ClassTable:
    """Accuracy of each class.

    Attributes:
        arms: The arms, which are the columns.
        rows: Name of the class, number of its items, and the mean accuracy of each arm over its seeds, in percent.
        is_long: Whether the table is long enough to be folded.
    """

    arms: list[ArmRuns]
    rows: list[tuple[str, int, list[str]]]
    is_long: bool


def classes_of(page: PageContents, names: tuple[str, ...]) -> ClassTable | None:
    """Return the accuracy of each class; None if no run recorded labels and correct items.

    Args:
        page: Contents of the page.
        names: Names of the classes; empty where the data could not be read, then their numbers are shown.
    """
    found = {arm.number: [one for seed in arm.seeds if (one := _correct(seed, page.metric)) is not None]
             for arm in page.arms}  # fmt: skip
    every = [one for seeds in found.values() for one in seeds]
    if not every or any(not np.array_equal(labels, every[0][0]) for labels, _ in every):
        return None
    labels = every[0][0]
    classes, counts = np.unique(labels, return_counts=True)
    if len(classes) < 2:
        return None
    arms = [arm for arm in page.arms if found[arm.number]]
    shares = {
        arm.number: np.mean([[right[labels == one].mean() for one in classes] for _, right in runs], axis=0)
        for arm in arms
        if (runs := found[arm.number])
    }
    rows = [
        (class_name(int(one), names), int(count), [f"{100.0 * shares[arm.number][i]:.1f}" for arm in arms])
        for i, (one, count) in enumerate(zip(classes, counts, strict=True))
    ]
    return ClassTable(arms, rows, len(rows) > FEW_CLASSES)


def _correct(one: SeedRun, metric: str) -> tuple[NDArray[np.int64], NDArray[np.bool_]] | None:
    """Return the label of each evaluated item and whether the run has it right; None where this is not recorded."""
    file, packed = one.run.path / "embeddings.npz", ((one.result or {}).get("correct") or {}).get(metric)
    if packed is None or not file.is_file():
        return None
    try:
        labels = load_evaluated(file)[1]
    except (OSError, ValueError) as error:
        warn_once(f"damaged embeddings: {file}", f"The accuracy of the classes leaves out a run: {error}")
        return None
    right = None if labels is None else unpack_bits(packed, len(labels))
    return None if labels is None or right is None else (labels.numpy(), right)
