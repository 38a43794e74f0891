"""Texts of the page: its title, the answer, the notes, and the description of the experiment.

A comparison brings its sentences along in comparison.json (comparing/verdict.py); for single, unfinished or unrelated
runs they are written here. All functions are called by ``report_page`` (write.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hardneg.comparing.request import why_no_accuracy
from hardneg.reporting.contents import ArmRuns, PageContents, evaluated_in, known, measure_in, percent
from hardneg.training.evaluation.measures import MEASURES, unit_of

MORE_DIFFERS = "More than the negatives differs"
HELD_OUT = "The validation {0}s are training {0}s that were held out of training; the test {0}s were not used."


def title_of(page: PageContents) -> str:
    """Return the title of the page."""
    data = Path(str(page.options.get("data", "this data")).rpartition(":")[2]).name
    if page.kind == "run":
        return f"One run of {page.facts.get('recipe', 'train')} on {data}"
    if page.kind == "several":
        return f"Runs on {data}, side by side" if "data" in page.options else "Runs side by side"
    return f"Which negatives are best for {data}?"


def answer_of(page: PageContents) -> list[str]:
    """Return the answer: for a comparison the sentences of comparison.json, otherwise why there is none."""
    first = page.arms[0]
    if page.kind == "unfinished":
        return ["This comparison is not finished, so there is no answer yet. Below is what is measured so far."]
    if page.kind == "several":
        return [
            f"{len(page.arms)} arms from {len(page.parts)} directories. They were not run as one comparison, so "
            "their differences are not judged; use hardneg compare for that."
        ]
    if page.kind == "comparison":
        return list(page.facts.get("answer", []))
    if not first.finished():
        return ["This run is not finished, so there is no accuracy yet. Below is what it has recorded so far."]
    if not known(first.row.get("mean")):
        return [f"There is no accuracy: {why_no_accuracy(first.finished()[0])}."]
    measure = measure_in(page, page.metric)
    figure = percent(first.row["mean"], unit="" if unit_of(page.metric) != "%" else " %")
    return [f"On {page.noun}s that it was not trained on, {measure}: {figure}."]


def differences(page: PageContents) -> list[tuple[list[ArmRuns], str]]:
    """Return each sentence on a difference with the arms it is about; those about all arms come last."""
    by_name = {arm.text: arm for arm in page.arms}
    verdicts = page.facts.get("verdicts", []) if page.kind == "comparison" else []
    judged = [one.get("sentence", "") for one in verdicts]
    pairs = [[by_name[one[name]] for name in ("arm", "against") if one.get(name) in by_name] for one in verdicts]
    every = page.facts.get("sentences", []) if page.kind == "comparison" else []
    return [*zip(pairs, judged, strict=True), *(([], one) for one in every if one not in judged)]


def notes_of(page: PageContents) -> list[tuple[str, list[str]]]:
    """Return the notes to read before trusting the results, as headings with sentences."""
    notes = [("What to know about these runs", page.cautions)]
    if page.kind == "several":
        return [*notes, (MORE_DIFFERS, page.differences + list(page.facts.get("notes", [])))]
    return [
        *notes,
        ("Temperature", list(page.facts.get("notes", [])) if page.kind == "comparison" else []),
        (MORE_DIFFERS, [] if page.kind == "run" else page.differences),
    ]


def aside_of(arm: ArmRuns, page: PageContents) -> str:
    """Return the remark after the name of an arm: that it is the reference, or that it uses labels."""
    first = page.kind == "comparison" and arm is page.arms[0]
    parts = ["the reference of the others"] * first + [
        f"sees the labels of the training {page.noun}s"
    ] * arm.uses_labels
    return f"({'; '.join(parts)})" if parts else ""


def setting_of(page: PageContents) -> dict[str, Any]:
    """Describe the experiment for a reader who does not know the papers.

    Returns:
        Sentences by name: "same" (what all arms share), "training", "measured" and "held_out"; empty where unknown.
    """
    options, epochs = page.options, page.options.get("epochs")
    counts = sorted({str(result.get("k", 200)) for arm in page.arms for result in arm.finished()}) or ["200"]
    split, noun = evaluated_in(page), page.noun
    explained = MEASURES[page.metric].explained.format(split=split, noun=noun, k=" or ".join(counts))
    budget = [
        f"{epochs} pass{'es' * (epochs != 1)} over the training {noun}s" if epochs is not None else "",
        f"batches of {options['batch_size']}" if "batch_size" in options else "",
    ]
    same = "Data, budget, seeds and initial weights" if page.same_weights else "Data, budget and seeds"
    compared = page.kind in ("comparison", "unfinished") and "data" not in page.differing
    measured = f"Measured by {measure_in(page, page.metric)}: {explained}."
    return {
        "same": f"{same} are the same for all." if compared else "",
        "training": ", ".join(part for part in budget if part) or "see the options below",
        "measured": measured if any(arm.row.get("values") for arm in page.arms) else "",
        "held_out": HELD_OUT.format(noun) if "validation" in split else "",
    }
