"""Runs the studies of the atlas: each is a plan in experiments/studies, committed before its first run.

    python experiments/atlas.py list                                 the studies, their runs, times and states
    python experiments/atlas.py power g3                             the differences that a plan can detect
    python experiments/atlas.py run g3 --data build/worlds           train, judge and write benchmarks/results/studies
    python experiments/atlas.py judge g3                             judge the stored runs again
    python experiments/atlas.py pack --data build/worlds             write what hardneg advise reads

A plan names worlds, data sets, arms, the joint grid of tuning, seeds, the smallest difference that matters and the
minutes that it may take. Every data set of a world is a cell: a comparison of ``hardneg.comparing`` whose short runs
stay in one process. Cells run side by side; a killed study resumes where it was. The digest of the plan is in the
result, and a plan that was changed after its first run is refused. The rules for verdicts are in
experiments/studies/README.md, and ``judged`` below is all of them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from hardneg.cli.advise import ATLAS, profile_of
from hardneg.comparing.comparing import carry_out, prepare
from hardneg.comparing.memory import free_memory
from hardneg.comparing.progress import Watcher
from hardneg.comparing.request import Comparison
from hardneg.comparing.runs import run_of
from hardneg.comparing.statistics import (
    SIGNIFICANCE,
    MeanEstimate,
    Outcomes,
    difference_of,
    holm,
    holm_levels,
    outcomes_of,
)
from hardneg.core.errors import HardnegError
from hardneg.io.files import write_json
from hardneg.io.provenance import environment
from hardneg.training.evaluation.measures import measures_in

ROOT = Path(__file__).resolve().parent.parent
PLANS = ROOT / "experiments" / "studies"
RESULTS = ROOT / "benchmarks" / "results" / "studies"
MEMORY = 1.5 * 2**30
"""Bytes that one process of a study may need."""
HOLDS, HARMS, NOTHING, OPEN = "holds", "the opposite holds", "does not hold", "not decided"
VANISHES = "vanishes when tuned"
NORMAL_80, NORMAL_95 = 0.8416, 1.96


class Refused(HardnegError, ValueError):
    """A study cannot be run as it is."""


class OutOfTime(HardnegError, OSError):
    """A study has used its minutes."""


@dataclass(frozen=True)
class Plan:
    """A study: the contents of its file, and the digest of the file.

    Attributes:
        name: Name of the file without its suffix.
        digest: Digest of the bytes of the file.
        facts: Contents of the file.
    """

    name: str
    digest: str
    facts: dict[str, Any]

    @classmethod
    def read(cls, name: str) -> Plan:
        """Read a plan of experiments/studies; one that is not committed is refused by ``committed``."""
        file = PLANS / f"{name}.yaml"
        if not file.exists():
            raise Refused("study", f"one of {', '.join(known())}", repr(name))
        content = file.read_bytes()
        return cls(name, hashlib.blake2b(content, digest_size=8).hexdigest(), yaml.safe_load(content))

    def check_committed(self) -> str:
        """Return the commit of the plan; raise if the file differs from it."""
        file = str(PLANS / f"{self.name}.yaml")

        def git(*words: str) -> str:
            return subprocess.run(("git", *words, "--", file), cwd=ROOT, capture_output=True, text=True).stdout.strip()

        if git("status", "--porcelain") or not (commit := git("log", "-1", "--format=%h")):
            raise Refused(
                "study", "a committed plan", f"{self.name}.yaml, which is not", "commit it before its first run"
            )
        return commit

    def cells(self) -> Iterator[tuple[str, str, bool]]:
        """Yield world, data set, and True for the comparison without tuning, where the plan has one."""
        for world, one in self.facts["worlds"].items():
            for data in one["data"]:
                yield world, data, False
                if "untuned" in self.facts:
                    yield world, data, True

    def comparison(self, world: str, data: str, untuned: bool, folder: Path) -> Comparison:
        """Return the comparison of a cell."""
        facts, one = self.facts, self.facts["worlds"][world]
        common = {**facts["common"], **one.get("options", {}), "data": one["file"].format(folder=folder, data=data)}
        common = {name: x.format(folder=folder) if isinstance(x, str) else x for name, x in common.items()}
        wanted = {**facts["tune"], **one.get("tune", {})}
        tune = {name: tuple(map(float, values)) for name, values in wanted.items()}
        arms, tries = tuple(facts["arms"].values()), facts.get("tries")
        if untuned:
            common, tune, tries = {**common, **facts["untuned"]}, {}, None
            arms = tuple(facts["arms"][name] for name in self.compared())
        return Comparison(arms, facts["seeds"], common, tune, one["metric"], tries)

    def compared(self) -> list[str]:
        """Return the names of the arms that claims are about."""
        claims = self.facts["claims"]
        return [name for name in self.facts["arms"] if any(name in (one["arm"], one["against"]) for one in claims)]

    def names(self, untuned: bool) -> list[str]:
        """Return the names of the arms of a cell."""
        return self.compared() if untuned else list(self.facts["arms"])

    def num_runs(self) -> int:
        """Return the number of all runs."""
        seeds, tries = self.facts["seeds"], self.facts.get("tries") or math.prod(map(len, self.facts["tune"].values()))
        return sum(len(self.names(untuned)) * (seeds + tries * (not untuned)) for _, _, untuned in self.cells())

    def family(self) -> int:
        """Return the number of differences that are judged together."""
        return len(self.facts["claims"]) * sum(not untuned for _, _, untuned in self.cells())


def known() -> list[str]:
    """Return the names of the plans."""
    return sorted(file.stem for file in PLANS.glob("g*.yaml"))


def replaced(name: str) -> bool:
    """Return whether a plan has a second version, so that it is kept for the record only."""
    return (PLANS / f"{name}v2.yaml").exists()


def power(plan: Plan) -> dict[str, float]:
    """Return the difference in points that the first test of a cell detects with a probability of 80 %, by data set.

    It assumes the standard deviation of a run and the variance of an item's difference that the plan states, and tests
    at the strictest level of Holm's method.
    """
    from scipy.stats import norm

    assumed, seeds = plan.facts["assumed"], plan.facts["seeds"]
    level = float(norm.isf(SIGNIFICANCE / plan.family() / 2.0))
    found = {}
    for world, one in plan.facts["worlds"].items():
        for data, number in one["data"].items():
            error = math.sqrt(2.0 * assumed["run"] ** 2 / seeds + 1e4 * assumed["item"] / number)
            found[f"{world}/{data}"] = round((level * 1.05 + NORMAL_80) * error, 2)
    return found


def run_cell(plan: Plan, cell: tuple[str, str, bool], folder: Path, out: Path, deadline: float) -> dict[str, Any]:
    """Train one cell and return its arms: figures of every seed, tuned values, tries and seconds."""
    world, data, untuned = cell
    comparison = plan.comparison(world, data, untuned, folder)
    place = out / f"{world}-{data}{'-untuned' * untuned}"
    prepared = prepare(comparison, place, 1)
    prepared = replace(prepared, how=replace(prepared.how, here=True))

    def show(line: str) -> None:
        print(f"{place.name} {line}", flush=True)
        if time.time() > deadline and not line.endswith("it was finished"):
            fix = "run it again with more --minutes: finished runs are kept"
            raise OutOfTime("study", f"less than its minutes for {plan.name}", place.name, fix)

    begun = time.process_time()
    summary = carry_out(prepared, Watcher(show, prepared.steps))
    names = plan.names(untuned)
    tuned = summary["tuned"] or {}
    results = {
        name: [run_of(arm.tuned(tuned.get(arm.text, {})), seed, place).result() for seed in range(comparison.seeds)]
        for name, arm in zip(names, prepared.arms, strict=True)
    }
    arms = {
        name: {
            "text": arm.text,
            "tuned": tuned.get(arm.text),
            "tries": (summary["tries"] or {}).get(arm.text),
            "measures": {one: [result[one] for result in results[name]] for one in measures_in(results[name][0])},
            "hardness": _mean(results[name], "hardness"),
            "false_negatives": _mean(results[name], "false_negatives"),
            "steps": results[name][0]["steps"],
            "seconds": sum(result["seconds"] for result in results[name]) / comparison.seeds,
        }
        for name, arm in zip(names, prepared.arms, strict=True)
    }
    outcomes = {
        measure: {name: outcomes_of(results[name], measure) for name in names}
        for measure in measures_in(results[names[0]][0])
    }
    found = {"world": world, "data": data, "untuned": untuned, "metric": summary["metric"], "arms": arms}
    found["num_test"] = outcomes[summary["metric"]][names[0]].num_test
    spent = place / "cpu_seconds.json"  # of all starts, since a cell whose runs are there is only read
    before = json.loads(spent.read_text())["seconds"] if spent.exists() else 0.0
    seconds = round(before + time.process_time() - begun, 1)
    write_json(spent, {"seconds": seconds}, "delete it")
    found |= {"cpu_seconds": seconds, "commit": environment()["commit"]}
    found["differences"] = [
        {"claim": number, **differences(claim, outcomes)} for number, claim in enumerate(plan.facts["claims"])
    ]
    return found


def _mean(results: list[dict[str, Any]], name: str) -> float | None:
    values = [one["final"][name] for one in results if one.get("final", {}).get(name) is not None]
    return sum(values) / len(values) if values else None


def differences(claim: dict[str, str], outcomes: dict[str, dict[str, Outcomes]]) -> dict[str, Any]:
    """Return the estimate of a claim's difference by every measure, and of arm - control for the deciding one."""

    def estimate(measure: str, against: str) -> dict[str, float] | None:
        found = difference_of(outcomes[measure][claim["arm"]], outcomes[measure][against])
        return found and {"value": found.value, "error": found.error, "freedom": found.freedom}

    return {measure: estimate(measure, claim["against"]) for measure in outcomes}


