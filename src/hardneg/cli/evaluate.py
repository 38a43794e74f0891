"""`hardneg evaluate`: embeddings, runs and encoders of texts against whatever there is to measure them by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hardneg.cli.options import EvaluateOptions
from hardneg.cli.progress import progress_bars
from hardneg.core.errors import ArgumentError, NoFile

if TYPE_CHECKING:
    from hardneg.training.evaluation.texts import TextEncoder


def evaluate_and_show(options: EvaluateOptions) -> None:
    from hardneg.cli.tables import show_evaluation, show_text_evaluations

    of_texts = bool(options.sts or options.beir or options.classification)
    _check_together(options, of_texts)
    if options.on:
        from hardneg.training.evaluation.transfer import transfer

        found = transfer(options.path, options.on, options.data_root, options.weights, run_code=options.run_code)
    elif of_texts:
        found = _of_texts(options)
    else:
        found = _of_embeddings(Path(options.path))
    if options.json:
        typer.echo(json.dumps(found))
    else:
        show_text_evaluations(found) if of_texts else show_evaluation(found)


def _check_together(options: EvaluateOptions, of_texts: bool) -> None:
    """Raises for options of which one would have no effect."""
    if options.on and of_texts:
        what = "either --on or a benchmark of texts"
        raise ArgumentError("evaluate", what, f"--on {options.on} with the other", "evaluate them one after the other")
    if options.split != "test" and not (options.sts or options.beir):
        what, got = "--sts or --beir for --split", f"--split {options.split} with neither"
        raise ArgumentError("evaluate", what, got, "leave it out: it has no effect")
    if options.weights == "best" and not (options.on or of_texts):
        fix = "give --on with the data of the run, which encodes it again"
        raise ArgumentError("evaluate", "--weights last for the saved embeddings of a run", "--weights best", fix)


def _of_texts(options: EvaluateOptions) -> dict[str, Any]:
    from hardneg.training.evaluation.texts import text_encoder
    from hardneg.training.export import text_encoder_of

    is_run = (Path(options.path) / "config.json").exists()
    encoder: TextEncoder = (
        text_encoder_of(options.path, options.weights, run_code=options.run_code)
        if is_run
        else text_encoder(options.path)
    )
    found: dict[str, Any] = {}
    if options.sts:
        from hardneg.training.evaluation.sts import evaluate_sts, read_sts, sts_figures

        found["sts"] = sts_figures(evaluate_sts(read_sts(options.sts, options.split), encoder))
    if options.beir:
        from hardneg.training.evaluation.retrieval import evaluate_retrieval, read_beir

        found["retrieval"] = evaluate_retrieval(read_beir(options.beir, options.split), encoder)
    if options.classification:
        from hardneg.training.evaluation.classification import evaluate_classification, read_classification

        tasks = read_classification(options.classification)
        with progress_bars() as bars:
            found["classification"] = evaluate_classification(tasks, encoder, bars("tasks", len(tasks)))
    return found


def _of_embeddings(path: Path) -> dict[str, Any]:
    from hardneg.io.arrays import names_in_npz
    from hardneg.training.evaluation.embeddings import evaluate_file

    file = path / "embeddings.npz" if path.is_dir() else path
    if not file.exists():
        raise NoFile("evaluate", "embeddings", file, "which is not there", _why_not(path))
    if path.is_dir() and "train_x" not in names_in_npz("evaluate", file):
        return _of_one_split(path, file)
    return evaluate_file(file)


def _of_one_split(path: Path, file: Path) -> dict[str, Any]:
    """Of a run without a train split to fit a probe to: by cross-validation of its test split, as of graphs."""
    import hardneg.training.data.kinds  # noqa: F401  # registers how tables call the measures of graphs
    from hardneg.io.embeddings import load_evaluated
    from hardneg.training.evaluation.svm import svm_accuracy

    x, y = load_evaluated(file)
    if y is not None:
        found = svm_accuracy(x, y)
        return {"svm": found["mean"], "folds": found["folds"], "num_test": len(y)}
    fix = "give --on DATA with labels, or for texts --sts FILE, --beir FOLDER or --classification TABLE"
    raise ArgumentError("evaluate", "labels, or something else to evaluate by", f"{path}, whose data has none", fix)


def _why_not(path: Path) -> str:
    """Why there are no embeddings, and what to do."""
    from hardneg.training.runs import Run

    run = Run(path)
    result = run.result()
    if (path / "comparison.json").exists():
        return f"this is a comparison: give one of its runs, {path / 'runs'}/..."
    if result is None and run.config_path.exists():
        return "the run is not finished: give its command again with --resume, which evaluates at the end"
    if result is None:
        return "train first"
    if "knn" in result:
        return "it was removed; delete result.json and train again with --resume, which only evaluates"
    return "the run is finished, but its data has no labels, or one class only, and nothing to evaluate"
