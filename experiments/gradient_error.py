"""How far is the gradient of each method from that of the global loss, by batch size? Bias, variance and cosine.

    python experiments/gradient_error.py --out runs/gradient_error

200 of scikit-learn's digits with two fixed augmentations, embedded by a small network that was trained for some steps
on the loss over all pairs. The embeddings stay fixed: hn.gradient_error measures each method's mean gradient over many
batches against the exact one of hn.global_loss. Leaves in --out: results.json.

MoCo is measured against the cross-view loss: its queries are z1, its keys z2 have no gradient. All other methods are
measured against the two-view loss with the positive in the denominator; among 398 negatives that changes little.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import hardneg as hn
from hardneg import papers
from hardneg.core.types import Keys
from hardneg.io.files import without_nan
from hardneg.state.cache import Cache
from hardneg.theory import GradientError

sys.path.insert(0, str(Path(__file__).parent))
from emc2_global_loss import Encoder, commit, two_augmentations


@dataclass(frozen=True)
class Options:
    out: str = "runs/gradient_error"
    seeds: int = 5
    batch_sizes: str = "4,16,64"
    num_batches: int = 1600  # at a batch size of 4; fewer for larger ones, at least a third
    items: int = 200
    dim: int = 32
    temperature: float = 0.2
    warm_up: int = 10  # passes over the items before the measurement, for chains, normalisers and the queue
    pretraining: int = 100  # steps of Adam on the loss over all pairs
    gamma: float = 0.05  # SogCLR
    refresh: float = 0.1  # share of the negative cache encoded afresh in each step
    only: str = ""  # names of methods, joined by ;


def embeddings(options: Options, seed: int) -> Tensor:
    """Unit vectors [2, items, dim] of a network that has seen the exact loss for some steps."""
    torch.manual_seed(seed)
    encoder, views = Encoder(options.dim), two_augmentations(options.items)
    optimizer = torch.optim.Adam(encoder.parameters(), lr=0.003)
    for _ in range(options.pretraining):
        optimizer.zero_grad()
        hn.global_loss(encoder(views[0]), encoder(views[1]), options.temperature).backward()
        optimizer.step()
    with torch.no_grad():
        return torch.stack([encoder(view) for view in views])


def cached(options: Options, seed: int) -> Callable[..., Tensor]:
    """All items cached, one random view each; one Gumbel draw per anchor, a share of the cache refreshed per step."""
    cache = Cache(options.items, options.dim, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    loss = papers.negative_cache(options.temperature)

    def on_batch(z1: Tensor, z2: Tensor, ids: Tensor, encode: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        def one_view(items: Tensor) -> Tensor:
            return encode(items, torch.randint(2, items.shape, generator=generator))

        if len(cache) == 0:
            everyone = torch.arange(options.items)
            cache.push(Keys(one_view(everyone).detach(), everyone))
        value = loss(torch.cat([z1, z2]), torch.cat([z2, z1]), cache, one_view, torch.cat([ids, ids]))
        cache.refresh(one_view, options.refresh)
        return value

    return on_batch


def methods(options: Options, seed: int) -> dict[str, Callable[[], tuple[Callable[..., Tensor], dict[str, Any]]]]:
    """Name -> function that makes a loss with new state, and its options for gradient_error."""
    items, temperature, dim = options.items, options.temperature, options.dim
    exact: dict[str, Any] = {"encode": True}
    return {
        "SimCLR": lambda: (papers.simclr(temperature), {}),
        "MoCo": lambda: (papers.moco(temperature), {"views": "cross", "pool": hn.Queue(items // 2, dim)}),
        "SogCLR": lambda: (hn.SogCLR(items, temperature, options.gamma, divide_by_temperature=True), {}),
        "negative cache": lambda: (cached(options, seed), exact),
        "EMC2, Algorithm 1": lambda: (hn.EMC2(items, temperature, proposals="data set", seed=seed), exact),
        "EMC2, states re-encoded": lambda: (hn.EMC2(items, temperature, seed=seed), exact),
        "EMC2, bank": lambda: (hn.EMC2(items, temperature, remember=hn.Bank(items, dim), seed=seed), {}),
        "EMC2, states by their last score": lambda: (hn.EMC2(items, temperature, seed=seed), {}),
    }


def measure(options: Options, name: str, batch_size: int, seed: int, vectors: Tensor) -> GradientError:
    loss, extra = methods(options, seed)[name]()
    return hn.gradient_error(
        loss,
        *vectors,
        batch_size=batch_size,
        temperature=options.temperature,
        num_batches=max(options.num_batches // 3, options.num_batches * 4 // batch_size),
        warm_up=options.warm_up * math.ceil(options.items / batch_size),
        seed=seed,
        **extra,
    )


def summarise(runs: list[GradientError]) -> dict[str, float]:
    values = {name: torch.tensor([getattr(run, name) for run in runs]) for name in ("bias", "variance", "cosine")}
    few = min(1, len(runs) - 1)
    return {name: each.mean().item() for name, each in values.items()} | {
        f"{name}_deviation": each.std(correction=few).item() for name, each in values.items()
    }


def show(results: dict[str, dict[str, dict[str, float]]]) -> None:
    table = Table(title="Gradient against that of the global loss, relative to its norm; mean over seeds")
    for name in ("method", "batch", "cosine", "over seeds", "bias", "variance"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for name, by_size in results.items():
        for size, row in by_size.items():
            figures = (f"{row['cosine']:.3f}", f"{row['cosine_deviation']:.3f}", f"{row['bias']:.2f}")
            table.add_row(name, size, *figures, f"{row['variance']:.1f}")
    Console().print(table)


def parse() -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Options):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    return Options(**vars(parser.parse_args()))


def write(path: Path, options: Options, results: dict[str, Any], runs: dict[str, Any]) -> None:
    record: dict[str, Any] = {"options": asdict(options), "results": results, "runs": runs}
    record |= {"cpu_seconds": time.process_time(), "commit": commit(), "torch": torch.__version__}
    record |= {"machine": platform.processor() or platform.machine(), "hardneg": hn.__version__}
    path.write_text(json.dumps(without_nan(record), indent=1))


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    results: dict[str, dict[str, dict[str, float]]] = {}
    runs: dict[str, dict[str, list[dict[str, float]]]] = {}
    vectors = [embeddings(options, seed) for seed in range(options.seeds)]
    for name in [name for name in methods(options, 0) if not options.only or name in options.only.split(";")]:
        results[name], runs[name] = {}, {}
        for size in options.batch_sizes.split(","):
            measured = [measure(options, name, int(size), seed, each) for seed, each in enumerate(vectors)]
            runs[name][size] = [asdict(run) for run in measured]
            results[name][size] = summarise(measured)
            cosine = results[name][size]["cosine"]
            print(f"{name}, batch {size}: {cosine:.3f} ({time.perf_counter() - start:.0f} s)", flush=True)
        write(out / "results.json", options, results, runs)  # after each method: the whole takes an hour
    show(results)
    print(f"Wrote {out}/results.json.")


if __name__ == "__main__":
    main()
