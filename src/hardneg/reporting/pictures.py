"""Images of the hardest negatives beside random ones, false negatives marked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from hardneg.core.errors import DataChanged, FileError
from hardneg.io.embeddings import load_embeddings
from hardneg.pages.thumbnails import thumbnail
from hardneg.reporting.story import ArmRuns, SeedRun, Story, evaluated_in, listed
from hardneg.training.data.images import TEST_SHARE, ImageData, load
from hardneg.training.evaluation.pairs import directions
from hardneg.training.trained import fingerprint

NUM_ANCHORS, NUM_NEAREST, NUM_OTHER = 6, 8, 4
COUNTED = 10  # neighbours of every test image whose classes are counted


@dataclass(frozen=True, eq=False)
class Neighbours:
    """What is near in one arm's features."""

    arm: ArmRuns
    similarity: Annotated[Tensor, "anchors n"]
    near: float  # share of the nearest images, over all of the test images, that are of the same class


@dataclass(frozen=True)
class Thumb:
    """An image: its data URI, the name of its class, and whether it is a "false" or "true" negative or a "positive"."""

    source: str
    name: str
    alt: str
    kind: str = "shown"
    tiny: bool = False


@dataclass(frozen=True)
class Strip:
    """Images beside an anchor; those of no arm are random."""

    arm: ArmRuns | None
    head: str
    images: list[Thumb]


def pictures_of(story: Story) -> dict[str, Any]:
    """For some images, those nearest in the features; or a sentence in their place."""
    arms = _arms_to_show(story)
    if not arms:
        return {"instead": "No images are shown: no finished run has saved its embeddings (embeddings.npz)."}
    try:
        data = _evaluated_images(arms[0][1])
        anchors = _anchors(data)
        shown = [_neighbours(arm, one, data, anchors) for arm, one in arms]
        cards = [_anchor_card(i, int(anchor), data, shown) for i, anchor in enumerate(anchors)]
    except (ValueError, OSError, ImportError) as error:
        return {"instead": f"No images are shown: {error}"}
    labels = data.labelled("The section of images")
    chance = float(torch.bincount(labels).double().square().sum() - len(data)) / (len(data) * (len(data) - 1))
    sentences = _sentences(shown, chance, evaluated_in(story))
    return {"instead": "", "cards": cards, "sentences": sentences, "who": _who(arms)}


def _sentences(shown: list[Neighbours], chance: float, split: str) -> list[str]:
    """What the nearest images are, by the numbers; positives of an arm that sees labels are no false negatives."""
    lines = []
    blind = [one for one in shown if not one.arm.uses_labels]
    aware = [one for one in shown if one.arm.uses_labels]
    for group, framed in ((blind, "false negatives, in a red frame with a cross"), (aware, "positives, as labels say")):
        if group:
            near = listed([f"{100 * one.near:.0f} %{_in_arm(one.arm)}" for one in group])
            lines.append(
                f"Among the {COUNTED} nearest of a {split} image, {near} are of its own class ({framed}); among random "
                f"ones {100 * chance:.0f} %."
            )
    if blind:
        more = [one.near > 1.2 * chance for one in blind]
        lines.append(
            "So the hardest negatives are false more often than random ones."
            if all(more)
            else "So the hardest negatives are not clearly false more often than random ones."
            if not any(more)
            else "So in some of these arms the hardest negatives are false more often than random ones."
        )
    return lines


def _in_arm(arm: ArmRuns) -> str:
    return f" in {arm.letter}" if arm.letter else ""


def _arms_to_show(story: Story) -> list[tuple[ArmRuns, SeedRun]]:
    """The first arm and the best of the others on the same images, each with its first seed that has embeddings."""
    there = []
    for arm in story.arms:
        runs = [one for one in arm.seeds if (one.run.path / "embeddings.npz").is_file() and one.result is not None]
        if runs:
            there.append((arm, runs[0]))
    alike = [one for one in there[1:] if _images_of(one[1]) == _images_of(there[0][1])]
    # One that sees labels only where no other sees as little as the first.
    sees = there[0][0].uses_labels if there else False
    others = sorted(alike, key=lambda one: (one[0].uses_labels != sees, -(one[0].row.get("mean") or 0.0)))
    return there[:1] + others[:1]


def _who(arms: list[tuple[ArmRuns, SeedRun]]) -> str:
    """Which arms are shown, and why not all: the page would be long, and few would look at more."""
    if arms[0][0].alone:
        return ""
    shown = f"Shown {'is' if len(arms) == 1 else 'are'} {arms[0][0].letter}, the first arm (seed {arms[0][1].seed})"
    others = [f" and {arm.letter}, the best of the others (seed {one.seed})" for arm, one in arms[1:]]
    return f"{shown}{''.join(others)}."


def _images_of(one: SeedRun) -> tuple[Any, ...]:
    return tuple(str(one.options.get(name)) for name in ("data", "data_root", "evaluate_on", "validation_share"))


def _evaluated_images(one: SeedRun) -> ImageData:
    name, root = one.options.get("data", "digits"), one.options.get("data_root")
    if not isinstance(name, str) or not isinstance(root, str | None):
        raise FileError("report", "the name of a data set in options.data", one.run.config_path)
    share = one.options.get("validation_share", TEST_SHARE)
    if not isinstance(share, float):
        raise FileError("report", "a number in options.validation_share", one.run.config_path)
    validation = one.options.get("evaluate_on") == "validation"
    data = load(name, "train", root).held_out(share)[1] if validation else load(name, "test", root)
    recorded = (one.trained or {}).get("data", {}).get("test", {}).get("fingerprint")
    if recorded is not None and recorded != fingerprint(data):
        raise DataChanged("report", f"the images that {one.run.path.name} was evaluated on", f"others in {name}")
    return data


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


def _anchor_card(row: int, anchor: int, data: ImageData, shown: list[Neighbours]) -> tuple[Thumb, list[Strip]]:
    labels = data.labelled("The section of images")
    other = labels != labels[anchor]
    strips = []
    for one in shown:
        similarity = one.similarity[row].clone()
        similarity[anchor] = -2.0
        nearest = similarity.argsort(descending=True)[: min(NUM_NEAREST, len(data) - 1)]
        true = similarity.masked_fill(~other, -2.0).argsort(descending=True)[: min(NUM_OTHER, int(other.sum()))]
        for head, index in (("nearest", nearest), ("nearest of other classes", true)):
            strips.append(Strip(one.arm, head, _thumbs(data, anchor, index, one.similarity[row], one.arm.uses_labels)))
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(anchor + 1))
    sees = all(one.arm.uses_labels for one in shown)
    strips.append(Strip(None, "random", _thumbs(data, anchor, order[order != anchor][:NUM_NEAREST], None, sees)))
    name = data.classes[int(labels[anchor])]
    return Thumb(thumbnail(data.images[anchor]), name, f"anchor of class {name}", tiny=max(data.size) <= 32), strips


def _thumbs(data: ImageData, anchor: int, index: Tensor, similarity: Tensor | None, sees_labels: bool) -> list[Thumb]:
    labels = data.labelled("The section of images")
    images = []
    for i in index.tolist():
        same = bool(labels[i] == labels[anchor])
        kind = "true" if not same else "positive" if sees_labels else "false"
        name = data.classes[int(labels[i])]
        near = "" if similarity is None else f", similarity {float(similarity[i]):.2f}"
        which = {"true": "", "positive": ", positive", "false": ", false negative"}[kind]
        source = thumbnail(data.images[i])
        images.append(Thumb(source, name, f"class {name}{near}{which}", kind, max(data.size) <= 32))
    return images
