"""The top of the page: the question, the answer in a sentence, and what was done."""

from __future__ import annotations

from html import escape
from pathlib import Path

from hardneg.comparing.request import why_no_accuracy
from hardneg.reporting.figures import badge, evaluated_in, measure_in, named, percent
from hardneg.reporting.story import ArmRuns, Story, known

UNLIKE = "More than the negatives differs"
HELD_OUT = (
    " The validation images are a fifth of the training images, held out of training; the test images were not used."
)


def title_of(story: Story) -> str:
    data = Path(str(story.options.get("data", "this data")).rpartition(":")[2]).name
    if story.kind == "run":
        return f"One run of {story.facts.get('recipe', 'train')} on {data}"
    if story.kind == "several":
        return f"Runs on {data}, side by side" if "data" in story.options else "Runs side by side"
    return f"Which negatives are best for {data}?"


def answer_section(story: Story) -> str:
    parts = [f"<header><h1>{escape(title_of(story))}</h1>", f'<p class="lead">{_verdict(story)}</p>', _setting(story)]
    if story.missing:
        rows = "".join(f"<li>{escape(one)}</li>" for one in story.missing)
        parts.append(
            '<div class="box warn" role="note"><h2>Not complete</h2><p>This page shows what is there.</p>'
            f"<ul>{rows}</ul></div>"
        )
    if said := _sentences(story):
        rows = "".join(f"<li>{one}</li>" for one in said)
        parts.append(f'<div class="box"><h2>Difference by difference</h2><ul class="said">{rows}</ul></div>')
    for head, notes in _notes(story).items():
        if notes:
            rows = "".join(f"<li>{escape(one)}</li>" for one in notes)
            parts.append(f'<div class="box warn" role="note"><h2>{head}</h2><ul>{rows}</ul></div>')
    return "".join(parts) + "</header>"


def _notes(story: Story) -> dict[str, list[str]]:
    notes, mind = list(story.facts.get("notes", [])), {"Mind what was trained": story.cautions}
    if story.kind == "several":
        return mind | {UNLIKE: story.unlike + notes}
    return mind | {"Mind the temperature": notes, UNLIKE: [] if story.kind == "run" else story.unlike}


def _sentences(story: Story) -> list[str]:
    """Those of comparison.json, each behind the letters of its arms."""
    letters = {arm.text: badge(arm) for arm in story.arms}
    judged = [one["sentence"] for one in story.facts.get("verdicts", [])]
    pairs = [(one["arm"], one["against"]) for one in story.facts.get("verdicts", [])]
    before = [" ".join(letters.get(name, "") for name in pair) + " " for pair in pairs]
    rest = [one for one in story.facts.get("sentences", []) if one not in judged]
    return [letter + escape(one) for letter, one in zip(before, judged, strict=True)] + [escape(one) for one in rest]


def _verdict(story: Story) -> str:
    """The answer in one or two sentences."""
    first, measure = story.arms[0], escape(measure_in(story, story.metric))
    if story.kind == "unfinished":
        return "This comparison is not finished, so there is no answer yet. Below is what is measured so far."
    if story.kind == "run":
        if not first.finished():
            return "This run is not finished, so there is no accuracy yet. Below is what it has recorded so far."
        if not known(first.row["mean"]):
            return escape(f"There is no accuracy: {why_no_accuracy(first.finished()[0])}.")
        return f"On images that it was not trained on, {measure}: <b>{percent(first.row['mean'])}</b>."
    if story.kind == "several":
        return (
            f"{len(story.arms)} arms from {len(story.parts)} directories, as they are. They were not run as one "
            "comparison, so no difference is judged here; <code>hardneg compare</code> does that."
        )
    older = ["This comparison is of an older version; give its command again for an answer."]
    return " ".join(f'<span class="side">{escape(one)}</span>' for one in story.facts.get("answer", older))


def _aside(arm: ArmRuns, story: Story) -> str:
    """What must be known of an arm to read its figures rightly."""
    said = ["the one that the others are held against"] if story.kind == "comparison" and arm is story.arms[0] else []
    said += ["it is told the class of every training image"] if arm.uses_labels else []
    return f' <span class="small">({"; ".join(said)})</span>' if said else ""


def _setting(story: Story) -> str:
    """What was done, for a reader who has not read the papers."""
    options = story.options
    counts = sorted({str(result.get("k", 200)) for arm in story.arms for result in arm.finished()}) or ["200"]
    split = evaluated_in(story)
    measures = {
        "knn": f"each {split} image takes the class that its {' or '.join(counts)} nearest training images vote for",
        "1nn": f"each {split} image takes the class of its nearest training image",
        "linear": "a logistic regression is fitted to the features, which stay as they are",
    }
    arms = "".join(f"<li>{named(arm)}{_aside(arm, story)}</li>" for arm in story.arms)
    budget = [
        f"{_passes(options['epochs'])} over the training images" if "epochs" in options else "",
        f"batches of {options['batch_size']}" if "batch_size" in options else "",
    ]
    compared = story.kind in ("comparison", "unfinished")
    alike = "Data, budget, seeds and initial weights" if story.same_weights else "Data, budget and seeds"
    measured = f" Measured by {measure_in(story, story.metric)}: {measures.get(story.metric, '')}."
    measured = (measured + HELD_OUT * ("validation" in split)) if any(arm.row["values"] for arm in story.arms) else ""
    same = f" {alike} are the same for all." if compared else ""
    return (
        "<p>Contrastive learning trains an encoder of images by pulling two altered views of one image together and "
        "pushing other images, its <em>negatives</em>, away. Which images are the negatives, and how hard each of them "
        f"pushes, is what is chosen here.{same}</p>"
        f'<ul class="arms">{arms}</ul>'
        f"<p>Training: {escape(', '.join(part for part in budget if part) or 'see the options below')}."
        f"{escape(measured)}</p>"
    )


def _passes(epochs: int) -> str:
    return "1 pass" if epochs == 1 else f"{epochs} passes"
