"""Pictures of single items for a page, as data URIs: small graphs as SVG, and thumbnails of images as PNG."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hardneg.core.errors import optional

SIDE, MARGIN = 48.0, 3.0  # of the drawing, in pixels
MOST_NODES, MOST_EDGES = 80, 400  # larger graphs are illegible at this size
COLOURS = ("#3b6ea5", "#c8553d", "#5b8c5a", "#8a6fb0", "#c49a3a", "#4d9da8", "#7a7a7a")
"""Colours of the kinds of nodes; all further kinds share the last one."""


def graph_drawing(edges: NDArray[np.int64], kinds: Sequence[int]) -> str | None:
    """Draw a small graph as an SVG in a data URI.

    Args:
        edges: Pairs of nodes [2, m].
        kinds: Kind of each node, which chooses its colour.

    Returns:
        The data URI, or None if the graph is too large to be legible at this size.
    """
    if len(kinds) > MOST_NODES or edges.shape[1] > MOST_EDGES:
        return None
    place = _placed(edges, len(kinds))
    radius = 2.0 if len(kinds) <= 20 else 1.3
    lines = "".join(
        f"M{place[a][0]:.1f} {place[a][1]:.1f}L{place[b][0]:.1f} {place[b][1]:.1f}" for a, b in edges.T.tolist()
    )
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{COLOURS[min(kind, len(COLOURS) - 1)]}"/>'
        for (x, y), kind in zip(place.tolist(), kinds, strict=True)
    )
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIDE:g} {SIDE:g}" width="{SIDE:g}" height="{SIDE:g}">'
        f'<rect width="100%" height="100%" fill="#fff"/><path d="{lines}" stroke="#999" stroke-width=".6" fill="none"/>'
        f"{dots}</svg>"
    )
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def graph_of_file(path: Path) -> tuple[NDArray[np.int64], list[int]] | None:
    """Read a graph in the node-link form of networkx and D3: ``{"nodes": [{"id": 0}], "links": [{"source": 0, ...}]}``.

    Args:
        path: The JSON file. Links may be called edges. A ``kind`` or ``label`` of nodes chooses their colour.

    Returns:
        Pairs of nodes [2, m] and the kind of each node; None if the file is something else.
    """
    try:
        content = json.loads(path.read_text("utf-8"))
        links = content["links"] if "links" in content else content["edges"]
        number = {node["id"]: place for place, node in enumerate(content["nodes"])}
        edges = [(number[link["source"]], number[link["target"]]) for link in links]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    kinds = [str(node.get("kind", node.get("label", ""))) for node in content["nodes"]]
    names = sorted(set(kinds))
    return np.array(edges, dtype=np.int64).reshape(-1, 2).T, [names.index(kind) for kind in kinds]


def _placed(edges: NDArray[np.int64], n: int) -> NDArray[np.float64]:
    """Place the nodes [n, 2] by the method of Fruchterman and Reingold (1991), starting from a circle.

    Edges pull and all nodes push. There is no randomness: the same graph is always drawn the same.
    """
    angle = 2 * np.pi * np.arange(n) / max(n, 1)
    place = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    linked = np.zeros((n, n), dtype=bool)
    linked[edges[0], edges[1]] = linked[edges[1], edges[0]] = True
    length = 1.0 / np.sqrt(max(n, 1))
    for heat in np.linspace(0.1, 0.002, 80):
        apart = place[:, None] - place[None]
        distance = np.maximum(np.linalg.norm(apart, axis=2), 1e-3)
        force = length**2 / distance**2 - np.where(linked, distance / length, 0.0)
        step = (apart * force[:, :, None]).sum(1) - 0.3 * place  # the middle attracts, so components stay close
        size = np.maximum(np.linalg.norm(step, axis=1, keepdims=True), 1e-9)
        place = place + step / size * np.minimum(size, heat)
    middle, wide = (place.min(0) + place.max(0)) / 2, max(float(np.ptp(place, axis=0).max()), 1e-9)
    scaled: NDArray[np.float64] = SIDE / 2 + (SIDE - 2 * MARGIN) * (place - middle) / wide
    return scaled


def thumbnail(image: Annotated[Tensor, "c h w"], longest: int = 48) -> str:
    """Return an image as a PNG in a data URI.

    Args:
        image: Grey or RGB image of uint8 [c, h, w].
        longest: Longest side in pixels; smaller images are not enlarged.
    """
    pillow = optional("PIL.Image", "report", extra="report")
    pixels = image.permute(1, 2, 0).cpu().numpy()
    picture = pillow.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    picture.thumbnail((longest, longest), pillow.Resampling.BOX)  # never larger
    file = BytesIO()
    picture.save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