def judged(plan: Plan, cells: list[dict[str, Any]], *, with_power: bool = True) -> list[dict[str, Any]]:
    """Judge every claim in every cell by the rules of experiments/studies/README.md.

    All planned differences of the tuned cells are one family (Holm), also while some are missing, so that verdicts do
    not become weaker as cells are added; those of the untuned cells are another family.
    """
    found = []
    smallest = plan.facts["smallest_effect"] / 100.0
    for untuned in (False, True):
        rows = [(cell, one) for cell in cells if cell["untuned"] == untuned for one in cell["differences"]]
        estimates = [MeanEstimate(**one[cell["metric"]]) for cell, one in rows]
        planned = len(plan.facts["claims"]) * sum(cell[2] == untuned for cell in plan.cells())
        p_values = [one.p_value for one in estimates]
        p_values += [1.0] * (planned - len(p_values))  # cells that are missing count as without an effect
        tests = zip(holm(p_values), holm_levels(p_values), strict=True)
        for (cell, one), estimate, (p, level) in zip(rows, estimates, tests, strict=False):
            claim = plan.facts["claims"][one["claim"]]
            half = estimate.half_width_at(level)
            verdict = (reaches if claim.get("kind") == "reaches" else exceeds)(estimate, half, smallest)
            row = {"world": cell["world"], "data": cell["data"], "untuned": untuned, "claim": one["claim"]}
            row |= {"difference": estimate.value, "half_width": estimate.half_width, "corrected_half_width": half}
            row |= {"detectable": estimate.detectable} if with_power else {}  # takes long in simulations
            found.append(row | {"p_value": p, "verdict": verdict})
    before = {(r["world"], r["data"], r["claim"]): r["verdict"] for r in found if r["untuned"]}
    for row in found:
        held = before.get((row["world"], row["data"], row["claim"])) == HOLDS
        if held and not row["untuned"] and row["verdict"] == NOTHING:
            row["verdict"] = VANISHES
    return found


