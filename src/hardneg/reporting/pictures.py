"""The hardest negatives of a few anchors next to random items, as pictures or texts; false negatives are marked.

Embeddings are read from the runs, and the items from the data, which must not have changed since. ``pictures_of`` is
called by write.py; at most two arms are shown, the first and the best of the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from hardneg.core.errors import DataChanged, FileError
from hardneg.io.embeddings import load_evaluated
from hardneg.reporting.contents import ArmRuns, PageContents, SeedRun, evaluated_in, listed
from hardneg.training.data.items import TEST_SHARE, Items, Shown
from hardneg.training.data.kinds import kind_of
from hardneg.training.evaluation.pairs import directions
from hardneg.training.loop.data_record import fingerprint
from hardneg.training.options import TrainOptions

NUM_ANCHORS, NUM_NEAREST, NUM_OTHER = 6, 8, 4
"""Anchors on the page, their nearest items, and their nearest items of other classes."""
NUM_COUNTED = 10
"""Nearest neighbours of each test item whose classes are counted."""


@dataclass(frozen=True, eq=False)
class Neighbours:
    """Neighbours of the anchors in the features of one arm.

    Attributes:
        arm: The arm.
        similarity: Cosine similarity of each anchor to all items, shape [anchors, n].
        near: Share of the nearest items that have the class of their query, over all test items; None without labels.
    """

    arm: ArmRuns
    similarity: Annotated[Tensor, "anchors n"]
    near: float | None


@dataclass(frozen=True)
class Thumb:
    """One item on the page.

    Attributes:
        item: Picture or text.
        name: Name of its class.
        alt: Text of the tooltip.
        kind: "false" or "true" (negative), "positive", or "shown" (the anchor). Without labels every negative is
            "true".
    """

    item: Shown
    name: str
    alt: str
    kind: str


@dataclass(frozen=True)
class Strip:
    """A row of items next to an anchor.

    Attributes:
        arm: Arm whose features chose the items; None for random ones.
        head: Heading of the row.
        images: The items.
    """

    arm: ArmRuns | None
    head: str
    images: list[Thumb]


def pictures_of(page: PageContents) -> dict[str, Any]:
    """Return the anchors with their nearest items.

    Returns:
        "cards" with (anchor, strips), "sentences" on how many of the nearest are false negatives, "who" on the arms
        that are shown, "classes" with the names of the classes, and "instead" with the sentence that replaces all that
        if nothing can be shown.
    """
    arms = _arms_to_show(page)
    none = f"No {page.noun}s are shown: "
    if not arms:
        return {"instead": f"{none}no finished run has saved its embeddings (embeddings.npz)."}
    try:
        data = _evaluated_items(arms[0][1])
        anchors = _anchors(data)
        shown = [_neighbours(arm, one, data, anchors) for arm, one in arms]
        cards = [_anchor_card(i, int(anchor), data, shown) for i, anchor in enumerate(anchors)]
    except (ValueError, OSError, ImportError) as error:
        return {"instead": f"{none}{error}"}
    sentences = [] if data.labels is None else _sentences(shown, _chance(data.labels), evaluated_in(page), page.noun)
    return {
        "instead": "",
        "cards": cards,
        "sentences": sentences,
        "who": _shown_arms(arms, page),
        "classes": data.classes,
    }


def _chance(labels: Tensor) -> float:
    """Return the probability that two random items have the same class."""
    n = len(labels)
    return float(torch.bincount(labels).double().square().sum() - n) / (n * (n - 1))


def _sentences(shown: list[Neighbours], chance: float, split: str, noun: str) -> list[str]:
    """Return sentences on the classes of the nearest items; same-class items of an arm with labels are positives."""
    lines = []
    blind = [one for one in shown if not one.arm.uses_labels]
    aware = [one for one in shown if one.arm.uses_labels]
    for group, framed in ((blind, "false negatives, marked in red"), (aware, "positives, by their labels")):
        if group:
            arms = [f" in {one.arm.letter}" * (not one.arm.alone) for one in group]
            near = listed([f"{100 * (one.near or 0.0):.0f} %{arm}" for one, arm in zip(group, arms, strict=True)])
            lines.append(
                f"Among the {NUM_COUNTED} nearest of a {split} {noun}, {near} are of its own class ({framed}); among "
                f"random ones {100 * chance:.0f} %."
            )
    if blind:
        more = [(one.near or 0.0) > 1.2 * chance for one in blind]
        lines.append(
            "So the hardest negatives are false more often than random ones."
            if all(more)
            else "So the hardest negatives are not clearly false more often than random ones."
            if not any(more)
            else "So in some of these arms the hardest negatives are false more often than random ones."
        )
    return lines


def _arms_to_show(page: PageContents) -> list[tuple[ArmRuns, SeedRun]]:
    """Return the first arm and the best of the others with the same items, each with its first usable seed."""
    there = []
    for arm in page.arms:
        runs = [one for one in arm.seeds if (one.run.path / "embeddings.npz").is_file() and one.result is not None]
        if runs:
            there.append((arm, runs[0]))
    alike = [one for one in there[1:] if _items_of(one[1]) == _items_of(there[0][1])]
    # An arm that differs from the first in its use of labels comes last.
    sees = there[0][0].uses_labels if there else False
    others = sorted(alike, key=lambda one: (one[0].uses_labels != sees, -(one[0].row.get("mean") or 0.0)))
    return there[:1] + others[:1]


def _shown_arms(arms: list[tuple[ArmRuns, SeedRun]], page: PageContents) -> str:
    """Return which arms are shown: only two, to keep the page short."""
    if arms[0][0].alone:
        return ""
    shown = f"Shown {'is' if len(arms) == 1 else 'are'} {arms[0][0].letter}, the first arm (seed {arms[0][1].seed})"
    others = [f" and {arm.letter}, the best of the others (seed {one.seed})" for arm, one in arms[1:]]
    sees = arms[0][0].uses_labels
    unlike = (
        [arm.letter for arm in page.arms if arm.uses_labels != sees]
        if len(arms) > 1 and arms[1][0].uses_labels == sees
        else []
    )
    which = "without labels" if sees else "that use labels"
    return f"{shown}{''.join(others)}." + (f" Arms {which} are left out: {listed(unlike)}." if unlike else "")


def _items_of(one: SeedRun) -> tuple[Any, ...]:
    """Return the options that determine which items are evaluated."""
    return tuple(str(one.options.get(name)) for name in ("data", "data_root", "evaluate_on", "validation_share"))


def _evaluated_items(one: SeedRun) -> Items:
    """Load the items that a run was evaluated on.

    Raises:
        FileError: If its config.json has no usable data options.
        DataChanged: If the data differ from those that the run recorded.
    """
    name, root = one.options.get("data", "digits"), one.options.get("data_root")
    if not isinstance(name, str) or not isinstance(root, str | None):
        raise FileError("report", "the name of a data set in options.data", one.run.config_path)
    share = one.options.get("validation_share", TEST_SHARE)
    if not isinstance(share, float):
        raise FileError("report", "a number in options.validation_share", one.run.config_path)
    split = "validation" if one.options.get("evaluate_on") == "validation" else "test"
    options = TrainOptions(data=name, data_root=root, evaluate_on=split, validation_share=share)
    data = kind_of(name, may_run=False).evaluated(options)
    recorded = (one.trained or {}).get("data", {}).get("test", {}).get("fingerprint")
    if recorded != fingerprint(data):
        raise DataChanged(
            "report", f"the {data.noun}s that {one.run.path.name} was evaluated on", f"different ones in {name}"
        )
    return data


def _anchors(data: Items) -> Tensor:
    """Return the positions of the anchors: items of different classes, or any without labels; equal in every report."""
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    if data.labels is None:
        return order[:NUM_ANCHORS]
    labels = data.labelled(f"The section of {data.noun}s")
    classes = torch.unique(labels)
    chosen = classes[torch.linspace(0, len(classes) - 1, min(NUM_ANCHORS, len(classes))).round().long()]
    return torch.stack([order[labels[order] == label][0] for label in chosen])


def _neighbours(arm: ArmRuns, one: SeedRun, data: Items, anchors: Tensor) -> Neighbours:
    """Return the similarities of the anchors in the features of a run; raise if they are not of this data."""
    features, labels = load_evaluated(one.run.path / "embeddings.npz")
    same = labels is None if data.labels is None else labels is not None and torch.equal(labels, data.labels)
    if not same or len(features) != len(data):
        raise ValueError(
            f"the embeddings of {one.run.path.name} do not match the {data.noun}s of {data.name!r} as they are now."
        )
    x = directions(features)
    return Neighbours(arm, x[anchors] @ x.T, None if labels is None else _near(x, labels))


def _near(x: Tensor, labels: Tensor) -> float:
    """Return the share of the nearest neighbours that have the same class, over a sample of 2,000 items."""
    sample = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))[:2000]
    similarity = x[sample] @ x.T
    similarity[torch.arange(len(sample)), sample] = -2.0
    nearest = similarity.topk(min(NUM_COUNTED, len(x) - 1), dim=1).indices
    return float((labels[nearest] == labels[sample, None]).double().mean())


def _anchor_card(row: int, anchor: int, data: Items, shown: list[Neighbours]) -> tuple[Thumb, list[Strip]]:
    """Return an anchor with its strips: the nearest items of each arm, those of other classes, and random ones."""
    strips = []
    for one in shown:
        similarity = one.similarity[row].clone()
        similarity[anchor] = -2.0
        nearest = similarity.argsort(descending=True)[: min(NUM_NEAREST, len(data) - 1)]
        heads = {"nearest": nearest}
        if data.labels is not None:
            other = data.labels != data.labels[anchor]
            true = similarity.masked_fill(~other, -2.0).argsort(descending=True)[: min(NUM_OTHER, int(other.sum()))]
            heads["nearest of other classes"] = true
        for head, index in heads.items():
            strips.append(Strip(one.arm, head, _thumbs(data, anchor, index, one.similarity[row], one.arm.uses_labels)))
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(anchor + 1))
    sees = all(one.arm.uses_labels for one in shown)
    strips.append(Strip(None, "random", _thumbs(data, anchor, order[order != anchor][:NUM_NEAREST], None, sees)))
    name = _class_of(data, anchor)
    return Thumb(data.shown(anchor), name, f"anchor of class {name}" if name else "anchor", "shown"), strips


def _class_of(data: Items, position: int) -> str:
    """Return the name of the class of an item; empty without labels."""
    return "" if data.labels is None else data.classes[int(data.labels[position])]


def _thumbs(data: Items, anchor: int, index: Tensor, similarity: Tensor | None, sees_labels: bool) -> list[Thumb]:
    """Return the items at these positions, marked as positives, true or false negatives of the anchor."""
    thumbs = []
    for i in index.tolist():
        same = data.labels is not None and bool(data.labels[i] == data.labels[anchor])
        kind = "true" if not same else "positive" if sees_labels else "false"
        name = _class_of(data, i)
        parts = [f"class {name}"] if name else []
        parts += [] if similarity is None else [f"similarity {float(similarity[i]):.2f}"]
        parts += {"true": [], "positive": ["positive"], "false": ["false negative"]}[kind]
        thumbs.append(Thumb(data.shown(i), name, ", ".join(parts), kind))
    return thumbs
