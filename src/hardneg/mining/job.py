"""`hardneg mine`: files in, files out. Blocks of queries are kept as they are done, so that a killed run resumes.

The output and its manifest are made in OUT.work and put in place one after the other: the manifest holds the digest of
the output, so that no reader takes those of two jobs for one. One process at a time works on an output.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hardneg import __version__
from hardneg.core.errors import ArgumentError, Damaged, spelled, warn_once, written
from hardneg.io.arrays import read_npz
from hardneg.io.files import locked, read_json, run_again, write_atomically, write_json
from hardneg.io.outputs import check_output, swap_in
from hardneg.io.provenance import environment
from hardneg.io.sealed import is_whole, sealing
from hardneg.mining.alignment import warn_of_easy_negatives
from hardneg.mining.cache_key import digest_of_path, key_of_function
from hardneg.mining.checks import check_options, expression_of
from hardneg.mining.encode import load_callable
from hardneg.mining.engine import MinedBlock, Miner
from hardneg.mining.explain import Explanation
from hardneg.mining.inputs import Embedded, Progress, embeddings, load_problem, make_miner
from hardneg.mining.manifest import describe_inputs, digests_of_others, is_of, read_manifest
from hardneg.mining.options import MineOptions, manifest_of
from hardneg.mining.output import Layout, Result, has_rows, recover, write_output
from hardneg.mining.pair_scores import with_teacher
from hardneg.mining.problem import Problem
from hardneg.mining.ranks import Ranks, join_ranks

_ours = re.compile(r"job\.json|manifest\.json|output(\.parquet|\.jsonl)?|block-\d{6,}\.npz|\..*\.partial")


@dataclass(frozen=True)
class Summary:
    """What came out: for the terminal and for the manifest."""

    counts: dict[str, int]
    explanation: Explanation
    statistics: dict[str, dict[str, float]]
    rows_written: int
    manifest: Path | None


def quiet(what: str, steps: int) -> Callable[[int], None]:
    return lambda done: None


def run(options: MineOptions, progress: Progress = quiet) -> Summary | None:
    """Mines files into files; None on every rank but the first. See docs/guides/mining.md."""
    check_options(options)
    check_work_folder(options.out)
    ranks = join_ranks()
    with _alone(options, ranks):
        summary = _run(options, ranks, progress)
    ranks.leave()
    return summary


def _alone(options: MineOptions, ranks: Ranks) -> AbstractContextManager[None]:
    """The lock of this output; the first of several ranks holds it for all."""
    if not ranks.first:
        return nullcontext()
    out = Path(options.out)
    if out.parent.exists() and not out.parent.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(out.parent))
    out.parent.mkdir(parents=True, exist_ok=True)
    fix = f"wait for it, or use another --out than {out}"
    return locked(out.with_name(f".{out.name}.lock"), "mine", fix=fix, remove=True)


def _run(options: MineOptions, ranks: Ranks, progress: Progress) -> Summary | None:
    if ranks.first:
        recover(Path(options.out))
        _check_ours(options)
    sources = describe_inputs(options) if ranks.first else {}
    problem = load_problem(options)
    check_room(options, problem)
    warn_of_ids(options, problem)
    embedded = embeddings(options, problem, ranks, progress)
    miner = make_miner(options, problem, *embedded.vectors, embedded.guide)
    work = _work_folder(options, _fingerprint(options, problem, miner), ranks)
    done = progress("mining", len(problem.queries))
    for number, (low, high) in enumerate(miner.blocks()):
        shard, is_own = _shard(work, number), number % ranks.size == ranks.rank
        if is_own and not is_whole(shard, "mine", "its queries are mined again", _read_block):
            write_atomically(shard, sealing(lambda file, b=(low, high): _save(file, miner, *b)), run_again)  # type: ignore[misc]
        done(high - low)
    ranks.wait()
    summary = _finish(options, problem, miner, work, embedded, sources) if ranks.first else None
    ranks.wait()
    if ranks.first:
        shutil.rmtree(work)
        _remove_partials(options)
    return summary


def _check_ours(options: MineOptions) -> None:
    """Raises for an output or a manifest that no run of ours has written, or that was changed since."""
    out, work = Path(options.out), Path(f"{options.out}.work")
    manifest = manifest_of(out)

    def is_ours() -> bool:
        # A run that was killed between its output and its manifest has the manifest in its work folder.
        return any(is_of(out, read_manifest(path, "mine")) for path in (work / "manifest.json", manifest))

    def is_manifest() -> bool:
        return "output" in read_manifest(manifest, "mine")

    check_output("mine", out, [], overwrite=options.overwrite, is_ours=is_ours)
    check_output("mine", manifest, [], overwrite=options.overwrite, is_ours=is_manifest)


def check_room(options: MineOptions, problem: Problem) -> None:
    """Warns where no query can have k negatives; raises if the format writes none with fewer."""
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
            raise ArgumentError("mine", f"{spelled('mine', 'k')} negatives of some query for n-tuples", got, fix)
        few = f"{given} is more than a query has candidates, {most} at most: every query gets fewer negatives."
        warn_once(f"few candidates: {k} of {most}", few)


def warn_of_ids(options: MineOptions, problem: Problem) -> None:
    """Warns where a format for training has no texts to write."""
    if options.format != "ids" and (problem.queries.texts is None or problem.corpus.texts is None):
        ids = written("mine", "format", "ids")
        text = f"There are no texts, so the rows of {options.format} hold ids: use {ids}, or name tables with texts."
        warn_once(f"no texts: {options.format}", text)


def _shard(work: Path, number: int) -> Path:
    return work / f"block-{number:06d}.npz"


def _work_folder(options: MineOptions, wanted: dict[str, Any], ranks: Ranks) -> Path:
    """Where finished blocks lie; those of another job, or of other data, are thrown away."""
    work = Path(f"{options.out}.work")
    if ranks.first:
        known = work / "job.json"
        if work.exists() and _read_job(known) != wanted:
            shutil.rmtree(work)
        work.mkdir(parents=True, exist_ok=True)
        write_json(known, wanted, run_again)
    ranks.wait()
    return work


def check_work_folder(out: str) -> None:
    """Raises if the folder for finished blocks holds what no run of ours has written: it would be thrown away."""
    work = Path(f"{out}.work")
    if not work.exists():
        return
    others = [path.name for path in work.iterdir() if not _ours.fullmatch(path.name)] if work.is_dir() else [work.name]
    if others:
        raise ArgumentError(
            "mine",
            f"{work} for its own files while it works",
            f"{sorted(others)[0]!r} there, which is not one",
            "move it away, or use another --out",
        )


def _read_job(path: Path) -> Any:
    """What the blocks were made of; None where that is not known."""
    if not path.exists():
        return None
    try:
        return read_json(path, "all blocks are mined again", who="mine")
    except Damaged as error:
        warn_once(f"damaged {path}", str(error))
        return None


def _fingerprint(options: MineOptions, problem: Problem, miner: Miner) -> dict[str, Any]:
    """What must be the same for the blocks of a killed run to be used: the data, the options, the functions that they
    name, and how the queries were cut into blocks, which follows from the device."""
    content = hashlib.sha256()
    for side in (problem.queries, problem.corpus):
        for column in (side.ids, side.texts, side.labels):
            _add_to(content, column or ())
    _add_to(content, problem.positives)
    _add_to(content, problem.own)
    for vectors in (miner.meeting.queries.vectors, miner.meeting.keys.vectors):
        for low in range(0, len(vectors), 65536):
            content.update(vectors[low : low + 65536].contiguous().cpu().numpy().tobytes())
    relevant = {
        name: value
        for name, value in asdict(options).items()
        if name not in ("device", "cache", "batch_size", "overwrite")
    }
    return {
        "options": json.dumps(relevant, sort_keys=True),
        "content": content.hexdigest(),
        "rescore": None
        if options.rescore is None
        else key_of_function(options.rescore, load_callable(options.rescore)),
        "others": digests_of_others(options),
        "block": miner.meeting.query_block,
        "device": miner.meeting.device.type,
        "version": __version__,
    }


def _add_to(content: Any, column: Iterable[Any]) -> None:
    """Row by row, so that the texts of a large corpus are never held twice."""
    for one in column:
        content.update(repr(one).encode() + b"\n")
    content.update(b"\n")


def _save(file: Any, miner: Miner, low: int, high: int) -> None:
    block = miner.block(low, high)
    positives, real = miner.meeting.positive_scores(torch.arange(low, high, device=miner.meeting.device))
    np.savez(
        file,
        rows=block.rows.numpy(),
        scores=block.scores.numpy(),
        found_by=block.found_by.numpy(),
        positive_scores=positives[real].cpu().numpy(),
        explanation=np.frombuffer(json.dumps(asdict(block.explanation)).encode(), dtype=np.uint8),
    )


def _read_block(path: Path) -> tuple[MinedBlock, Any]:
    """The block, and the scores of its positives."""
    file = read_npz("mine", path)
    fields = json.loads(file["explanation"].tobytes())
    explanation = Explanation(**{**fields, "steps": tuple(fields["steps"]), "used": tuple(fields["used"])})
    rows, scores, found_by = (torch.from_numpy(file[name]) for name in ("rows", "scores", "found_by"))
    return MinedBlock(rows, scores, found_by, explanation), file["positive_scores"]


def _collected(problem: Problem, miner: Miner, work: Path) -> tuple[Result, Explanation]:
    """What all blocks have found."""
    read = (_read_block(_shard(work, number)) for number in range(len(miner.blocks())))
    blocks, positive_scores = zip(*read, strict=True)
    mined = miner.joined(blocks)
    if len(mined.rows) != len(problem.queries):
        got = f"blocks of {len(mined.rows)} of {len(problem.queries)} queries"
        raise Damaged("mine", "all blocks", work, got, "delete it and run the same command again")
    # The pairs of the miner are sorted by row within a query; the problem's positives follow.
    problem.positives = [sorted(rows) for rows in problem.positives]
    arrays = (mined.rows.numpy(), mined.scores.numpy(), np.concatenate(positive_scores), mined.found_by.numpy())
    return Result(problem, *arrays, mined.retrievers), mined.explanation


def _finish(
    options: MineOptions, problem: Problem, miner: Miner, work: Path, embedded: Embedded, sources: dict[str, Any]
) -> Summary:
    """Makes the output and its manifest in the work folder, then puts both in place."""
    result, explanation = _collected(problem, miner, work)
    anchor = options.columns.query if options.columns.query and "+" not in options.columns.query else "anchor"
    layout = Layout(options.format, anchor, options.columns.positive or "positive", options.scores, options.ids)
    result = with_teacher(result, miner.meeting)
    if not has_rows(result, layout):
        shutil.rmtree(work)  # its blocks are of no use to another rule or format
        got = f"none of {len(problem.queries)} queries with enough of them: {explanation.reason()}"
        fix = "use a smaller -k or an easier rule"
        raise ArgumentError("mine", f"negatives to write as {options.format}", got, fix)
    out = Path(options.out)
    staged = work / f"output{out.suffix.lower() if out.suffix.lower() in ('.parquet', '.jsonl') else ''}"
    if staged.is_dir():  # of a run that was killed here
        shutil.rmtree(staged)
    written = write_output(staged, result, layout)
    counts = {**problem.counts, "negatives": int((result.rows >= 0).sum()), "rows_written": written}
    statistics = _statistics(result, miner)
    if problem.alignment is not None and miner.meeting.rescore is None:
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
        "output": digest_of_path(staged),
    }
    write_json(work / "manifest.json", manifest, run_again)
    swap_in(staged, out)
    os.replace(work / "manifest.json", manifest_of(out))
    return Summary(counts, explanation, statistics, written, manifest_of(out))


def _statistics(result: Result, miner: Miner) -> dict[str, dict[str, float]]:
    """Similarities of positives, chosen negatives and random documents."""
    random = torch.Generator().manual_seed(0)
    query = torch.randint(0, len(result.rows), (1000,), generator=random)
    rows = torch.randint(0, len(miner.meeting.corpus), (1000,), generator=random)
    device = miner.meeting.device
    drawn = miner.meeting.pair_scores(query.to(device), rows.to(device)).cpu().numpy()
    groups = {"positives": result.positive_scores, "negatives": result.scores[result.rows >= 0], "random": drawn}
    out = {}
    for name, values in groups.items():
        if len(values):
            low, middle, high = np.quantile(values, [0.05, 0.5, 0.95])
            out[name] = {"mean": values.mean(), "5%": low, "median": middle, "95%": high}
    return {name: {key: round(float(value), 6) for key, value in row.items()} for name, row in out.items()}


def _remove_partials(options: MineOptions) -> None:
    """What killed runs of this job left half written among its embeddings; a shared cache is left alone."""
    if options.cache is None:
        for path in Path(f"{options.out}.embeddings").glob(".*.partial"):
            path.unlink(missing_ok=True)
