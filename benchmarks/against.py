"""The library beside what people would use instead, on a CPU: losses beside plain torch and other libraries.

    python benchmarks/against.py --out benchmarks/results/against.json
    python benchmarks/against.py --only SupCon --rounds 5

A case has a name, a peer, a goal and sizes. Its function returns what both sides compute for one size: here "ours" and
"theirs", which must give the same numbers. Each size runs in a fresh process, where both sides take turns; a figure is
the median over the rounds of ours / theirs in seconds of the processor, with the quartiles as its spread. A case
without a peer only shows how our time grows with the size. A peer that is not installed is skipped, by its name.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
Work = Callable[[], Any]
"""One call of one side. Both sides of a case return comparable numbers (tensors, arrays or floats), or None."""
Both = Callable[[int], tuple[Work, Work | None]]
LOSS_SIZES = (256, 512, 1024, 2048, 4096)
MIN_SECONDS = 0.1
"""Processor seconds for which a side is repeated in each round."""


class Case(NamedTuple):
    """One comparison.

    Attributes:
        both: Function of the size that returns our work and the peer's (None without a peer).
        peer: What we are compared with.
        goal: Largest ratio ours / theirs that is wanted; None for no goal.
        sizes: The sizes, in ``unit``.
        unit: What a size counts.
        needs: Modules of the peer; without them, the case is skipped.
        growth: Largest exponent of our time in the size that the work needs; None for no limit.
    """

    both: Both
    peer: str
    goal: float | None
    sizes: tuple[int, ...]
    unit: str
    needs: tuple[str, ...]
    growth: float | None


CASES: dict[str, Case] = {}


def case(
    name: str,
    peer: str = "",
    goal: float | None = None,
    sizes: tuple[int, ...] = LOSS_SIZES,
    unit: str = "rows",
    needs: tuple[str, ...] = (),
    growth: float | None = None,
) -> Callable[[Both], Both]:
    """Register a case; the arguments are the fields of ``Case``."""

    def register(both: Both) -> Both:
        CASES[name] = Case(both, peer, goal, sizes, unit, needs, growth)
        return both

    return register


# Losses: forward and backward, 128 features, float32.

TEMPERATURE, DIM, LABELS, QUEUE = 0.2, 128, 10, 65536


def steps(ours: Callable[..., Any], theirs: Callable[..., Any], *views: Any) -> tuple[Work, Work]:
    """Return a step of both losses, which returns the value and the gradient."""
    import torch

    def step(loss: Callable[..., Any]) -> Work:
        def work() -> Any:
            value = loss(*views)
            return value.detach(), *torch.autograd.grad(value, [view for view in views if view.requires_grad])

        return work

    for _ in range(8):  # past most of the calls that look for warnings, which happens at powers of two
        step(ours)()
    return step(ours), step(theirs)


def two_views(rows: int, gradient: bool = True) -> tuple[Any, Any, Any]:
    """Return two views of ``rows / 2`` instances with their labels."""
    import torch

    random = torch.Generator().manual_seed(0)
    batch = rows // 2
    z1, z2 = (torch.randn(batch, DIM, generator=random).requires_grad_(gradient) for _ in range(2))
    return z1, z2, torch.randint(0, LABELS, (batch,), generator=random)


def unit_views(*views: Any) -> Any:
    """Return all views below each other, normalised."""
    import torch

    return torch.nn.functional.normalize(torch.cat(views), dim=-1)


def scores_of(*views: Any) -> tuple[Any, Any, Any]:
    """Return scores, scores of the positives [n, 1], and the mask of the anchor's own instance, for two views."""
    import torch

    z = unit_views(*views)
    s, n = z @ z.T / TEMPERATURE, len(z)
    other = torch.arange(n).roll(n // 2)
    own = torch.eye(n, dtype=torch.bool)
    return s, s.gather(1, other[:, None]), own | own[other]


def plain_nt_xent(*views: Any) -> Any:
    """NT-Xent in three lines of torch."""
    import torch

    z = unit_views(*views)
    logits = (z @ z.T / TEMPERATURE).fill_diagonal_(-math.inf)
    return torch.nn.functional.cross_entropy(logits, torch.arange(len(z)).roll(len(z) // 2))


@case("NT-Xent", "plain NT-Xent in torch", goal=1.1, growth=2.0)
def nt_xent(rows: int) -> tuple[Work, Work]:
    import hardneg as hn

    return steps(hn.ContrastiveLoss(temperature=TEMPERATURE), plain_nt_xent, *two_views(rows)[:2])


@case("NT-Xent with ids", "plain NT-Xent in torch", goal=1.3, growth=2.0)
def nt_xent_with_ids(rows: int) -> tuple[Work, Work]:
    import torch

    import hardneg as hn

    loss, ids = hn.ContrastiveLoss(temperature=TEMPERATURE), torch.arange(rows // 2)
    return steps(lambda *views: loss(*views, ids=ids), plain_nt_xent, *two_views(rows)[:2])


def our_supcon(labels: Any) -> Callable[..., Any]:
    """Return our SupCon of two views with these labels."""
    import hardneg as hn

    loss = hn.ContrastiveLoss("OtherLabel()", TEMPERATURE, positives="label", positives_in_denominator="all")
    return lambda *views: loss(*views, labels=labels)


@case("SupCon", "plain SupCon in torch", goal=0.5, growth=2.0)
def supcon(rows: int) -> tuple[Work, Work]:
    import torch

    z1, z2, labels = two_views(rows)

    def plain(*views: Any) -> Any:
        z, tags = unit_views(*views), labels.repeat(2)
        logits = z @ z.T / TEMPERATURE
        logits = logits - logits.amax(1, keepdim=True).detach()
        others = ~torch.eye(len(z), dtype=torch.bool)
        positive = (tags[:, None] == tags) & others
        log_prob = logits - (logits.exp() * others).sum(1, keepdim=True).log()
        return -((log_prob * positive).sum(1) / positive.sum(1)).mean()

    return steps(our_supcon(labels), plain, z1, z2)


@case("SupCon beside PML", "SupConLoss of pytorch-metric-learning", goal=0.5, needs=("pytorch_metric_learning",))
def supcon_of_pml(rows: int) -> tuple[Work, Work]:
    import torch
    from pytorch_metric_learning.losses import SupConLoss

    theirs, (z1, z2, labels) = SupConLoss(temperature=TEMPERATURE), two_views(rows)
    return steps(our_supcon(labels), lambda *views: theirs(torch.cat(views), labels.repeat(2)), z1, z2)


@case("H-SCL", "plain H-SCL in torch", goal=0.5, growth=2.0)
def hscl(rows: int) -> tuple[Work, Work]:
    import torch

    import hardneg as hn

    options: dict[str, Any] = {"positives": "label", "num_negatives": "candidates", "reduction": "pairs"}
    loss = hn.ContrastiveLoss("OtherLabel() * Tilt(1.0)", TEMPERATURE, **options)
    z1, z2, labels = two_views(rows)

    def plain(*views: Any) -> Any:
        z, tags = unit_views(*views), labels.repeat(2)
        s, same = z @ z.T / TEMPERATURE, tags[:, None] == tags
        e = s.exp()
        w = e.masked_fill(same, 0.0)
        negative = (len(z) - 2) * (w * e).sum(1, keepdim=True) / w.sum(1, keepdim=True)
        positive = same & ~torch.eye(len(z), dtype=torch.bool)
        return ((e + negative).log() - s)[positive].mean()

    return steps(lambda *views: loss(*views, labels=labels), plain, z1, z2)


@case("Ring", "plain ring with topk in torch", goal=0.7, growth=2.0)
def ring(rows: int) -> tuple[Work, Work]:
    import torch

    import hardneg as hn

    loss = hn.ContrastiveLoss("Ring(0.1, 0.5)", TEMPERATURE)

    def plain(*views: Any) -> Any:
        s, positive, own = scores_of(*views)
        count = len(s) - 2
        closest = s.masked_fill(own, -math.inf).topk(int(0.5 * count), dim=1).values
        negative = closest[:, int(0.1 * count) :].logsumexp(1, keepdim=True)
        return torch.nn.functional.softplus(negative - positive).mean()

    return steps(loss, plain, *two_views(rows)[:2])


@case("Threshold", "plain masked loss in torch", goal=0.8, growth=2.0)
def threshold(rows: int) -> tuple[Work, Work]:
    import torch

    import hardneg as hn

    loss = hn.ContrastiveLoss("Threshold(0.02)", TEMPERATURE)

    def plain(*views: Any) -> Any:
        s, positive, own = scores_of(*views)
        negative = s.masked_fill(own | (s * TEMPERATURE < 0.02), -math.inf).logsumexp(1, keepdim=True)
        return torch.nn.functional.softplus(negative - positive).mean()

    return steps(loss, plain, *two_views(rows)[:2])


@case("MoCo with a queue of 65,536", "plain MoCo in torch", 0.55, (64, 128, 256, 512, 1024), "anchors", growth=1.0)
def moco(anchors: int) -> tuple[Work, Work]:
    import torch
    from torch.nn.functional import cross_entropy, normalize

    import hardneg as hn

    loss = hn.ContrastiveLoss(temperature=TEMPERATURE, views="pool", detach_keys=True)
    z1, z2, _ = two_views(2 * anchors)
    keys = z2.detach()
    queue = normalize(torch.randn(QUEUE, DIM, generator=torch.Generator().manual_seed(1)), dim=-1)

    def plain(z: Any) -> Any:
        q, k = normalize(z, dim=-1), normalize(keys, dim=-1)
        logits = torch.cat([(q * k).sum(-1, keepdim=True), q @ queue.T], dim=1) / TEMPERATURE
        return cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))

    return steps(lambda z: loss(z, keys, pool=queue), plain, z1)


@case("cross views", "chunked linear_cross_entropy of torch", goal=1.1, growth=2.0)
def cross(rows: int) -> tuple[Work, Work]:
    import torch
    from torch.nn.functional import linear_cross_entropy, normalize

    import hardneg as hn

    loss = hn.ContrastiveLoss(temperature=TEMPERATURE, views="cross")
    chunks = torch.nn.LinearCrossEntropyOptions()

    def theirs(z1: Any, z2: Any) -> Any:
        target = torch.arange(len(z1))
        return linear_cross_entropy(normalize(z1, dim=-1) / TEMPERATURE, normalize(z2, dim=-1), target, options=chunks)

    return steps(loss, theirs, *two_views(2 * rows)[:2])


# The measurement.


def differs(ours: Any, theirs: Any) -> float:
    """Return the largest difference of two results, relative to the largest number in each of their parts."""
    import torch

    if isinstance(ours, tuple):
        return max(differs(*parts) for parts in zip(ours, theirs, strict=True))
    one, other = (torch.as_tensor(each).double() for each in (ours, theirs))
    return float((one - other).abs().max() / other.abs().max())


def seconds_of(work: Work) -> float:
    """Return the processor seconds of a call, from calls of at least ``MIN_SECONDS``."""
    begun, calls = time.process_time(), 0
    while calls == 0 or time.process_time() - begun < MIN_SECONDS:
        work()
        calls += 1
    return (time.process_time() - begun) / calls


def measure(name: str, size: int, rounds: int, threads: int) -> dict[str, Any]:
    """Measure one size of a case in this process: both sides in turn, and in the other order in every second round."""
    import torch

    torch.set_num_threads(threads)
    ours, theirs = CASES[name].both(size)
    results = [work() for work in (ours, theirs) if work is not None]
    found: dict[str, list[float]] = {"ours": [], "theirs": []}
    for i in range(rounds + 1):  # the first is not counted
        sides = [("ours", ours)] if theirs is None else [("ours", ours), ("theirs", theirs)]
        for side, work in sides if i % 2 else sides[::-1]:
            found[side].append(seconds_of(work))
    figure: dict[str, Any] = {"ours_s": statistics.median(found["ours"][1:]), "rounds": rounds}
    if theirs is not None:
        ratios = [one / other for one, other in zip(found["ours"][1:], found["theirs"][1:], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if rounds > 1 else ratios * 3
        spread = {"ratio": middle, "quartiles": [low, high]}
        figure |= {"theirs_s": statistics.median(found["theirs"][1:]), **spread}
    if len(results) == 2 and all(each is not None for each in results):
        figure["difference"] = differs(*results)
    return figure


def exponent(sizes: list[int], seconds: list[float]) -> float:
    """Return the slope of log seconds by log size, by least squares."""
    x, y = [math.log(size) for size in sizes], [math.log(each) for each in seconds]
    slope: float = statistics.linear_regression(x, y).slope
    return slope


def missing(needs: tuple[str, ...]) -> list[str]:
    """Return the modules that are not installed."""
    return [name for name in needs if importlib.util.find_spec(name) is None]


def measure_case(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure all sizes of a case, each in a fresh process."""
    chosen = CASES[name]
    about = {"peer": chosen.peer, "goal": chosen.goal, "unit": chosen.unit}
    if absent := missing(chosen.needs):
        print(f"{name}: skipped, {', '.join(absent)} is not installed", flush=True)
        return {**about, "skipped": f"{', '.join(absent)} is not installed"}
    sizes = [size for size in chosen.sizes if not options.sizes or size in options.sizes]
    figures: dict[str, Any] = {}
    environment = os.environ | {"OMP_NUM_THREADS": str(options.threads)}
    for size in sizes:
        command = [sys.executable, __file__, "--case", name, "--size", str(size)]
        command += ["--rounds", str(options.rounds), "--threads", str(options.threads)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            sys.exit(f"{name} at {size} failed:\n{done.stderr}")
        figure = figures[str(size)] = json.loads(done.stdout.splitlines()[-1])
        ratio = f"{figure['ratio']:6.2f}x  {figure['quartiles']}" if "ratio" in figure else ""
        print(f"{figure['ours_s'] * 1e3:10.2f} ms  {ratio}  {name} at {size} {chosen.unit}", flush=True)
    found: dict[str, Any] = {**about, "sizes": figures}
    if chosen.goal is not None:
        found["met"] = all(figure["ratio"] <= chosen.goal for figure in figures.values())
    if len(sizes) > 2:
        found["exponent"] = exponent(sizes, [figures[str(size)]["ours_s"] for size in sizes])
        found["needed_exponent"] = chosen.growth
    return found


def main() -> None:
    """Measure the cases and write the figures; those of cases that are not measured now are kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose names contain this text")
    parser.add_argument("--sizes", type=int, nargs="+", help="only these sizes")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON file; figures of cases that are not measured now are kept")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(options.case, options.size, options.rounds, options.threads)))
        return
    from hardneg.io.provenance import environment

    known: dict[str, Any] = {}
    if options.out and options.out.exists():
        known = json.loads(options.out.read_text())["cases"]
    for name in CASES:
        if options.only not in name:
            continue
        facts = environment()
        known[name] = measure_case(name, options) | {"commit": facts["commit"], "threads": options.threads}
        if options.out:
            options.out.write_text(json.dumps({**facts, "cases": known}, indent=1) + "\n")


if __name__ == "__main__":
    main()
