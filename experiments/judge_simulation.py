"""Do the bounds of ``hn.judge`` hold, and what do they cost? Simulated judgings of pairs whose truth is known.

Populations of six rules each: synthetic ones, and the mined pairs of nfcorpus and scifact (static word vectors; the
qrels count as the whole truth) and of scikit-learn's digits (same class). Each repetition uses another order of the
pairs. Separate samples, to compare: a simple random sample of every rule with the exact hypergeometric test, and no
correction for the number of rules.

    pip install --no-deps wordllama
    python experiments/judge_simulation.py --data DIR --out experiments/judge_simulation.json
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mined_training import static_model
from mining_judged import Judged, read_nfcorpus, read_scifact
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

import hardneg as hn
from hardneg.core.errors import HardnegWarning
from hardneg.io.provenance import environment
from hardneg.judging.design import FALSE, TRUE, Design, Population, Sensitivity
from hardneg.judging.rules import expanded, population_of
from hardneg.judging.statistics import log_binomial, most_allowed
from hardneg.training.data.named import default_root

BUDGETS = (100, 300, 1000)
ERROR, POWER, KNOWN = 0.05, 0.8, 50
RATES = (0.005, 0.01, 0.02, 0.03, 0.06, 0.12)
AT_THE_LEVEL = (0.0505, 0.06, 0.07, 0.08, 0.09, 0.1)
MARGINS = {
    "nfcorpus": ["BelowPositive(relative={0.7, 0.5, 0.3, 0.2, 0.0})", "Rank(0, 20)"],
    "scifact": ["BelowPositive(relative={0.5, 0.3, 0.2, 0.1, 0.0})", "Rank(0, 20)"],
    "digits": ["BelowPositive(relative={0.9, 0.8, 0.7, 0.6, 0.4, 0.2})"],
}


@dataclass(frozen=True, eq=False)
class World:
    """Populations with their truth, by (query, document)."""

    name: str
    level: float
    populations: list[Population]
    truth: list[NDArray[np.bool_]]  # of each slot of each population

    def sizes(self) -> list[int]:
        return [len(one) for one in self.populations]

    def counts(self) -> list[int]:
        return [int(one.sum()) for one in self.truth]


def synthetic(name: str, rates: Sequence[float], level: float, size: int = 2000, shared: float = 0.1) -> World:
    """Rules of equal size; a tenth of each is shared with the next one."""
    random = np.random.default_rng(0)
    populations, truth, step = [], [], int(size * (1 - shared))
    relevant = np.zeros(step * len(rates) + size, dtype=bool)
    for number, rate in enumerate(rates):
        mine = slice(number * step, number * step + size)
        new = np.arange(mine.start if not number else mine.start + size - step, mine.stop)
        wanted = max(round(rate * size) - int(relevant[mine].sum()), 0)
        relevant[random.choice(new, wanted, replace=False)] = True
    for number, rate in enumerate(rates):
        pairs = np.arange(number * step, number * step + size)
        populations.append(Population(number, f"rule {number} at {rate:g}", pairs // 5, pairs % 5, float(number)))
        truth.append(relevant[pairs])
    return World(name, level, populations, truth)


def of_texts(judged: Judged, level: float) -> World:
    model = static_model()
    queries, documents = (
        torch.tensor(model.encode(texts, normalize_embeddings=True, show_progress_bar=False))
        for texts in (judged.queries, judged.documents)
    )
    relevant = [set(own) for own in judged.relevant]
    is_false = np.vectorize(lambda query, document: document in relevant[query])
    first = [own[:1] for own in judged.relevant]
    return mined(judged.name, level, (queries, documents, first), is_false, k=5)


def of_digits(level: float) -> World:
    from sklearn.datasets import load_digits

    pixels, classes = load_digits(return_X_y=True)
    vectors = normalize(torch.tensor(pixels - pixels.mean(0)).float(), dim=1)
    random = np.random.default_rng(0)
    positives = [
        int(random.choice(np.flatnonzero((classes == own) & (np.arange(len(classes)) != row))))
        for row, own in enumerate(classes)
    ]
    return mined("digits", level, (vectors, vectors, positives), lambda q, d: classes[q] == classes[d], k=2)


def mined(name: str, level: float, data: tuple[Tensor, Tensor, Any], is_false: Any, k: int) -> World:
    rules = [each for text in MARGINS[name] for each in expanded(text)]
    populations = [population_of(rule, hn.parse(rule), hn.mine(*data, rule, k)) for rule in rules]
    populations.sort(key=lambda one: (one.similarity, one.name))
    return World(name, level, populations, [np.asarray(is_false(one.query, one.document)) for one in populations])


def design_of(world: World, seed: int, sensitivity: Sensitivity | None = None) -> tuple[Design, NDArray[np.bool_]]:
    """The design of one repetition, and the truth of its questions."""
    design = Design(world.populations, world.level, 1 - ERROR, seed, sensitivity=sensitivity)
    return design, _truth_of(world, design)


_truths: dict[int, NDArray[np.bool_]] = {}


def _truth_of(world: World, design: Design) -> NDArray[np.bool_]:
    """The truth of each question, in the order of its numbers, which does not depend on the seed."""
    if id(world) not in _truths:
        width = max(int(one.document.max()) for one in world.populations) + 1
        keys = np.concatenate([one.query * width + one.document for one in world.populations])
        values = np.concatenate(world.truth)
        order = np.argsort(keys, kind="stable")
        place = np.searchsorted(keys[order], design.query * width + design.document)
        _truths[id(world)] = values[order][place]
    return _truths[id(world)]


def judge(design: Design, answers: NDArray[np.bool_], budget: int, target: int | None = None, spent: int = 0) -> int:
    """Ask until the design stops, or until the target is chosen; the number of answers."""
    while len(asked := design.ask(budget, spent)):
        design.value[asked] = np.where(answers[asked], FALSE, TRUE)
        spent += len(asked)
        if target is not None and (design.chosen() or 0) >= target and design.certified(target):
            break
    return spent


def coverage(world: World, budget: int, times: int) -> dict[str, Any]:
    """Misses of every bound, choices of rules, and what they cost."""
    rules = range(len(world.populations))
    rates = [count / size for count, size in zip(world.counts(), world.sizes(), strict=True)]
    above, below, width = np.zeros((3, len(world.populations)))
    chosen: list[int] = []
    spent = 0
    for seed in range(times):
        design, truth = design_of(world, seed)
        spent += judge(design, truth, budget)
        states = [design.state(rule) for rule in rules]
        above += [state.high < rate - 1e-12 for state, rate in zip(states, rates, strict=True)]
        below += [state.low > rate + 1e-12 for state, rate in zip(states, rates, strict=True)]
        width += [state.high - state.low for state in states]
        found = design.chosen()
        chosen.append(-1 if found is None else found)
    return {
        "budget": budget,
        "mean_judgements": spent / times,
        "missed_above": above.astype(int).tolist(),
        "missed_below": below.astype(int).tolist(),
        "most_missed": int((above + below).max()),
        "mean_width": (width / times).round(4).tolist(),
        "chosen": sum(one >= 0 for one in chosen) / times,
        "chosen_by_rule": [chosen.count(rule) / times for rule in rules],
        "chosen_above_the_level": sum(one >= 0 and rates[one] > world.level for one in chosen) / times,
    }


def hypergeometric_below(size: int, count: int, sample: int) -> NDArray[np.float64]:
    """P(at most s false negatives in a sample), for s = 0, 1, ..."""
    several = np.arange(min(count, sample) + 1)
    logs = log_binomial(count, several) + log_binomial(size - count, sample - several) - log_binomial(size, sample)
    return np.exp(logs).cumsum()


def exact_sample(size: int, count: int, level: float, power: float = POWER) -> int | None:
    """The smallest simple random sample whose exact test certifies a rule with this power."""
    tested = most_allowed(size, level) + 1
    for sample in range(1, size + 1):
        null = hypergeometric_below(size, tested, sample)
        most = int((null <= ERROR).sum()) - 1  # most false negatives that still certify
        if most >= 0 and hypergeometric_below(size, count, sample)[min(most, count, sample)] >= power:
            return sample
    return None


def cost(world: World, times: int) -> dict[str, Any]:
    """Judgements until the hardest rule with a rate of at most .6 of the level is chosen, against separate samples."""
    rates = [count / size for count, size in zip(world.counts(), world.sizes(), strict=True)]
    target = max(rule for rule, rate in enumerate(rates) if rate <= 0.6 * world.level)
    separate = exact_sample(world.sizes()[target], world.counts()[target], world.level)
    assert separate is not None
    budget = separate * len(rates)
    used = []
    for seed in range(times):
        design, truth = design_of(world, seed)
        spent = judge(design, truth, budget, target)
        used.append(spent if (design.chosen() or 0) >= target and design.certified(target) else math.inf)
    needed = float(np.sort(used)[math.ceil(POWER * times) - 1])
    found = [one for one in used if math.isfinite(one)]
    return {
        "target": world.populations[target].name,
        "target_rate": rates[target],
        "separate_samples": budget,
        "judgements_at_80_percent": needed if math.isfinite(needed) else None,
        "share": needed / budget if math.isfinite(needed) else None,
        "mean_share_if_found": float(np.mean(found)) / budget,
        "found": len(found) / times,
    }


def single(rate: float, budget: int, rules: int, times: int) -> dict[str, Any]:
    """How often any rule is chosen if the easiest has this rate; harder ones have 2, 4, ... times as many."""
    world = synthetic("", [rate * 2**number for number in range(rules)], 0.05)
    chosen = []
    for seed in range(times):
        design, truth = design_of(world, seed)
        judge(design, truth, budget)
        chosen.append(design.chosen() is not None)
    return {"rate": rate, "budget": budget, "rules": rules, "chosen": sum(chosen) / times}


def erring(
    world: World, flips: float, budget: int, times: int, found: float | None = None, num_mined: int = 0
) -> dict[str, Any]:
    """A judge that flips a share of its answers, and a person who confirms its flags.

    Args:
        world: Populations with their truth.
        flips: Share of the answers that are flipped.
        budget: Answers of the judge.
        times: Repetitions.
        found: Share of the false negatives among mined pairs that it flags; by default the same share as of known
            positives.
        num_mined: Pairs of the hardest rule that the person judges too, to measure the sensitivity; 0 measures it on
            50 known positives.
    """
    found = 1 - flips if found is None else found
    rates = [count / size for count, size in zip(world.counts(), world.sizes(), strict=True)]
    missed, chosen, wrong, confirmations = np.zeros(len(rates)), 0, 0, 0
    for seed in range(times):
        random = np.random.default_rng([seed, round(100 * flips)])
        sensitivity = Sensitivity.of(int(random.binomial(KNOWN, 1 - flips)), KNOWN, ERROR)
        design, truth = design_of(world, seed, sensitivity)
        drawn = random.random(len(truth))
        flagged = np.where(truth, drawn >= 1 - found, drawn < flips)
        sample = design.sample(num_mined)
        if num_mined:
            counts = int((truth & flagged)[sample].sum()), int(truth[sample].sum())
            design.sensitivity = Sensitivity.of(*counts, ERROR, design.populations[-1].name)
            design.value[sample] = np.where((truth & flagged)[sample], FALSE, TRUE)
        judge(design, truth & flagged, budget, spent=num_mined)
        by_people = flagged & (design.value >= 0)
        by_people[sample] = True
        confirmations += int(by_people.sum())
        states = [design.state(rule) for rule in range(len(rates))]
        missed += [
            not state.low - 1e-12 <= rate <= state.high + 1e-12 for state, rate in zip(states, rates, strict=True)
        ]
        rule = design.chosen()
        chosen += rule is not None
        wrong += rule is not None and rates[rule] > world.level
    return {
        "flips": flips,
        "found_of_mined": found,
        "num_mined": num_mined,
        "budget": budget,
        "least_coverage": 1 - float(missed.max()) / times,
        "chosen": chosen / times,
        "chosen_above_the_level": wrong / times,
        "confirmations": confirmations / times,
    }


def tables(found: dict[str, Any]) -> str:
    """As docs/explanation/judging.md has them."""
    lines = ["| data | level | true rates | budget | most misses | chosen | above the level | mean width |"]
    lines.append("| --- " * 8 + "|")
    for world in found["worlds"]:
        rates = ", ".join(f"{100 * rate:.2g}" for rate in world["rates"])
        for number, one in enumerate(world["budgets"]):
            first = (world["name"], f"{100 * world['level']:g} %", rates) if not number else ("", "", "")
            width = f"{min(one['mean_width']):.3f} to {max(one['mean_width']):.3f}"
            wrong = f"{100 * one['chosen_above_the_level']:.1f} %"
            cells = (*first, f"{one['budget']:,}", one["most_missed"], f"{100 * one['chosen']:.0f} %", wrong, width)
            lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", "| data | rule to find | its rate | separate samples | judgements | share |", "| --- " * 6 + "|"]
    for world in found["worlds"]:
        if (one := world["cost"]) is not None:
            cells = (
                world["name"],
                f"`{one['target']}`",
                f"{100 * one['target_rate']:.2g} %",
                f"{one['separate_samples']:,}",
                f"{one['judgements_at_80_percent']:,.0f}",
                f"{one['share']:.2f}",
            )
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| rules | 1 | 2 | 4 | 6 |", "| --- " * 5 + "|"]
    shares = [f"{100 * one['chosen']:.0f} %" for one in found["single"]]
    lines.append(f"| chosen | {' | '.join(shares)} |")
    lines += [
        "",
        "| data | flips | budget | least coverage | chosen | above the level | confirmations |",
        "| --- " * 7 + "|",
    ]
    for one in found["erring"]:
        shares = (f"{100 * one[name]:.1f} %" for name in ("least_coverage", "chosen", "chosen_above_the_level"))
        cells = (
            one["world"],
            f"{100 * one['flips']:.0f} %",
            str(one["budget"]),
            *shares,
            f"{one['confirmations']:.0f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n" + weaker_table(found["weaker"])


def weaker_table(cases: list[dict[str, Any]]) -> str:
    """As docs/explanation/judging.md has it."""
    lines = [
        "",
        "| data | mined pairs checked | budget | least coverage | chosen | above the level | pairs for people |",
    ]
    lines.append("| --- " * 7 + "|")
    for one in cases:
        shares = (f"{100 * one[name]:.1f} %" for name in ("least_coverage", "chosen", "chosen_above_the_level"))
        cells = (one["world"], str(one["num_mined"]), str(one["budget"]), *shares, f"{one['confirmations']:.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def weaker(worlds: Sequence[World], times: int) -> list[dict[str, Any]]:
    """A judge that finds .9 of known positives and .6 of the false negatives among mined pairs."""
    found = []
    for world in worlds:
        for num_mined in (0, 100, 200):
            found.append({"world": world.name, **erring(world, 0.1, 1500, times, 0.6, num_mined)})
            print(found[-1], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=default_root())
    parser.add_argument("--times", type=int, default=500)
    parser.add_argument("--out", type=Path, default=Path("experiments/judge_simulation.json"))
    parser.add_argument("--only-weaker", action="store_true", help="simulate only the last table again")
    options = parser.parse_args()
    warnings.simplefilter("ignore", HardnegWarning)
    torch.set_num_threads(1)
    begun, times = time.process_time(), options.times
    if options.only_weaker:
        two = [synthetic("at the level", AT_THE_LEVEL, 0.05), of_texts(read_nfcorpus(options.data / "nfcorpus"), 0.05)]
        found = json.loads(options.out.read_text())
        found |= {"weaker": weaker(two, times), "weaker_from": {"commit": environment()["commit"]}}
        found["weaker_from"]["cpu_seconds"] = round(time.process_time() - begun)
        options.out.write_text(json.dumps(found, indent=1) + "\n")
        print(weaker_table(found["weaker"]))
        return
    worlds = [
        synthetic("synthetic", RATES, 0.05),
        synthetic("at the level", AT_THE_LEVEL, 0.05),
        of_texts(read_nfcorpus(options.data / "nfcorpus"), 0.05),
        of_texts(read_scifact(options.data / "scifact"), 0.01),
        of_digits(0.1),
    ]
    found = {"times": times, "worlds": [], "single": [], "erring": []}
    for world in worlds:
        rates = [count / size for count, size in zip(world.counts(), world.sizes(), strict=True)]
        facts: dict[str, Any] = {
            "name": world.name,
            "level": world.level,
            "rules": [one.name for one in world.populations],
            "sizes": world.sizes(),
            "rates": rates,
            "budgets": [coverage(world, budget, times) for budget in BUDGETS],
            "cost": cost(world, times) if min(rates) <= 0.6 * world.level else None,
        }
        found["worlds"].append(facts)
        print(json.dumps(facts), flush=True)
    for rules in (1, 2, 4, 6):
        found["single"].append(single(0.01, 200, rules, times))
        print(found["single"][-1], flush=True)
    for world in (worlds[0], worlds[2]):
        for flips in (0.1, 0.2):
            for budget in (300, 600):
                found["erring"].append({"world": world.name, **erring(world, flips, budget, times)})
                print(found["erring"][-1], flush=True)
    found["weaker"] = weaker(worlds[1:3], times)
    found |= {"cpu_seconds": round(time.process_time() - begun), **environment()}
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(tables(found))


if __name__ == "__main__":
    main()
