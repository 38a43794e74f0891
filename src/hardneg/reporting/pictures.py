"""The hardest negatives beside random ones, as pictures or texts, false negatives marked where there are labels."""

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
from hardneg.training.data_record import fingerprint
from hardneg.training.evaluation.pairs import directions
from hardneg.training.options import TrainOptions

NUM_ANCHORS, NUM_NEAREST, NUM_OTHER = 6, 8, 4
COUNTED = 10  # neighbours of every test item whose classes are counted


@dataclass(frozen=True, eq=False)
class Neighbours:
    """What is near in one arm's features."""

    arm: ArmRuns
    similarity: Annotated[Tensor, "anchors n"]
    near: float | None  # share of the nearest items, over all of the test items, that are of the same class


@dataclass(frozen=True)
class Thumb:
    """An item, the name of its class, and whether it is a "false" or "true" negative, a "positive" or the anchor.

    Without labels every negative is "true", as far as anybody knows.
    """

    item: Shown
    name: str
    alt: str
    kind: str


@dataclass(frozen=True)
class Strip:
    """Items beside an anchor; those of no arm are random."""

    arm: ArmRuns | None
    head: str
    images: list[Thumb]


def pictures_of(story: PageContents) -> dict[str, Any]:
    """For some items, those nearest in the features; or a sentence in their place."""
    arms = _arms_to_show(story)
    none = f"No {story.noun}s are shown: "
    if not arms:
        return {"instead": f"{none}no finished run has saved its embeddings (embeddings.npz)."}
    try:
        data = _evaluated_items(arms[0][1])
        anchors = _anchors(data)
        shown = [_neighbours(arm, one, data, anchors) for arm, one in arms]
        cards = [_anchor_card(i, int(anchor), data, shown) for i, anchor in enumerate(anchors)]
    except (ValueError, OSError, ImportError) as error:
        return {"instead": f"{none}{error}"}
    sentences = [] if data.labels is None else _sentences(shown, _chance(data.labels), evaluated_in(story), story.noun)
    return {"instead": "", "cards": cards, "sentences": sentences, "who": _who(arms, story)}


def _chance(labels: Tensor) -> float:
    """How often two random items are of one class."""
    n = len(labels)
    return float(torch.bincount(labels).double().square().sum() - n) / (n * (n - 1))


def _sentences(shown: list[Neighbours], chance: float, split: str, noun: str) -> list[str]:
    """What the nearest items are, by the numbers; positives of an arm that sees labels are no false negatives."""
    lines = []
    blind = [one for one in shown if not one.arm.uses_labels]
    aware = [one for one in shown if one.arm.uses_labels]
    for group, framed in ((blind, "false negatives, marked in red"), (aware, "positives, as labels say")):
        if group:
            arms = [f" in {one.arm.letter}" * (not one.arm.alone) for one in group]
            near = listed([f"{100 * (one.near or 0.0):.0f} %{arm}" for one, arm in zip(group, arms, strict=True)])
            lines.append(
                f"Among the {COUNTED} nearest of a {split} {noun}, {near} are of its own class ({framed}); among "
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


def _arms_to_show(story: PageContents) -> list[tuple[ArmRuns, SeedRun]]:
    """The first arm and the best of the others on the same items, each with its first seed that has embeddings."""
    there = []
    for arm in story.arms:
        runs = [one for one in arm.seeds if (one.run.path / "embeddings.npz").is_file() and one.result is not None]
        if runs:
            there.append((arm, runs[0]))
    alike = [one for one in there[1:] if _items_of(one[1]) == _items_of(there[0][1])]
    # One that sees labels only where no other sees as little as the first.
    sees = there[0][0].uses_labels if there else False
    others = sorted(alike, key=lambda one: (one[0].uses_labels != sees, -(one[0].row.get("mean") or 0.0)))
    return there[:1] + others[:1]


def _who(arms: list[tuple[ArmRuns, SeedRun]], story: PageContents) -> str:
    """Which arms are shown, and why not all: the page would be long, and few would look at more."""
    if arms[0][0].alone:
        return ""
    shown = f"Shown {'is' if len(arms) == 1 else 'are'} {arms[0][0].letter}, the first arm (seed {arms[0][1].seed})"
    others = [f" and {arm.letter}, the best of the others (seed {one.seed})" for arm, one in arms[1:]]
    sees = arms[0][0].uses_labels
    unlike = (
        [arm.letter for arm in story.arms if arm.uses_labels != sees]
        if len(arms) > 1 and arms[1][0].uses_labels == sees
        else []
    )
    which = "without labels" if sees else "that see labels"
    return f"{shown}{''.join(others)}." + (f" Arms {which} are left out: {listed(unlike)}." if unlike else "")


def _items_of(one: SeedRun) -> tuple[Any, ...]:
    return tuple(str(one.options.get(name)) for name in ("data", "data_root", "evaluate_on", "validation_share"))


def _evaluated_items(one: SeedRun) -> Items:
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
        raise DataChanged("report", f"the {data.noun}s that {one.run.path.name} was evaluated on", f"others in {name}")
    return data


def _anchors(data: Items) -> Tensor:
    """One item of each of some classes, or any without labels; the same for every report of this data."""
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    if data.labels is None:
        return order[:NUM_ANCHORS]
    labels = data.labelled(f"The section of {data.noun}s")
    classes = torch.unique(labels)
    chosen = classes[torch.linspace(0, len(classes) - 1, min(NUM_ANCHORS, len(classes))).round().long()]
    return torch.stack([order[labels[order] == label][0] for label in chosen])


def _neighbours(arm: ArmRuns, one: SeedRun, data: Items, anchors: Tensor) -> Neighbours:
    features, labels = load_evaluated(one.run.path / "embeddings.npz")
    same = labels is None if data.labels is None else labels is not None and torch.equal(labels, data.labels)
    if not same or len(features) != len(data):
        raise ValueError(
            f"the embeddings of {one.run.path.name} are not of the {data.noun}s of {data.name!r} as they are now."
        )
    x = directions(features)
    return Neighbours(arm, x[anchors] @ x.T, None if labels is None else _near(x, labels))


def _near(x: Tensor, labels: Tensor) -> float:
    sample = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))[:2000]
    similarity = x[sample] @ x.T
    similarity[torch.arange(len(sample)), sample] = -2.0
    nearest = similarity.topk(min(COUNTED, len(x) - 1), dim=1).indices
    return float((labels[nearest] == labels[sample, None]).double().mean())


def _anchor_card(row: int, anchor: int, data: Items, shown: list[Neighbours]) -> tuple[Thumb, list[Strip]]:
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
    return "" if data.labels is None else data.classes[int(data.labels[position])]


def _thumbs(data: Items, anchor: int, index: Tensor, similarity: Tensor | None, sees_labels: bool) -> list[Thumb]:
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
