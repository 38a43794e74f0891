"""The top of the page: the question, the answer, and what was done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hardneg.comparing.request import why_no_accuracy
from hardneg.reporting.contents import ArmRuns, PageContents, evaluated_in, known, measure_in, percent
from hardneg.training.evaluation.measures import MEASURES, unit_of

UNLIKE = "More than the negatives differs"
HELD_OUT = "The validation {0}s are training {0}s that were held out of training; the test {0}s were not used."


def title_of(story: PageContents) -> str:
    data = Path(str(story.options.get("data", "this data")).rpartition(":")[2]).name
    if story.kind == "run":
        return f"One run of {story.facts.get('recipe', 'train')} on {data}"
    if story.kind == "several":
        return f"Runs on {data}, side by side" if "data" in story.options else "Runs side by side"
    return f"Which negatives are best for {data}?"


def answer_of(story: PageContents) -> list[str]:
    """The answer: of a comparison, the sentences of comparison.json."""
    first = story.arms[0]
    if story.kind == "unfinished":
        return ["This comparison is not finished, so there is no answer yet. Below is what is measured so far."]
    if story.kind == "several":
        return [
            f"{len(story.arms)} arms from {len(story.parts)} directories. They were not run as one comparison, so no "
            "difference is judged here; hardneg compare does that."
        ]
    if story.kind == "comparison":
        return list(story.facts.get("answer", []))
    if not first.finished():
        return ["This run is not finished, so there is no accuracy yet. Below is what it has recorded so far."]
    if not known(first.row.get("mean")):
        return [f"There is no accuracy: {why_no_accuracy(first.finished()[0])}."]
    measure = measure_in(story, story.metric)
    figure = percent(first.row["mean"], unit="" if unit_of(story.metric) != "%" else " %")
    return [f"On {story.noun}s that it was not trained on, {measure}: {figure}."]


def differences(story: PageContents) -> list[tuple[list[ArmRuns], str]]:
    """The sentences of comparison.json on each difference, with its arms; and on all of them together."""
    by_name = {arm.text: arm for arm in story.arms}
    verdicts = story.facts.get("verdicts", []) if story.kind == "comparison" else []
    judged = [one.get("sentence", "") for one in verdicts]
    pairs = [[by_name[one[name]] for name in ("arm", "against") if one.get(name) in by_name] for one in verdicts]
    every = story.facts.get("sentences", []) if story.kind == "comparison" else []
    return [*zip(pairs, judged, strict=True), *(([], one) for one in every if one not in judged)]


def notes_of(story: PageContents) -> list[tuple[str, list[str]]]:
    """What to know before the figures are believed, under headings."""
    notes = [("What to know about these runs", story.cautions)]
    if story.kind == "several":
        return [*notes, (UNLIKE, story.unlike + list(story.facts.get("notes", [])))]
    return [
        *notes,
        ("Temperature", list(story.facts.get("notes", [])) if story.kind == "comparison" else []),
        (UNLIKE, [] if story.kind == "run" else story.unlike),
    ]


def aside_of(arm: ArmRuns, story: PageContents) -> str:
    """What must be known of an arm to read its figures rightly."""
    first = story.kind == "comparison" and arm is story.arms[0]
    parts = ["the reference of the others"] * first + [
        f"sees the labels of the training {story.noun}s"
    ] * arm.uses_labels
    return f"({'; '.join(parts)})" if parts else ""


def setting_of(story: PageContents) -> dict[str, Any]:
    """What was done, for a reader who has not read the papers."""
    options, epochs = story.options, story.options.get("epochs")
    counts = sorted({str(result.get("k", 200)) for arm in story.arms for result in arm.finished()}) or ["200"]
    split, noun = evaluated_in(story), story.noun
    explained = MEASURES[story.metric].explained.format(split=split, noun=noun, k=" or ".join(counts))
    budget = [
        f"{epochs} pass{'es' * (epochs != 1)} over the training {noun}s" if epochs is not None else "",
        f"batches of {options['batch_size']}" if "batch_size" in options else "",
    ]
    same = "Data, budget, seeds and initial weights" if story.same_weights else "Data, budget and seeds"
    compared = story.kind in ("comparison", "unfinished") and "data" not in story.differing
    measured = f"Measured by {measure_in(story, story.metric)}: {explained}."
    return {
        "same": f"{same} are the same for all." if compared else "",
        "training": ", ".join(part for part in budget if part) or "see the options below",
        "measured": measured if any(arm.row.get("values") for arm in story.arms) else "",
        "held_out": HELD_OUT.format(noun) if "validation" in split else "",
    }
