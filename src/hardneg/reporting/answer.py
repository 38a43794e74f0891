"""The top of the page: the question, the answer in a sentence, and what was done."""

from __future__ import annotations

from html import escape
from pathlib import Path

from hardneg.comparing.request import why_no_accuracy
from hardneg.comparing.verdict import chance_of_one, together
from hardneg.reporting.figures import badge, evaluated_in, listed, measure_in, named, percent, signed
from hardneg.reporting.story import ArmRuns, Story, known
from hardneg.reporting.temperature_controls import standing, twins_of

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
    twins = [one.sentence() for one in twins_of(story)]
    said = _sentences(story) + twins
    if said:
        rows = "".join(f"<li>{one}</li>" for one in said)
        many = f'<p class="small">{escape(_together(story, len(twins)))}</p>' if len(said) > 1 else ""
        parts.append(f'<div class="box"><h2>The answer, arm by arm</h2><ul class="said">{rows}</ul>{many}</div>')
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
    """Those of comparison.json on the arms as they are, each behind the letter of its arm."""
    arms = story.arms[1:]
    said = story.facts.get("sentences", [])[: len(arms)]
    letters = [f"{badge(arm)} " for arm in arms] if len(said) == len(arms) else [""] * len(said)
    return [letter + escape(one) for letter, one in zip(letters, said, strict=True)]


def _together(story: Story, twins: int) -> str:
    """What comparison.json says of several differences, and of those that the page adds."""
    of_arms = len(story.arms) - 1
    more = f" With those of arms that repel alike, in up to {chance_of_one(of_arms + twins)} %." if twins else ""
    return together(of_arms) + more


SIDES = {"above": "Better beyond noise", "below": "Worse beyond noise", "alike": "No difference beyond noise"}


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
    groups: dict[str, list[ArmRuns]] = {"above": [], "below": [], "alike": []}
    for arm in story.arms[1:]:
        groups[standing(arm.row)].append(arm)
    said = [f"Against {named(first)}, in {measure}, with {len(first.row['values'])} seeds:"]
    for side, word in SIDES.items():
        if groups[side]:
            points = [f"{named(a)} ({signed(a.row['difference'])} points)" for a in groups[side]]
            said.append(f'<span class="side">{word}: {listed(points)}.</span>')
    for twins in twins_of(story):
        if twins.arm in groups["above"] and not twins.beyond_noise:
            said.append(
                f"But {badge(twins.arm)} gains nothing clear over {badge(twins.plain)}, which has its effective "
                "temperature: a lower temperature may do as much."
            )
    return " ".join(said)


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