def exceeds(estimate: MeanEstimate, half: float, smallest: float) -> str:
    """Return the verdict on "the arm is better by at least the smallest effect"."""
    if abs(estimate.value) >= smallest and abs(estimate.value) > half:
        return HOLDS if estimate.value > 0.0 else HARMS
    return NOTHING if estimate.value + estimate.half_width < smallest else OPEN


def reaches(estimate: MeanEstimate, half: float, smallest: float) -> str:
    """Return the verdict on "the arm is at most the smallest effect below the other"."""
    if estimate.value - half > -smallest:
        return HOLDS
    return NOTHING if estimate.value + estimate.half_width < -smallest else OPEN


def run(plan: Plan, folder: Path, out: Path, jobs: int, minutes: float | None, only: list[str] | None = None) -> None:
    """Run all cells of a study, several at a time, and write its result after each of them.

    Args:
        plan: The study.
        folder: Folder of the data of the worlds.
        out: Folder of the runs.
        jobs: Number of cells that run side by side.
        minutes: Limit; None: that of the plan.
        only: Worlds to run, or cells as "world/data"; None for all.
    """
    commit = plan.check_committed()
    out.mkdir(parents=True, exist_ok=True)
    stamp = out / "plan.json"
    if stamp.exists() and (before := json.loads(stamp.read_text())["digest"]) != plan.digest:
        fix = "restore the plan, or give the changed one another name: the page then shows both"
        raise Refused("study", f"the plan {plan.name} as it was at its first run ({before})", plan.digest, fix)
    write_json(stamp, {"digest": plan.digest, "commit": commit}, "run the study again")
    if free_memory() < jobs * MEMORY:
        got = f"{free_memory() / 2**30:.1f} GiB for {jobs} processes"
        raise Refused("study", f"{MEMORY / 2**30:g} GiB of free memory for each process", got, "use fewer --jobs")
    deadline = time.time() + 60.0 * (plan.facts["minutes"] if minutes is None else minutes)
    cells = [cell for cell in plan.cells() if only is None or {cell[0], "/".join(cell[:2])} & {*only}]
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"), initializer=one_thread) as pool:
        futures = {cell: pool.submit(run_cell, plan, cell, folder, out, deadline) for cell in cells}
        failed = None
        for cell, future in futures.items():
            try:
                found = future.result()
            except HardnegError as error:
                failed = failed or error
                print(f"{'/'.join(cell[:2])}: {error}", file=sys.stderr)
                continue
            done = {**finished(plan), cell: found}  # others may run other cells of the study
            write_result(plan, commit, [done[one] for one in plan.cells() if one in done])
    if failed is not None:
        raise failed


