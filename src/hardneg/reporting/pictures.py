"""Images of the hardest negatives beside random ones, false negatives marked."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Annotated, Any

import torch
from torch import Tensor

from hardneg.io.embeddings import load_embeddings
from hardneg.pages.page import said_instead
from hardneg.pages.png import thumbnail
from hardneg.reporting.figures import badge, evaluated_in, in_arm, listed
from hardneg.reporting.story import ArmRuns, SeedRun, Story
from hardneg.training.data.images import ImageData, load
from hardneg.training.evaluation.pairs import directions

NUM_ANCHORS, NUM_NEAREST, NUM_OTHER = 6, 8, 4
COUNTED = 10  # neighbours of every test image whose classes are counted


@dataclass(frozen=True, eq=False)
class Neighbours:
    """What is near in one arm's features."""

    arm: ArmRuns
    similarity: Annotated[Tensor, "anchors n"]
    near: float  # share of the nearest images, over all of the test images, that are of the same class


def pictures_section(story: Story) -> str:
    title = "The hardest negatives, seen"
    arms = _arms_to_show(story)
    if not arms:
        return said_instead(title, "No images are shown: no finished run has saved its embeddings (embeddings.npz).")
    options = arms[0][1].config.get("options", {})
    try:
        data = _evaluated_images(options)
        anchors = _anchors(data)
        shown = [_neighbours(arm, one, data, anchors) for arm, one in arms]
    except (ValueError, OSError, ImportError) as error:
        return said_instead(title, f"No images are shown: {error}")
    assert data.labels is not None
    chance = float(torch.bincount(data.labels).double().square().sum() - len(data)) / (len(data) * (len(data) - 1))
    near = listed([f"{100 * one.near:.0f} %{in_arm(one.arm)}" for one in shown])
    split = evaluated_in(story)
    cards = "".join(_anchor_card(i, int(anchor), data, shown) for i, anchor in enumerate(anchors))
    return (
        f'<section><h2 class="h">{title}</h2><p>For some {split} images, those that are nearest in the trained '
        "features: these are the hardest negatives that a batch could hold. Those in a red frame with a cross are "
        f"false negatives: they are of the same class. Among the {COUNTED} nearest of a {split} image, {near} are of "
        f"its own class; among random ones {100 * chance:.0f} %. That is why harder negatives are also falser "
        f"ones.{_who(arms)}</p>"
        f'<div class="anchors">{cards}</div></section>'
    )


def _arms_to_show(story: Story) -> list[tuple[ArmRuns, SeedRun]]:
    """The first arm and the best of the others on the same images, each with its first seed that has embeddings."""
    there = []
    for arm in story.arms:
        runs = [one for one in arm.seeds if (one.run.path / "embeddings.npz").is_file() and one.result is not None]
        if runs:
            there.append((arm, runs[0]))
    alike = [one for one in there[1:] if _images_of(one[1]) == _images_of(there[0][1])]
    others = sorted(alike, key=lambda one: -(one[0].row["mean"] or 0.0))
    return there[:1] + others[:1]


def _who(arms: list[tuple[ArmRuns, SeedRun]]) -> str:
    """Which arms are shown, and why not all: the page would be long, and few would look at more."""
    if arms[0][0].alone:
        return ""
    shown = f" Shown {'is' if len(arms) == 1 else 'are'} {badge(arms[0][0])}, the first arm (seed {arms[0][1].seed})"
    others = [f" and {badge(arm)}, the best of the others (seed {one.seed})" for arm, one in arms[1:]]
    return f"{shown}{''.join(others)}."


def _images_of(one: SeedRun) -> tuple[Any, ...]:
    options = one.config.get("options", {})
    return tuple(options.get(name) for name in ("data", "data_root", "evaluate_on"))


def _evaluated_images(options: dict[str, Any]) -> ImageData:
    name, root = options.get("data", "digits"), options.get("data_root")
    if options.get("evaluate_on") == "validation":
        return load(name, "train", root).held_out()[1]
    return load(name, "test", root)


def _anchors(data: ImageData) -> Tensor:
    """One image of each of some classes, the same for every report of this data."""
    labels = data.labelled("The section of images")
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    classes = torch.unique(labels)
    chosen = classes[torch.linspace(0, len(classes) - 1, min(NUM_ANCHORS, len(classes))).round().long()]
    return torch.stack([order[labels[order] == label][0] for label in chosen])


def _neighbours(arm: ArmRuns, one: SeedRun, data: ImageData, anchors: Tensor) -> Neighbours:
    _, _, features, labels = load_embeddings(one.run.path / "embeddings.npz")
    if data.labels is None or not torch.equal(labels, data.labels):
        raise ValueError(
            f"the embeddings of {one.run.path.name} are not of the images of {data.name!r} as they are now."
        )
    x = directions(features)
    sample = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))[:2000]
    similarity = x[sample] @ x.T
    similarity[torch.arange(len(sample)), sample] = -2.0
    nearest = similarity.topk(min(COUNTED, len(x) - 1), dim=1).indices
    near = float((labels[nearest] == labels[sample, None]).double().mean())
    return Neighbours(arm, x[anchors] @ x.T, near)


def _anchor_card(row: int, anchor: int, data: ImageData, shown: list[Neighbours]) -> str:
    assert data.labels is not None
    other = data.labels != data.labels[anchor]
    strips = []
    for one in shown:
        similarity = one.similarity[row].clone()
        similarity[anchor] = -2.0
        nearest = similarity.argsort(descending=True)[: min(NUM_NEAREST, len(data) - 1)]
        true = similarity.masked_fill(~other, -2.0).argsort(descending=True)[: min(NUM_OTHER, int(other.sum()))]
        strips.append(_strip(f"{badge(one.arm)} nearest", data, anchor, nearest, one.similarity[row]))
        strips.append(_strip(f"{badge(one.arm)} nearest of other classes", data, anchor, true, one.similarity[row]))
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(anchor + 1))
    strips.append(_strip("random", data, anchor, order[order != anchor][:NUM_NEAREST], None))
    name = escape(data.classes[int(data.labels[anchor])])
    return (
        f'<div class="anchor"><div class="who">{_thumb(data, anchor, "shown", f"anchor of class {name}")}'
        f"<span>{name}</span></div><div class=strips>{''.join(strips)}</div></div>"
    )


def _strip(head: str, data: ImageData, anchor: int, index: Tensor, similarity: Tensor | None) -> str:
    assert data.labels is not None
    images = []
    for i in index.tolist():
        false = bool(data.labels[i] == data.labels[anchor])
        name = escape(data.classes[int(data.labels[i])], quote=True)
        near = "" if similarity is None else f", similarity {float(similarity[i]):.2f}"
        told = f"class {name}{near}{', false negative' if false else ''}"
        image = _thumb(data, i, "false" if false else "true", told)
        images.append(f'<figure class="{"false" if false else "true"}">{image}<figcaption>{name}</figcaption></figure>')
    return f'<div class="strip"><h4>{head}</h4><div>{"".join(images)}</div></div>'


def _thumb(data: ImageData, index: int, kind: str, told: str) -> str:
    tiny = " tiny" if max(data.size) <= 32 else ""
    return f'<img class="{kind}{tiny}" src="{thumbnail(data.images[index])}" alt="{told}" title="{told}">'
