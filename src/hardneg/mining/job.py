"""`hardneg mine`: mine files into files, in pieces, so that a killed run resumes where it stopped.

``run`` is the entry point, called by the command line. It reads the inputs (``inputs.py``),
computes the stages (``stages.py``) on an engine (``engines.py``), and writes the output and its
manifest. Finished pieces are kept in OUT.work.

The output and its manifest are made in OUT.work and moved into place one after the other. The
manifest contains the digest of the output, so a reader never pairs the files of two jobs. One
process at a time works on an output.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hardneg.core.errors import ArgumentError, Damaged, FileError, spelled, warn_once, written
from hardneg.io.files import locked, read_json, run_again, write_json
from hardneg.io.functions import in_any_folder, load_imports
from hardneg.io.outputs import check_output, swap_in
from hardneg.io.provenance import environment
from hardneg.mining.alignment import warn_of_alignment, warn_of_easy_negatives
from hardneg.mining.cache_key import digest_of_path
from hardneg.mining.checks import check_options, check_parts, expression_of, is_listed, retriever_names
from hardneg.mining.engines import Engine, Local, PartDone, Work, engine_of
from hardneg.mining.estimate import check_disk, check_disk_before
from hardneg.mining.explain import Explanation, no_negatives
from hardneg.mining.fusion import split_name
from hardneg.mining.inputs import Embedded, StageProgress, embeddings, from_beir, load_problem, make_miner, quiet
from hardneg.mining.manifest import (
    check_unchanged,
    describe_inputs,
    digest,
    fingerprint,
    is_of,
    read_manifest,
    stamps_of,
)
from hardneg.mining.miner import Mined, Miner
from hardneg.mining.options import MineOptions, inputs, manifest_of
from hardneg.mining.output import Layout, Result, has_rows, recover, with_judged_negatives, write_output
from hardneg.mining.pair_scores import with_teacher
from hardneg.mining.problem import Problem
from hardneg.mining.search_depth import check_lists
from hardneg.mining.stages import FileStore, Stage, Stages, chosen_pieces

_own_files = re.compile(
    r"job\.json|manifest\.json|output(\.parquet|\.jsonl)?|\..*\.partial"
    r"|(pilot|\d+\.\d+-[a-z]+\.\d+\.\d+)-\d{6,}(\.[0-9a-f]{16})?\.npz"
)
_phases = {"bounds": "find bounds", "settled": "merge bounds", "lists": "search", "chosen": "choose"}


@dataclass(frozen=True)
class Summary:
    """The outcome of a job, for the terminal and for the manifest.

    Attributes:
        counts: Numbers of queries, documents, duplicates, missing positives, negatives and so on.
        explanation: Number of candidates that each factor removed, and why queries are short.
        statistics: Mean and quantiles of the similarities of positives, negatives and random pairs.
        rows_written: Rows of the output.
        manifest: Path of the manifest.
        recall: Measured recall of an approximate search; None for an exact one.
    """

    counts: dict[str, int]
    explanation: Explanation
    statistics: dict[str, dict[str, float]]
    rows_written: int
    manifest: Path | None
    recall: float | None = None


def run(options: MineOptions, progress: StageProgress = quiet) -> Summary | None:
    """Mine files into files, resuming a killed run of the same job.

    See docs/guides/mining.md.

    Args:
        options: Inputs, rule, search and output.
        progress: Called at the start of each stage; see ``StageProgress``.

    Returns:
        The summary; None on all ranks but the first, and for a part (``--part``) of a job.

    Raises:
        ArgumentError: If options contradict each other or the data.
        FileError: If a file is missing or cannot be read.
        DataChanged: If an input changes while it is mined.
        InUse: If another process works on the same output.
    """
    options = from_beir(options)
    check_options(options)
    check_work_folder(options.out, options.resume)
    engine = engine_of(options)
    check_parts(options)
    try:
        with _locked_output(options, engine):
            summary = _run_locked(options, engine, progress)
    except PartDone:
        return None
    engine.leave()
    return summary


def _locked_output(options: MineOptions, engine: Engine) -> AbstractContextManager[None]:
    """Lock the output; the first of several ranks holds the lock for all, and parts work side by side."""
    out = Path(options.out)
    if out.parent.exists() and not out.parent.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(out.parent))
    out.parent.mkdir(parents=True, exist_ok=True)
    if not engine.first:
        return nullcontext()
    fix = f"wait until it ends, or use another --out than {out}"
    return locked(out.with_name(f".{out.name}.lock"), "mine", fix=fix, remove=True)


def _run_locked(options: MineOptions, engine: Engine, progress: StageProgress) -> Summary | None:
    if engine.first:
        recover(Path(options.out))
        _check_ours(options)
    sources = describe_inputs(options) if engine.first else {}
    stamps = stamps_of(options)
    problem = load_problem(options)
    check_enough_candidates(options, problem)
    warn_of_ids(options, problem)
    check_disk_before(options, problem, Path(options.out).absolute().parent)
    embedded = embeddings(options, problem, engine, progress)
    miner = make_miner(options, problem, embedded)
    if options.search != "bm25" and engine.first:
        problem.alignment = miner.alignment()
        warn_of_alignment(problem.alignment)
    check_disk(miner, Path(options.out).absolute().parent)
    wanted = fingerprint(options, stamps, embedded, miner, engine)
    store = FileStore(_work_folder(options, wanted, engine), digest(wanted))
    context = Context(_absolute(options), tuple(embedded.keys.items()), str(store.folder.absolute()), store.job)
    _stages_here[context] = Stages(miner, store)

    def run_stage(stage: Stage) -> None:
        done = progress(_phases[stage.kind], stage.pieces)
        tasks = [(stage, piece) for piece in range(stage.pieces)]
        is_done = lambda task: store.has(task[0].name, task[1])  # noqa: E731
        name = lambda task: f"piece {task[1]} of {stage.pieces} of {_phases[stage.kind]!r}"  # noqa: E731
        engine.map(Work(partial(compute, context), tasks, is_done, lambda task: done(1), name))

    try:
        mined = miner.joined(chosen_pieces(miner, store, run_stage))
    finally:
        del _stages_here[context]
    summary: Summary | None = None
    if engine.first:
        check_unchanged(options, stamps)
        summary = _finish(options, problem, miner, mined, store.folder, embedded, sources)
    engine.wait()
    if engine.first:
        shutil.rmtree(store.folder)
        _remove_partials(options)
    return summary


@dataclass(frozen=True)
class Context:
    """The data that a process needs to compute pieces of a job.

    Attributes:
        options: The options, with absolute paths.
        keys: Cache keys of the encoders, so that vectors are read from the cache and no encoder is loaded.
        folder: Folder of the pieces.
        job: Digest of the fingerprint of the job, part of the names of the pieces.
    """

    options: MineOptions
    keys: tuple[tuple[str, str], ...]
    folder: str
    job: str


_stages_here: dict[Context, Stages] = {}
"""Stages of the jobs of this process, which forked workers inherit."""


def compute(context: Context, task: tuple[Stage, int]) -> None:
    """Compute one piece and store it; runs in any process, with the same result.

    Args:
        context: The job.
        task: The stage and the number of the piece.
    """
    if context not in _stages_here:
        _stages_here.clear()
        _stages_here[context] = _stages_of(context)
    stages, (stage, piece) = _stages_here[context], task
    stages.store.write(stage.name, piece, stages.perform(stage, piece))


def _stages_of(context: Context) -> Stages:
    """Set up the stages in another process: read tables and vectors again, without loading an encoder."""
    options = context.options
    load_imports(options.imports)
    problem = load_problem(options)
    embedded = embeddings(options, problem, Local(), quiet, dict(context.keys))
    return Stages(make_miner(options, problem, embedded), FileStore(Path(context.folder), context.job))


def _absolute(options: MineOptions) -> MineOptions:
    """Return the options with absolute paths, valid in any working directory."""
    given = vars(options)
    models = [name for name in ("model", "guide", "cross_encoder") if given[name] and Path(given[name]).exists()]
    files = [name for name in (*inputs, "out", "cache") if given[name] is not None]
    changed: dict[str, Any] = {name: str(Path(given[name]).absolute()) for name in (*files, *models)}
    changed |= {name: in_any_folder(given[name]) for name in ("encoder", "rescore") if given[name]}
    changed["imports"] = tuple(str(Path(path).absolute()) for path in options.imports)
    changed["runs"] = tuple(f"{name}={Path(path).absolute()}" for name, path in map(split_name, options.runs))
    return replace(options, **changed)


def _check_ours(options: MineOptions) -> None:
    """Raise if the output or manifest to be replaced was not written by hardneg, or was changed since."""
    out, manifest = Path(options.out), manifest_of(options.out)
    # A run killed between moving output and manifest leaves the manifest in its work folder.
    manifests = (Path(f"{out}.work") / "manifest.json", manifest)
    check = partial(check_output, "mine", reads=[], overwrite=options.overwrite)
    check(out, is_ours=lambda: any(is_of(out, read_manifest(path, "mine")) for path in manifests))
    check(manifest, is_ours=lambda: "output" in read_manifest(manifest, "mine"))


def check_enough_candidates(options: MineOptions, problem: Problem) -> None:
    """Check that the corpus and the candidate lists are large enough for k negatives.

    Warns if no query can have k negatives.

    Args:
        options: The rule, the format and the search.
        problem: Queries, corpus and positives.

    Raises:
        ArgumentError: If the format writes no row with fewer than k negatives, or if the expression
            needs ranks that are beyond the lists of the retrievers.
    """
    if is_listed(options):
        sizes = options.candidates, len(retriever_names(options)), len(problem.corpus)
        check_lists("mine", expression_of(options), options.k, options.draw, *sizes)
    if options.draw == "categorical":
        return
    size, k = len(problem.corpus), options.k
    taken = (len({*rows, own} - {-1}) for rows, own in zip(problem.positives, problem.own, strict=True))
    most = size - min(taken)
    kept = expression_of(options).most
    most = most if kept is None else min(most, kept)
    if most < k:
        given = written("mine", "k", k)
        if options.format == "n-tuple":
            got = f"{given} where a query has at most {most} candidates, so that no row would be written"
            fix = f"use {written('mine', 'k', max(most, 1))} or {written('mine', 'format', 'triplet')}"
            raise ArgumentError(
                "mine", f"{spelled('mine', 'k')} candidates for some query, to write n-tuples", got, fix
            )
        few = f"Queries have at most {most} candidates each, fewer than {given}: every query gets fewer negatives."
        warn_once(f"few candidates: {k} of {most}", few)


def warn_of_ids(options: MineOptions, problem: Problem) -> None:
    """Warn if a format for training is requested but there are no texts to write."""
    if options.format != "ids" and (problem.queries.texts is None or problem.corpus.texts is None):
        ids = written("mine", "format", "ids")
        text = f"There are no texts, so the rows of {options.format} contain ids: use {ids}, or give tables with texts."
        warn_once(f"no texts: {options.format}", text)


def _work_folder(options: MineOptions, wanted: dict[str, Any], engine: Engine) -> Path:
    """Return the folder of finished pieces, after deleting those of another job or of other data."""
    work = Path(f"{options.out}.work")

    with (
        nullcontext() if engine.alone else locked(Path(f"{options.out}.work.lock"), "mine", patience=60.0, remove=True)
    ):
        if engine.first or not engine.alone:
            known = work / "job.json"
            if work.exists() and _read_job(known) != wanted:
                shutil.rmtree(work)
            work.mkdir(parents=True, exist_ok=True)
            write_json(known, wanted, run_again)
    engine.wait()
    return work


def check_work_folder(out: str, resume: bool = True) -> None:
    """Check the folder of pieces.

    Args:
        out: Path of the output.
        resume: Whether pieces of an earlier run may be used.

    Raises:
        ArgumentError: If OUT.work contains files that hardneg did not write, since the folder is deleted at the end.
        FileError: If the folder exists although nothing may be resumed.
    """
    work = Path(f"{out}.work")
    if not work.exists():
        return
    if not resume:
        fix = "leave --no-resume out to continue it, or delete the folder"
        raise FileError("mine", "no unfinished run", work, "which has one", fix)
    others = (
        [path.name for path in work.iterdir() if not _own_files.fullmatch(path.name)] if work.is_dir() else [work.name]
    )
    if others:
        raise ArgumentError(
            "mine",
            f"a folder {work} that contains only its own files",
            f"{sorted(others)[0]!r} in it, which it did not write",
            "move it away, or use another --out",
        )


def _read_job(path: Path) -> Any:
    """Return the fingerprint of the job that the stored pieces belong to; None if it is unknown."""
    if not path.exists():
        return None
    try:
        return read_json(path, "everything is computed again", who="mine")
    except Damaged as error:
        warn_once(f"damaged {path}", str(error))
        return None


def _result(problem: Problem, miner: Miner, mined: Mined) -> Result:
    """Return the mined rows with the scores of the positives."""
    # The miner sorts the positives of a query by row; sort those of the problem in the same way.
    problem.positives = [sorted(rows) for rows in problem.positives]
    query = torch.arange(len(problem.queries), device=miner.scorer.device)
    place, rows = miner.scorer.positives.of(query)
    positives = miner.scorer.pair_scores(query[place], rows).to(mined.scores.dtype).cpu().numpy()
    return Result(
        problem, mined.rows.numpy(), mined.scores.numpy(), positives, mined.found_by.numpy(), mined.retrievers
    )


def _finish(
    options: MineOptions,
    problem: Problem,
    miner: Miner,
    mined: Mined,
    work: Path,
    embedded: Embedded,
    sources: dict[str, Any],
) -> Summary:
    """Write the output and its manifest in the work folder, then move both into place."""
    result, explanation, device = _result(problem, miner, mined), mined.explanation, miner.scorer.device
    anchor = options.columns.query if options.columns.query and "+" not in options.columns.query else "anchor"
    layout = Layout(options.format, anchor, options.columns.positive or "positive", options.scores, options.ids)
    if options.judged_negatives:
        result = with_judged_negatives(
            result, lambda query, row: miner.scorer.pair_scores(query.to(device), row.to(device))
        )
        explanation.short_after(torch.from_numpy(result.rows))
    result = with_teacher(result, miner.scorer)
    if not has_rows(result, layout):
        shutil.rmtree(work)  # its pieces are useless for another rule or format
        raise no_negatives(explanation, options.format, options.candidates if is_listed(options) else None)
    out = Path(options.out)
    staged = work / f"output{out.suffix.lower() if out.suffix.lower() in ('.parquet', '.jsonl') else ''}"
    if staged.is_dir():  # left by a run that was killed while writing it
        shutil.rmtree(staged)
    written = write_output(staged, result, layout)
    counts = {**problem.counts, "negatives": int((result.rows >= 0).sum()), "rows_written": written}
    statistics = _statistics(result, miner)
    if problem.alignment is not None and miner.scorer.rescore is None:
        several = any(len(rows) > 1 for rows in problem.positives)
        chosen = torch.from_numpy(result.scores[result.rows >= 0])
        warn_of_easy_negatives(problem.alignment, expression_of(options), options.draw, chosen, several)
    manifest = {
        **environment(),
        "options": asdict(options),
        "seed": options.seed,
        "negatives": repr(expression_of(options)),
        "temperature": options.temperature,
        "inputs": sources,
        "encoder": embedded.keys,
        "counts": counts,
        "explain": explanation.as_dict(),
        "statistics": statistics,
        "recall": mined.recall,
        "output": digest_of_path(staged),
    }
    write_json(work / "manifest.json", manifest, run_again)
    swap_in(staged, out)
    os.replace(work / "manifest.json", manifest_of(out))
    return Summary(counts, explanation, statistics, written, manifest_of(out), mined.recall)


def _statistics(result: Result, miner: Miner) -> dict[str, dict[str, float]]:
    """Return mean and quantiles of the similarities of positives, chosen negatives and 1000 random pairs."""
    random = torch.Generator().manual_seed(0)
    query = torch.randint(0, len(result.rows), (1000,), generator=random)
    rows = torch.randint(0, len(miner.scorer.corpus), (1000,), generator=random)
    device = miner.scorer.device
    drawn = miner.scorer.pair_scores(query.to(device), rows.to(device)).cpu().numpy()
    groups = {"positives": result.positive_scores, "negatives": result.scores[result.rows >= 0], "random": drawn}
    out = {}
    for name, values in groups.items():
        if len(values):
            low, middle, high = np.quantile(values, [0.05, 0.5, 0.95])
            out[name] = {"mean": values.mean(), "5%": low, "median": middle, "95%": high}
    return {name: {key: round(float(value), 6) for key, value in row.items()} for name, row in out.items()}


def _remove_partials(options: MineOptions) -> None:
    """Delete half-written embeddings of killed runs of this job; a shared cache is left alone."""
    if options.cache is None:
        for path in Path(f"{options.out}.embeddings").glob(".*.partial"):
            path.unlink(missing_ok=True)
