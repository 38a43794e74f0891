"""`hardneg mine`: files in, files out. Blocks of queries are kept as they are done, so that a killed run resumes."""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hardneg import __version__
from hardneg.io.files import go_on, write_atomically, write_json
from hardneg.io.provenance import environment
from hardneg.mining.encode import hash_of_function
from hardneg.mining.engine import MinedBlock, Miner
from hardneg.mining.explain import Explanation
from hardneg.mining.inputs import Progress, embeddings, load_problem, make_miner
from hardneg.mining.options import MineOptions, check_options
from hardneg.mining.output import Layout, Result, write_output
from hardneg.mining.problem import Problem
from hardneg.mining.ranks import Ranks, join_ranks
from hardneg.negatives import parse

_ours = re.compile(r"job\.json|block-\d{6,}\.npz|\..*\.partial")


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
    problem = load_problem(options)
    miner = make_miner(options, problem, *embeddings(options, problem, ranks, progress))
    work = _work_folder(options, _fingerprint(options, problem, miner), ranks)
    done = progress("mining", len(problem.queries))
    for number, (low, high) in enumerate(miner.blocks()):
        shard = work / f"block-{number:06d}.npz"
        if number % ranks.size == ranks.rank and not shard.exists():
            write_atomically(shard, lambda file, b=(low, high): _save(file, miner, *b), go_on)  # type: ignore[misc]
        done(high - low)
    ranks.wait()
    summary = _finish(options, problem, miner, work) if ranks.first else None
    ranks.wait()
    if ranks.first:
        shutil.rmtree(work)
        _remove_partials(options)
    ranks.leave()
    return summary


def _work_folder(options: MineOptions, wanted: dict[str, Any], ranks: Ranks) -> Path:
    """Where finished blocks lie; those of another job, or of other data, are thrown away."""
    work = Path(f"{options.out}.work")
    if ranks.first:
        known = work / "job.json"
        if work.exists() and _read_json(known) != wanted:
            shutil.rmtree(work)
        work.mkdir(parents=True, exist_ok=True)
        write_json(known, wanted, go_on)
    ranks.wait()
    return work


def check_work_folder(out: str) -> None:
    """Raises if the folder for finished blocks holds what no run of ours has written: it would be thrown away."""
    work = Path(f"{out}.work")
    if not work.exists():
        return
    others = [path.name for path in work.iterdir() if not _ours.fullmatch(path.name)] if work.is_dir() else [work.name]
    if others:
        raise ValueError(
            f"mine needs {work} for its own files while it works, got {sorted(others)[0]!r} there, which is not one; "
            "move it away, or use another --out."
        )


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
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
    for vectors in (miner.finder.queries.vectors, miner.finder.keys.vectors):
        for low in range(0, len(vectors), 65536):
            content.update(vectors[low : low + 65536].contiguous().cpu().numpy().tobytes())
    told = {name: value for name, value in asdict(options).items() if name not in ("device", "cache", "batch_size")}
    return {
        "options": json.dumps(told, sort_keys=True),
        "content": content.hexdigest(),
        "rescore": None if options.rescore is None else hash_of_function(options.rescore),
        "block": miner.finder.query_block,
        "device": miner.finder.device.type,
        "version": __version__,
    }


def _add_to(content: Any, column: Iterable[Any]) -> None:
    """Row by row, so that the texts of a large corpus are never held twice."""
    for one in column:
        content.update(repr(one).encode() + b"\n")
    content.update(b"\n")


def _save(file: Any, miner: Miner, low: int, high: int) -> None:
    block = miner.block(low, high)
    positives, real = miner.finder.positive_scores(torch.arange(low, high, device=miner.finder.device))
    np.savez(
        file,
        rows=block.rows.numpy(),
        scores=block.scores.numpy(),
        found_by=block.found_by.numpy(),
        positive_scores=positives[real].cpu().numpy(),
        explanation=np.frombuffer(json.dumps(asdict(block.explanation)).encode(), dtype=np.uint8),
    )


def _finish(options: MineOptions, problem: Problem, miner: Miner, work: Path) -> Summary:
    blocks, positive_scores = [], []
    for number in range(len(miner.blocks())):
        with np.load(io.BytesIO((work / f"block-{number:06d}.npz").read_bytes())) as file:
            told = json.loads(file["explanation"].tobytes())
            explanation = Explanation(**{**told, "steps": tuple(told["steps"])})
            rows, scores, found_by = (torch.from_numpy(file[name]) for name in ("rows", "scores", "found_by"))
            blocks.append(MinedBlock(rows, scores, found_by, explanation))
            positive_scores.append(file["positive_scores"])
    mined = miner.joined(blocks)
    if len(mined.rows) != len(problem.queries):
        raise ValueError(f"{work} holds blocks of {len(mined.rows)} of {len(problem.queries)} queries; remove it.")
    own = np.concatenate(positive_scores)
    # The pairs of the miner are sorted by row within a query; the problem's positives follow.
    problem.positives = [sorted(rows) for rows in problem.positives]
    result = Result(problem, mined.rows.numpy(), mined.scores.numpy(), own, mined.found_by.numpy(), mined.retrievers)
    anchor = options.columns.query if options.columns.query and "+" not in options.columns.query else "anchor"
    layout = Layout(options.format, anchor, options.columns.positive or "positive", options.scores)
    statistics = _statistics(result, miner)
    written = write_output(Path(options.out), result, layout)
    counts = {**problem.counts, "negatives": int((mined.rows >= 0).sum()), "rows_written": written}
    manifest = Path(f"{options.out}.manifest.json")
    write_json(
        manifest,
        {
            **environment(),
            "options": asdict(options),
            "seed": options.seed,
            "negatives": repr(parse(options.negatives)),
            "counts": counts,
            "explain": mined.explanation.as_dict(),
            "statistics": statistics,
        },
        go_on,
    )
    return Summary(counts, mined.explanation, statistics, written, manifest)


def _statistics(result: Result, miner: Miner) -> dict[str, dict[str, float]]:
    """Similarities of positives, chosen negatives and random documents."""
    random = torch.Generator().manual_seed(0)
    query = torch.randint(0, len(result.rows), (1000,), generator=random)
    rows = torch.randint(0, len(miner.finder.corpus), (1000,), generator=random)
    finder = miner.finder
    drawn = finder.pair_scores(query.to(finder.device), rows.to(finder.device)).cpu().numpy()
    groups = {"positives": result.positive_scores, "negatives": result.scores[result.rows >= 0], "random": drawn}
    out = {}
    for name, values in groups.items():
        if len(values):
            low, middle, high = np.quantile(values, [0.05, 0.5, 0.95])
            out[name] = {"mean": values.mean(), "5%": low, "median": middle, "95%": high}
    return {name: {key: round(float(value), 6) for key, value in row.items()} for name, row in out.items()}


def _remove_partials(options: MineOptions) -> None:
    """What killed runs of this job left half written, here and among its embeddings; a shared cache is left alone."""
    out = Path(options.out)
    names = "|".join(re.escape(name) for name in (out.name, f"{out.name}.manifest.json"))
    places = [(out.parent, names), *([] if options.cache else [(Path(f"{options.out}.embeddings"), ".*")])]
    for folder, name in places:
        for path in folder.glob(".*.partial"):
            if re.fullmatch(rf"\.({name})\.\d+\.partial", path.name):
                path.unlink(missing_ok=True)