def finished(plan: Plan) -> dict[tuple[str, str, bool], dict[str, Any]]:
    """Return the cells in the result of a study, if there is one of the same plan."""
    path = RESULTS / f"atlas_{plan.name}.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    cells = found.get("cells", []) if found.get("digest") == plan.digest else []
    return {(one["world"], one["data"], one["untuned"]): one for one in cells}


def judge_again(plan: Plan) -> None:
    """Judge the stored cells of a study again, without training."""
    path = RESULTS / f"atlas_{plan.name}.json"
    facts = json.loads(path.read_text(encoding="utf-8"))
    facts.pop("checksum", None)
    write_json(path, facts | {"verdicts": judged(plan, facts["cells"])}, "run the study again")


def write_result(plan: Plan, commit: str, cells: list[dict[str, Any]]) -> None:
    """Write the JSON file of a study: its cells, verdicts and what is missing."""
    missing = ["/".join(cell[:2]) for cell in plan.cells() if not any(_same(cell, one) for one in cells)]
    seconds = sum(one["cpu_seconds"] for one in cells)
    facts = {"study": plan.name, "digest": plan.digest, "plan_commit": commit, "missing": missing}
    facts |= {"cells": cells, "verdicts": judged(plan, cells), "cpu_seconds": round(seconds, 1), **environment()}
    write_json(RESULTS / f"atlas_{plan.name}.json", facts, "run the study again")


def _same(cell: tuple[str, str, bool], one: dict[str, Any]) -> bool:
    return cell == (one["world"], one["data"], one["untuned"])


def one_thread() -> None:
    """Prepare a process that trains on one core."""
    import torch

    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # the second moments of rare words make Adam several times slower


