"""Do harder negatives loosen the bound on mutual information, and steady it? Table 5 of Wu et al. 2021.

    python experiments/ring_mutual_information.py --out runs/ring_mutual_information

(X, Y) is Gaussian with correlation 0.2: the information is 0.02041 nats. Two small networks learn from 2,000 pairs to
raise the NCE bound with 100 negatives per anchor, uniform over the data (NCE) or from its closest 100 - w percent
(CNCE), five seeds each; the bound is read off on 2,000 new pairs. Leaves in --out: results.json and a plot.

Other than the paper: Adam at 0.003 for 15 epochs (at its 0.03 the networks die for w >= 25 and the bound is 0 exactly),
negatives encoded afresh, and new pairs for the figures (on the training pairs it can pass the true value). Bounds and
premises are those of hn.mutual_information.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import hardneg as hn
from hardneg.core.types import Keys

try:
    import matplotlib
except ImportError:
    sys.exit("ring_mutual_information.py needs matplotlib, which is not installed: pip install matplotlib")
matplotlib.use("Agg")
import matplotlib.pyplot as plt

RHO = (0.9 - 0.5) / 2.0  # covariance -0.5 + 0.9, variances 1 + 1
TRUE = -0.5 * math.log(1.0 - RHO**2)
PAPER = {0: 0.01345, 10: 0.01241, 25: 0.00220, 50: 7.29e-5, 75: 1.67e-5, 90: 5.87e-6, 95: 1.97e-6}


@dataclass(frozen=True)
class Options:
    out: str = "runs/ring_mutual_information"
    seeds: int = 5
    epochs: int = 15
    points: int = 2000
    batch_size: int = 128
    num_draws: int = 100
    learning_rate: float = 0.003
    dim: int = 10
    passes: int = 5  # over the new pairs, each with other draws, when the bound is read off


class Critic(nn.Module):
    """f(x, y) = u(x) . v(y), each of five layers with ten hidden units."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.u, self.v = (nn.Sequential(*self._layers(dim)) for _ in range(2))

    @staticmethod
    def _layers(dim: int) -> list[nn.Module]:
        hidden = [layer for _ in range(3) for layer in (nn.Linear(dim, dim), nn.ReLU())]
        return [nn.Linear(1, dim), nn.ReLU(), *hidden, nn.Linear(dim, dim)]


