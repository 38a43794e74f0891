"""`hardneg evaluate`: choose the evaluation that fits the input, run it and print it.

Three cases: another data set (--on), benchmarks for text encoders (--sts, --beir, --classification), or saved
embeddings. The measures are in ``hardneg.training.evaluation``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hardneg.cli.options import EvaluateOptions
from hardneg.cli.output import Output
from hardneg.core.errors import ArgumentError, NoFile

if TYPE_CHECKING:
    from hardneg.io.terminal import Bars
    from hardneg.training.evaluation.texts import TextEncoder


def evaluate_and_show(options: EvaluateOptions, output: Output) -> None:
    """Run the evaluation the options ask for and print it as a table, or as one line of JSON.

    Raises:
        ArgumentError: Options contradict each other, or the data has nothing to evaluate by.
        NoFile: The run has no saved embeddings; the error explains why.
    """
    from hardneg.cli.tables import show_evaluation, show_text_evaluations

    with_texts = bool(options.sts or options.beir or options.classification)
    _check_combination(options, with_texts)
    with output.bars() as bars:
        if options.on or options.protocol or options.labels:
            found = _evaluate_protocols(options, bars)
        elif with_texts:
            found = _evaluate_texts(options, bars)
        else:
            bars("evaluate", None)
            found = _evaluate_embeddings(Path(options.path))
    output.result(found, lambda: show_text_evaluations(found) if with_texts else show_evaluation(found))


def _evaluate_protocols(options: EvaluateOptions, bars: Bars) -> dict[str, Any]:
    """Evaluate the encoder of a run on each data set with each share of its labels; by default on its own data."""
    from hardneg.training.evaluation.protocols import transfer
    from hardneg.training.trained import options_in, read_trained

    own = options_in(read_trained(options.path).config)
    root = options.data_root or (None if options.on else own.data_root)
    pairs = [(data, share) for data in options.on or (own.data,) for share in map(_share, options.labels or ("1",))]
    more: dict[str, Any] = {"protocols": options.protocol, "statistics": options.statistics}
    advance, each = bars("evaluate", len(pairs)), []
    for data, share in pairs:
        how = {"run_code": options.run_code, "share": share, **more}
        each.append(transfer(options.path, data, root, options.weights, **how))
        advance(1)
    return each[0] if len(each) == 1 else {"on": each}


def _share(text: str) -> float:
    """Read a share of the labels."""
    try:
        return float(text)
    except ValueError:
        raise ArgumentError("evaluate", "--labels with a share in (0, 1]", repr(text), "such as 0.01 for 1 %") from None


def _check_combination(options: EvaluateOptions, with_texts: bool) -> None:
    """Raise ArgumentError if one of the given options would have no effect."""
    if len(set(options.on)) < len(options.on):
        raise ArgumentError("evaluate", "each data set of --on once", ", ".join(options.on))
    if options.on and with_texts:
        what = "either --on or a text benchmark"
        raise ArgumentError(
            "evaluate", what, f"--on {options.on[0]} and a text benchmark", "run them one after the other"
        )
    if unknown := sorted(set(options.protocol) - {"probe", "maps", "finetune"}):
        raise ArgumentError("evaluate", "--protocol probe, maps or finetune", repr(unknown[0]))
    if (options.protocol or options.labels) and with_texts:
        fix = "run them one after the other"
        raise ArgumentError("evaluate", "either protocols on labelled data or a text benchmark", "both", fix)
    if options.statistics != "run" and not options.on:
        raise ArgumentError("evaluate", "--on with --statistics data", "no --on", "omit it, since it has no effect")
    if options.split != "test" and not (options.sts or options.beir):
        what, got = "--sts or --beir for --split", f"--split {options.split} with neither"
        raise ArgumentError("evaluate", what, got, "omit it, since it has no effect")
    if options.weights == "best" and not (options.on or options.protocol or options.labels or with_texts):
        fix = "encode the data of the run again with --on DATA"
        raise ArgumentError("evaluate", "--weights last for the saved embeddings of a run", "--weights best", fix)


def _evaluate_texts(options: EvaluateOptions, bars: Bars) -> dict[str, Any]:
    """Evaluate a text encoder, or the encoder of a run, on each given benchmark.

    Returns:
        Results under the keys "sts", "retrieval" and "classification".
    """
    from hardneg.training.evaluation.texts import text_encoder
    from hardneg.training.trained import text_encoder_of

    is_run = (Path(options.path) / "config.json").exists()
    encoder: TextEncoder = (
        text_encoder_of(options.path, options.weights, run_code=options.run_code)
        if is_run
        else text_encoder(options.path)
    )
    found: dict[str, Any] = {}
    if options.sts:
        bars("evaluate sts", None)
        from hardneg.training.evaluation.sts import evaluate_sts, read_sts, sts_figures

        found["sts"] = sts_figures(evaluate_sts(read_sts(options.sts, options.split), encoder))
    if options.beir:
        bars("evaluate beir", None)
        from hardneg.training.evaluation.retrieval import evaluate_retrieval, read_beir

        found["retrieval"] = evaluate_retrieval(read_beir(options.beir, options.split), encoder)
    if options.classification:
        from hardneg.training.evaluation.benchmarks import evaluate_classification, read_classification

        tasks = read_classification(options.classification)
        done = bars("evaluate classification", len(tasks))
        found["classification"] = evaluate_classification(tasks, encoder, done)
    return found


def _evaluate_embeddings(path: Path) -> dict[str, Any]:
    """Evaluate the saved embeddings of a run directory or of an .npz file.

    Raises:
        NoFile: There is no file of embeddings.
        ArgumentError: A run has no train split and its test split has no labels.
    """
    from hardneg.io.arrays import names_in_npz
    from hardneg.training.evaluation.embeddings import evaluate_file

    file = path / "embeddings.npz" if path.is_dir() else path
    if not file.exists():
        raise NoFile("evaluate", "embeddings", file, "which does not exist", _why_no_embeddings(path))
    if path.is_dir() and "train_x" not in names_in_npz("evaluate", file):
        return _cross_validate(path, file)
    return evaluate_file(file)


def _cross_validate(path: Path, file: Path) -> dict[str, Any]:
    """Cross-validate an SVM on the test split of a run without a train split, such as a run on graphs."""
    import hardneg.training.data.kinds  # noqa: F401  # registers the names of the measures of graphs
    from hardneg.io.embeddings import load_evaluated
    from hardneg.training.evaluation.svm import svm_accuracy

    x, y = load_evaluated(file)
    if y is not None:
        found = svm_accuracy(x, y)
        return {"svm": found["mean"], "folds": found["folds"], "num_test": len(y)}
    fix = "give --on DATA with labels, or for texts --sts FILE, --beir FOLDER or --classification TABLE"
    raise ArgumentError("evaluate", "labels or a benchmark", f"{path}, whose data has no labels", fix)


def _why_no_embeddings(path: Path) -> str:
    """Explain why a run has no embeddings, and how to get them."""
    from hardneg.training.loop.runs import Run

    run = Run(path)
    result = run.result()
    if (path / "comparison.json").exists():
        return f"this is a comparison: evaluate one of its runs, {path / 'runs'}/..."
    if result is None and run.config_path.exists():
        return "the run is not finished: repeat its command with --resume, which evaluates at the end"
    if result is None:
        return "train the run first"
    if "knn" in result:
        return "it was removed: delete result.json and repeat the training command with --resume, which only evaluates"
    return "the run is finished, but its data has no labels or a single class, so there is nothing to evaluate"