def pack(folder: Path) -> None:
    """Write the atlas that ``hardneg advise`` reads: a profile of each data set, and what its arms gained.

    Arms of other batch sizes are left out, since an advice is about negatives.
    """
    entries = []
    for plan in map(Plan.read, known()):
        path = RESULTS / f"atlas_{plan.name}.json"
        other_sizes = any("batch_size" in text for text in plan.facts["arms"].values())
        if not path.exists() or other_sizes or replaced(plan.name):
            continue
        result = json.loads(path.read_text(encoding="utf-8"))
        for cell in result["cells"]:
            if not cell["untuned"]:
                entries.append(entry(plan, cell, result["verdicts"], folder))
    write_json(ATLAS, {"entries": [one for one in entries if one["arms"]]}, "run it again")


def entry(plan: Plan, cell: dict[str, Any], verdicts: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Return one entry of the atlas: the arms that were compared with the first arm of the plan."""
    names, world = list(plan.facts["arms"]), plan.facts["worlds"][cell["world"]]
    mined = any("From('batch')" in text for text in plan.facts["arms"].values())
    arms = []
    for one in verdicts:
        claim = plan.facts["claims"][one["claim"]]
        same = (one["world"], one["data"], one["untuned"]) == (cell["world"], cell["data"], False)
        in_batch = not mined or "From('batch')" in plan.facts["arms"][claim["arm"]]  # few data have mined negatives
        if same and in_batch and claim["against"] == names[0]:
            middle, half = 100.0 * one["difference"], 100.0 * one["half_width"]
            numbers = {"difference": round(middle, 2), "low": round(middle - half, 2), "high": round(middle + half, 2)}
            arms.append({"arm": plain(cell["arms"][claim["arm"]]["text"]), **numbers, "verdict": one["verdict"]})
    profile = asdict(profile_of(world["file"].format(folder=folder, data=cell["data"])))
    where = {"study": plan.name, "world": cell["world"], "data": cell["data"]}
    return {**where, "profile": profile, "baseline": plain(cell["arms"][names[0]]["text"]), "arms": arms}


def plain(text: str) -> str:
    """Write an arm for data without mined negatives: all of its candidates are from the batch."""
    text = text.replace("From('batch') * ", "").replace("negatives=\"From('batch')\"", "").replace("(, ", "(")
    return text.replace(", )", ")").replace('negatives="', "negatives='").replace('"', "'")


def show_list() -> None:
    """Print a line for each study."""
    for name in known():
        plan = Plan.read(name)
        path = RESULTS / f"atlas_{name}.json"
        state = "replaced, not run" if replaced(name) else "not run"
        if path.exists():
            found = json.loads(path.read_text())
            state = f"{found['cpu_seconds']:.0f} CPU seconds" + (", incomplete" if found["missing"] else "")
            state += ", replaced by a second version" if replaced(name) else ""
        print(f"{name:12} {plan.facts['title']}: {plan.num_runs()} runs, {plan.facts['minutes']} minutes; {state}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("list", "power", "run", "judge", "pack"))
    parser.add_argument("study", nargs="?", help="name of a plan in experiments/studies")
    parser.add_argument("--data", type=Path, default=ROOT / "build" / "worlds", help="folder of worlds.py")
    parser.add_argument("--out", type=Path, default=ROOT / "runs", help="folder of the runs")
    parser.add_argument("--jobs", type=int, default=2, help="cells that run side by side")
    parser.add_argument("--minutes", type=float, help="limit, if not that of the plan")
    parser.add_argument("--worlds", nargs="*", help="only these worlds, or cells such as vectors/snli")
    options = parser.parse_args()
    if options.action == "list":
        return show_list()
    if options.action == "pack":
        return pack(options.data)
    try:
        plan = Plan.read(options.study or "")
        if options.action == "power":
            print(json.dumps(power(plan), indent=1))
        elif options.action == "judge":
            judge_again(plan)
        else:
            run(plan, options.data, options.out / plan.name, options.jobs, options.minutes, options.worlds)
    except HardnegError as error:
        sys.exit(str(error))
    return None


if __name__ == "__main__":
    main()