def sample(points: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, noise = torch.randn(2, points, 1, generator=generator) * math.sqrt(2.0)
    return x, RHO * x + math.sqrt(1.0 - RHO**2) * noise


def weights(u: Tensor, v: Tensor, ids: Tensor, percent: int) -> hn.core.types.LogWeights:
    """q of each row over everyone: all others, or the closest 100 - percent of them. u is of the rows ids, v of all."""
    negatives: hn.negatives.Negatives = hn.Ring(0.0, 1.0 - percent / 100.0) if percent else hn.Uniform()
    everyone = Keys(v.detach(), torch.arange(len(v)))
    return negatives.log_weights(hn.score(Keys(u.detach(), ids), v[ids].detach(), everyone, temperature=1.0))


def drawn_scores(
    u: Tensor, v: Tensor, ids: Tensor, log_w: Tensor, num_draws: int, generator: torch.Generator
) -> hn.Scores:
    """f(x, y) of each row with its pair and with negatives drawn from q: candidates of each anchor's own, [b, k, d]."""
    return hn.score(u, v[ids], v[hn.draw(log_w, num_draws, generator)], temperature=1.0)


def train(percent: int, seed: int, options: Options) -> dict[str, float]:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    critic = Critic(options.dim)
    optimizer = torch.optim.Adam(critic.parameters(), lr=options.learning_rate)
    x, y = sample(options.points, seed=0)
    for _ in range(options.epochs):
        for ids in torch.randperm(options.points, generator=generator).split(options.batch_size):
            optimizer.zero_grad()
            u, v = critic.u(x[ids]), critic.v(y)
            log_w = weights(u, v, ids, percent)
            scores = drawn_scores(u, v, ids, log_w, options.num_draws, generator)
            (-hn.mutual_information(scores).nce).backward()
            optimizer.step()
    return read_off(critic, percent, options)


@torch.no_grad()
def read_off(critic: Critic, percent: int, options: Options) -> dict[str, float]:
    generator = torch.Generator().manual_seed(10_000)
    values = {}
    for name, seed in (("new", 1), ("trained", 0)):
        x, y = sample(options.points, seed)
        # In float64: where the network is constant, the bound and its deviation are below the rounding of float32.
        u, v, ids = critic.u(x).double(), critic.v(y).double(), torch.arange(options.points)
        log_w = weights(u, v, ids, percent)
        rounds = [drawn_scores(u, v, ids, log_w, options.num_draws, generator) for _ in range(options.passes)]
        values[name] = torch.stack([hn.mutual_information(scores).nce for scores in rounds]).mean().item()
        everyone = hn.score(Keys(u, ids), v, Keys(v, ids), temperature=1.0)
        variance = hn.theory.variance_over_draws(everyone, log_w, options.num_draws, generator, options.passes)
        values[f"{name}_deviation_over_draws"] = variance.mean().sqrt().item()  # Theorem 3.2
    return values


def premise(percent: int, points: int) -> float:
    """Share of the rows for which the premise of Theorem 3.1 holds with the optimal critic and this ring."""
    x, y = (part.double() for part in sample(points, seed=0))
    # The optimal critic f = log p(y | x) / p(y); variances 2, correlation RHO.
    residual = (y.T - RHO * x).square() / (2.0 * (1.0 - RHO**2))
    critic = 0.5 * (y.T.square() / 2.0 - residual) - 0.5 * math.log(1.0 - RHO**2)
    scores = hn.from_matrix(critic, torch.eye(points, dtype=torch.bool))
    ring: hn.negatives.Negatives = hn.Ring(0.0, 1.0 - percent / 100.0) if percent else hn.Uniform()
    return float(hn.mutual_information(scores, ring.log_weights(scores)).premise)


def premises(points: int) -> dict[str, float]:
    return {str(percent): premise(percent, points) for percent in PAPER}


def summarise(runs: list[dict[str, float]]) -> dict[str, float]:
    values = {name: torch.tensor([run[name] for run in runs], dtype=torch.float64) for name in runs[0]}
    spread = {
        f"{name}_deviation_over_seeds": values[name].std(correction=min(1, len(runs) - 1)).item()
        for name in ("new", "trained")
    }
    return {name: value.mean().item() for name, value in values.items()} | spread


def show(results: dict[int, dict[str, float]]) -> None:
    table = Table(title=f"Bound on mutual information in nats; the true value is {TRUE:.5f}")
    for name in ("negatives", "new pairs", "over seeds", "over draws", "trained pairs", "paper"):
        table.add_column(name, justify="left" if name == "negatives" else "right")
    for percent, row in results.items():
        table.add_row(
            "all (NCE)" if not percent else f"closest {100 - percent} % (w = {percent})",
            f"{row['new']:.3g}",
            f"{row['new_deviation_over_seeds']:.1e}",
            f"{row['new_deviation_over_draws']:.1e}",
            f"{row['trained']:.3g}",
            f"{PAPER[percent]:.3g}",
        )
    Console().print(table)


def plot(results: dict[int, dict[str, float]], path: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.0, 4.0), layout="constrained")
    percents = list(results)
    places = range(len(percents))
    left.axhline(TRUE, color="0.4", linewidth=1.0)
    left.annotate("true value", (len(percents) - 1, TRUE), (0, 4), textcoords="offset points", ha="right", color="0.4")
    for name, label, style in (("new", "here, on new pairs", "o-"), ("trained", "here, on the trained pairs", "^:")):
        value = [results[percent][name] for percent in percents]
        spread = [results[percent][f"{name}_deviation_over_seeds"] for percent in percents]
        left.errorbar(places, value, yerr=spread, fmt=style, capsize=3, label=label)
    left.plot(places, [PAPER[percent] for percent in percents], "s--", label="paper, Table 5")
    left.set(ylabel="bound on mutual information (nats)")
    left.set_title("Harder negatives: the bound loosens ...", loc="left")
    left.legend(frameon=False)
    for name, label, style in (
        ("draws", "of a row, over its draws", "o-"),
        ("seeds", "of the bound, over seeds", "D--"),
    ):
        spread = [results[percent][f"new_deviation_over_{name}"] for percent in percents]
        right.plot(places, spread, style, label=label)
    right.set(yscale="log", ylabel="standard deviation (nats)")
    right.set_title("... and steadies", loc="left")
    right.legend(frameon=False)
    for axis in (left, right):
        axis.set_xticks(places, ["NCE" if not percent else str(percent) for percent in percents])
        axis.set_xlabel("w: share of the farthest candidates left out (%)")
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def parse() -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Options):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    return Options(**vars(parser.parse_args()))


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    start, results, runs = time.perf_counter(), {}, {}
    for percent in PAPER:
        runs[percent] = [train(percent, seed, options) for seed in range(options.seeds)]
        results[percent] = summarise(runs[percent])
        print(f"w = {percent}: {results[percent]['new']:.3g} ({time.perf_counter() - start:.0f} s)", flush=True)
    record: dict[str, Any] = {"true": TRUE, "paper": PAPER, "options": asdict(options)}
    record |= {"results": results, "runs": runs, "premise": premises(options.points)}
    record |= {"cpu_seconds": time.process_time(), "commit": commit(), "torch": torch.__version__}
    record |= {"machine": platform.processor() or platform.machine(), "hardneg": hn.__version__}
    (out / "results.json").write_text(json.dumps(record, indent=1))
    plot(results, out / "ring_mutual_information.png")
    show(results)
    print(f"Wrote {out}/results.json and {out}/ring_mutual_information.png.")


if __name__ == "__main__":
    main()
