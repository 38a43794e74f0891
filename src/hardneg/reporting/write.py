"""Write the page about a run, a comparison, or several of them side by side, with its texts.

Everything is read from the run folders and comparison.json. Nothing is trained and nothing is fetched: charts are
inline SVG, and images are data URIs. ``report_page`` passes the parts made by the other modules to
templates/report.html. The texts are here: title, answer, notes, the description of the experiment, and its provenance.
A comparison brings its sentences along in comparison.json (comparing/verdict.py); for single, unfinished or unrelated
runs they are written here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hardneg.comparing.cautions import decay_of
from hardneg.comparing.request import why_no_accuracy
from hardneg.comparing.verdict import data_name
from hardneg.core.errors import ArgumentError
from hardneg.io.outputs import is_sealed_page
from hardneg.pages.render import json_link, render, write_page
from hardneg.reporting.charts import (
    PARTS,
    cells_of,
    curves_of,
    dots_of,
    forest_of,
    heads_of,
    histograms_of,
    measures_of,
    moments_of,
    seconds_of,
    table_csv,
    table_note,
    tries_in,
)
from hardneg.reporting.contents import ArmRuns, PageContents, evaluated_in, known, measure_in, percent
from hardneg.reporting.embeddings import classes_of, maps_of
from hardneg.reporting.pictures import pictures_of
from hardneg.reporting.reading import read_all_contents
from hardneg.training.evaluation.measures import MEASURES, unit_of
from hardneg.training.loop.data_record import count_in


def write_report(
    paths: str | Path | Sequence[str | Path], out: str | Path | None = None, *, overwrite: bool = False
) -> Path:
    """Write one HTML page about runs and comparisons.

    An ``audit.html`` in the same folder is linked from the page.

    Args:
        paths: Run folder or comparison folder, or several of them.
        out: File or folder to write; by default ``report.html`` in the folder, or next to the first one of several.
        overwrite: Replace a file that was not written by hardneg.

    Returns:
        Path of the page.

    Raises:
        FileError: If a path has no run and no comparison, if a file in it has unexpected contents, or if ``out`` exists
            and was not written by hardneg.
        ArgumentError: If ``out`` is empty, or a path is given twice.
    """
    if out is not None and not str(out).strip():
        raise ArgumentError("--out", "the path of a file", repr(out))
    places = [Path(paths)] if isinstance(paths, (str, Path)) else [Path(path) for path in paths]
    page = read_all_contents(places)
    file = Path(out) if out is not None else places[0] if len(places) == 1 else places[0].resolve().parent
    if file.is_dir():
        file = file / "report.html"
    audit = file.with_name("audit.html")
    html = report_page(page, audited=audit.is_file() and is_sealed_page(audit))
    write_page(file, html, "report", overwrite=overwrite)
    return file


def report_page(page: PageContents, *, audited: bool = False) -> str:
    """Render the page as HTML.

    Args:
        page: Contents of the page.
        audited: Link the page of an audit, audit.html.
    """
    heads, pictures = heads_of(page), pictures_of(page)
    names = tuple(pictures.get("classes", ()))
    return render(
        "report.html",
        title=title_of(page),
        headline=str(page.facts.get("headline", "")) if page.kind == "comparison" else "",
        page=page,
        split=evaluated_in(page),
        answer=answer_of(page),
        audited=audited,
        dots=dots_of(page),
        forest=forest_of(page),
        differences=differences(page),
        notes=notes_of(page),
        asides={arm.number: aside_of(arm, page) for arm in page.arms},
        setting=setting_of(page),
        heads=heads,
        rows=[(arm, cells_of(arm, heads, page)) for arm in page.arms],
        csv=table_csv(page),
        json=json_link(figures_of(page)),
        table_note=table_note(page),
        measures=measures_of(page),
        seconds={"heads": PARTS, "rows": seconds_of(page)},
        tries=tries_in(page),
        curves=curves_of(page),
        moments=moments_of(page),
        histograms=histograms_of(page),
        classes=classes_of(page, names),
        maps=maps_of(page, names),
        pictures=pictures,
        provenance=provenance_of(page),
    )


MORE_DIFFERS = "More than the negatives differs"
HELD_OUT = "The validation {0}s are training {0}s that were held out of training; the test {0}s were not used."


def title_of(page: PageContents) -> str:
    """Return the title of the page."""
    data = data_name(str(page.options.get("data", "this data")))
    if page.kind == "run":
        return f"One run of {page.facts.get('recipe', 'train')} on {data}"
    if page.kind == "several":
        return f"Runs on {data}, side by side" if "data" in page.options else "Runs side by side"
    return f"Which negatives are best for {data}?"


def figures_of(page: PageContents) -> dict[str, Any]:
    """Return all figures of the page, for its JSON: comparison.json, or the configuration and results of the runs."""
    if page.kind == "comparison":
        return page.facts
    left_out = ("correct", "scores")  # packed answers to single items
    runs = [
        {
            "folder": one.run.path.name,
            "config": one.config,
            "result": one.result and {name: value for name, value in one.result.items() if name not in left_out},
        }
        for one in page.runs
    ]
    return {"arms": [{"arm": arm.text, **arm.row} for arm in page.arms], "runs": runs}


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
    if "no_accuracy" in first.finished()[0]:  # the images may be among those that it was trained on
        return [f"There is no accuracy: {why_no_accuracy(first.finished()[0])}. Its {measure} is {figure}."]
    return [f"On {page.noun}s that it was not trained on, {measure}: {figure}."]


def differences(page: PageContents) -> list[str]:
    """Return a sentence on each difference, and those about all of them."""
    return list(page.facts.get("sentences", [])) if page.kind == "comparison" else []


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


def provenance_of(page: PageContents) -> dict[str, Any]:
    """Return what is needed to repeat the runs.

    Returns:
        By name: "commands", "versions", "differing" (options by arm), "shared" (options), "trained" and "folders".
    """
    facts = [part.facts for part in page.parts or [page]]
    own = [(arm, _own_options(arm, page.options)) for arm in page.arms if arm.seeds]
    return {
        "commands": [str(one.get("command", "not recorded")) for one in facts],
        "versions": _versions(facts),
        "differing": [(arm, text) for arm, text in own if text],
        "shared": [(name, json.dumps(value)) for name, value in page.options.items()],
        "trained": _first_training(page),
        "folders": ", ".join(one.run.path.name for one in page.runs) or "none",
    }


def _versions(facts: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the machine and the versions; all values where the paths differ."""
    seen: dict[str, dict[str, None]] = {}
    for one in facts:
        versions = {**one.get("versions", {}), "python": one.get("python"), "commit": one.get("commit")}
        where = {"machine": one.get("machine"), "device": one.get("device"), "threads of a run": one.get("threads")}
        for name, value in {**where, **versions}.items():
            if value:
                seen.setdefault(name, {})[str(value)] = None
    return [(name, ", ".join(values)) for name, values in seen.items()]


def _first_training(page: PageContents) -> list[tuple[str, str]]:
    """Describe the first run that recorded what it trained."""
    options, found = next(((one.options, one.trained) for one in page.runs if one.trained), ({}, None))
    if found is None:
        return []
    encoder, data = found.get("encoder", {}), found.get("data", {})
    splits = [f"{count_in(one)} {split}" for split, one in data.items()]
    return [
        ("encoder", f"{encoder.get('name') or encoder.get('class')}, {encoder.get('parameters')} parameters"),
        ("initial weights", str(encoder.get("initial_weights"))),
        ("views", str(found.get("views"))),
        ("weight decay", str(decay_of(options, found))),
        (f"{page.noun}s", ", ".join(splits)),
    ]


def _own_options(arm: ArmRuns, shared: dict[str, Any]) -> str:
    """Write the options that an arm does not share with all others."""
    options = arm.seeds[0].options
    return ", ".join(f"{k}={v!r}" for k, v in options.items() if k not in shared and k != "seed")
