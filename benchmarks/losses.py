"""Time and memory of contrastive losses, forward and backward, on one GPU, from 512 rows to 262,144.

    python benchmarks/losses.py                        # the grid of rows and dimensions, all losses
    python benchmarks/losses.py --targets              # the sizes of the targets, ours only
    python benchmarks/losses.py --small                # 512 to 4,096 rows, in turn with plain eager NT-Xent
    python benchmarks/losses.py --rows 64 --dims 16 --device cpu --dtype float32      # a small try anywhere

Two views that are not normalised, temperature 0.5; ours are ``ContrastiveLoss`` as it is called in training. A time is
the median of several rounds of steps that are not waited for one by one. "products" is the work that no method avoids:
three rows x rows x dim products at the rate of an 8192^3 product measured in the same run. Extra memory is the peak of
a step above what was held before it. A loss that is not installed, or has no room, is in the file with its reason.
``linear_cross_entropy`` has no masks: it is the cross-view loss, a quarter of the pairs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import hardneg as hn
from hardneg.core.errors import ArgumentError
from hardneg.io.provenance import environment
from hardneg.state import metropolis as chain
from hardneg.state import triton_chains
from hardneg.state.chain import Chain

ROOT = Path(__file__).resolve().parent.parent
TEMPERATURE = 0.5
Loss = Callable[[Tensor, Tensor], Tensor]  # two views [b, d] -> scalar


class Unavailable(Exception):
    """Why a loss cannot be measured here."""


def both(z1: Tensor, z2: Tensor) -> Tensor:
    return F.normalize(torch.cat([z1, z2]), dim=-1)


def ours(negatives: str, tau_plus: float = 0.0, with_ids: bool = True, **options: Any) -> Loss:
    loss = hn.ContrastiveLoss(
        negatives, **({"temperature": TEMPERATURE, "impl": "streamed"} | options), tau_plus=tau_plus
    )
    ids: list[Tensor] = []

    def call(z1: Tensor, z2: Tensor) -> Tensor:
        if not ids:
            ids.append(torch.arange(len(z1), device=z1.device))
        value: Tensor = loss(z1, z2, ids=ids[0] if with_ids else None)
        return value

    call.loss = loss  # type: ignore[attr-defined]
    return call


def labelled(loss: hn.ContrastiveLoss, classes: int) -> Loss:
    """SupCon or H-SCL."""
    loss.impl, loss.view_options = "streamed", type(loss.view_options)("two", "label", normalize=True)
    tags: list[Tensor] = []

    def call(z1: Tensor, z2: Tensor) -> Tensor:
        if not tags:
            tags.append(torch.arange(len(z1), device=z1.device) * 7919 % classes)
        value: Tensor = loss(z1, z2, labels=tags[0])
        return value

    call.loss = loss  # type: ignore[attr-defined]
    return call


def against_queue(negatives: str, size: int) -> Loss:
    """The first view against a queue, which gets no gradient; the second is its positive."""
    loss = hn.ContrastiveLoss(negatives, TEMPERATURE, views="pool", impl="streamed")
    queue: list[Tensor] = []

    def call(z1: Tensor, z2: Tensor) -> Tensor:
        if not queue:
            queue.append(make_vectors(size, z1.shape[1], z1.dtype, z1.device))
        value: Tensor = loss(z1, z2, pool=queue[0])
        return value

    call.loss = loss  # type: ignore[attr-defined]
    return call


def plain(z1: Tensor, z2: Tensor) -> Tensor:
    """NT-Xent in three lines of torch."""
    z = both(z1, z2)
    logits = (z @ z.T / TEMPERATURE).fill_diagonal_(float("-inf"))
    return F.cross_entropy(logits.float(), torch.arange(len(z), device=z.device).roll(len(z) // 2))


def metric_learning() -> Loss:
    if find_spec("pytorch_metric_learning") is None:
        raise Unavailable("pytorch-metric-learning is not installed")
    from pytorch_metric_learning.losses import NTXentLoss

    peer = NTXentLoss(TEMPERATURE)
    return lambda z1, z2: peer(both(z1, z2).float(), torch.arange(len(z1), device=z1.device).repeat(2))


def linear_cross_entropy() -> Loss:
    if not hasattr(F, "linear_cross_entropy"):
        raise Unavailable(f"torch {torch.__version__} has no linear_cross_entropy")

    def loss(z1: Tensor, z2: Tensor) -> Tensor:
        z1, z2 = both(z1, z2).chunk(2)
        target = torch.arange(len(z1), device=z1.device)
        found: Tensor = F.linear_cross_entropy(z1, z2 / TEMPERATURE, target)
        return found

    return loss


def flex() -> Loss:
    """NT-Xent as the log-sum-exp of flex_attention over other instances."""
    if not torch.cuda.is_available():
        raise Unavailable("flex_attention is measured on a GPU only")
    from torch.nn.attention.flex_attention import flex_attention

    attention = torch.compile(flex_attention)

    def loss(z1: Tensor, z2: Tensor) -> Tensor:
        z, half = both(z1, z2), len(z1)

        def other(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
            return torch.where(row % half == column % half, -float("inf"), score)

        x = z[None, None]
        _, log_sum = attention(x, x, x, score_mod=other, scale=1.0 / TEMPERATURE, return_lse=True)
        positives = (z * z.roll(half, 0)).sum(-1, dtype=torch.float32) / TEMPERATURE
        return F.softplus(log_sum.flatten() - positives).mean()

    return loss


def compiled() -> Loss:
    torch._dynamo.reset()  # every size is compiled for itself, and none is one recompilation too many
    return torch.compile(plain)


PEERS: dict[str, Callable[[], Loss]] = {
    "plain eager": lambda: plain,
    "plain compiled": compiled,
    "hardneg dense, HCL": lambda: ours("Tilt(1.0)", 0.1, impl="dense"),
    "pytorch-metric-learning": metric_learning,
    "linear_cross_entropy, cross views": linear_cross_entropy,
    "flex_attention": flex,
    "ours, uniform": lambda: ours("Uniform()"),
    "ours, HCL": lambda: ours("Tilt(1.0)", 0.1),
}
DENSE = ("plain eager", "plain compiled", "hardneg dense, HCL")
LARGE = ((65536, 128), (262144, 128))
OURS: dict[str, tuple[Callable[[], Loss], tuple[tuple[int, int], ...]]] = {
    "HCL": (lambda: ours("Tilt(1.0)", 0.1), (*LARGE, (32768, 256), (32768, 512), (65536, 64))),
    "HCL, unit vectors as given": (lambda: ours("Tilt(1.0)", 0.1, normalize=False), ((65536, 128),)),
    "any beta": (lambda: ours("Tilt(0.7)"), LARGE),
    "detached": (lambda: ours("Tilt(0.7, detach=True)"), ((65536, 128),)),
    "uniform": (lambda: ours("Uniform()"), (*LARGE, (32768, 256))),
    "HCL, running maximum": (lambda: ours("Tilt(1.0)", temperature=0.02), ((65536, 128),)),
    "HCL, threshold": (lambda: ours("Threshold(-0.1) * Tilt(1.0)"), ((65536, 128),)),
    "HCL, below the positive": (lambda: ours("BelowPositive(0.05) * Tilt(1.0)"), ((65536, 128),)),
    "SupCon, 10 labels": (lambda: labelled(hn.papers.supcon(0.1), 10), ((65536, 128),)),
    "SupCon, 1000 labels": (lambda: labelled(hn.papers.supcon(0.1), 1000), ((65536, 128),)),
    "H-SCL, 10 labels": (lambda: labelled(hn.papers.hscl(TEMPERATURE), 10), ((65536, 128),)),
    "H-SCL, 1000 labels": (lambda: labelled(hn.papers.hscl(TEMPERATURE), 1000), ((65536, 128),)),
    "queue of 65,536, tilt": (lambda: against_queue("Tilt(1.0)", 65536), ((8192, 128), (16384, 128))),
    "queue of 65,536, ring": (lambda: against_queue("Ring(0.1, outer=0.5)", 65536), ((8192, 128),)),
    "queue of 65,536, approximate ring": (
        lambda: against_queue("Ring(0.1, outer=0.5, approximate=True)", 65536),
        ((8192, 128),),
    ),
}


SMALL = (512, 2048, 4096)
SIDE_BY_SIDE: dict[str, Callable[[], Loss]] = {
    "plain eager": lambda: plain,
    "dense": lambda: ours("Tilt(1.0)", impl="dense", with_ids=False),
    "dense, ids": lambda: ours("Tilt(1.0)", impl="dense"),
    "dense, HCL": lambda: ours("Tilt(1.0)", 0.1, impl="dense", with_ids=False),
    "auto": lambda: ours("Tilt(1.0)", impl="auto", with_ids=False),
    "streamed": lambda: ours("Tilt(1.0)", with_ids=False),
    "streamed, ids": lambda: ours("Tilt(1.0)"),
    "streamed, HCL": lambda: ours("Tilt(1.0)", 0.1, with_ids=False),
}


def make_vectors(rows: int, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Rows of norm about 1 and, in half precision, not of norm 1."""
    noise = torch.randn(rows, dim, generator=torch.Generator(device).manual_seed(rows + dim), device=device)
    return F.normalize(noise, dim=-1).to(dtype)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(call: Callable[[], Any], device: torch.device, budget: float = 300.0) -> float:
    """The median time of a call, of rounds of calls that follow each other without waiting."""
    call(), wait(device)
    begin = perf_counter()
    call(), wait(device)
    calls = max(1, min(20, int(budget / 5 / (1e3 * (perf_counter() - begin)))))
    times = []
    for _ in range(7):
        begin = perf_counter()
        for _ in range(calls):
            call()
        wait(device)
        times.append(1e3 * (perf_counter() - begin) / calls)
    return median(times)


def measure(loss: Loss, views: tuple[Tensor, Tensor]) -> dict[str, Any]:
    for _ in range(8):  # past the calls at which a loss looks at its negatives and waits: 1, 2, 4, 8, 16, 32
        step(loss, views)
    found: dict[str, Any] = {"milliseconds": milliseconds(lambda: step(loss, views), views[0].device)}
    with torch.no_grad():
        found["forward_milliseconds"] = milliseconds(lambda: loss(*views), views[0].device)
    if views[0].is_cuda:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(loss, views)
        found["extra_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    if hasattr(loss, "loss"):
        found["path"] = str(loss.loss.path)
    return found


def step(loss: Loss, views: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss(*views), views, allow_unused=True)


def tried(make: Callable[[], Loss], views: tuple[Tensor, Tensor]) -> dict[str, Any]:
    try:
        return measure(make(), views)
    except Unavailable as reason:
        return {"skipped": str(reason)}
    except ArgumentError as refused:
        return {"skipped": refused.got}
    except torch.OutOfMemoryError:
        return {"skipped": "out of memory"}
    except Exception as error:  # a peer that fails at one size must not end the others
        return {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
    finally:
        if views[0].is_cuda:
            torch.cuda.empty_cache()


def side_by_side(
    options: argparse.Namespace, dim: int = 128, rounds: int = 40, calls: int = 20
) -> list[dict[str, Any]]:
    """Small batches, which the host bounds: rounds of all losses in turn, since the host drifts."""
    device, dtype, found = torch.device(options.device), getattr(torch, options.dtype), []
    for rows in options.small_rows:
        views = tuple(each.clone().requires_grad_() for each in make_vectors(rows, dim, dtype, device).chunk(2))
        losses, times = {name: make() for name, make in SIDE_BY_SIDE.items()}, {name: [] for name in SIDE_BY_SIDE}
        for loss in losses.values():
            for _ in range(70):  # past most calls at which a loss looks at its negatives: 1, 2, 4, 8 ... 64
                step(loss, views)
        for _ in range(rounds):
            for name, loss in losses.items():
                wait(device)
                begin = perf_counter()
                for _ in range(calls):
                    step(loss, views)
                wait(device)
                times[name].append(1e3 * (perf_counter() - begin) / calls)
        for name, ours in times.items():
            ratios = sorted(mine / plain for mine, plain in zip(ours, times["plain eager"], strict=True))
            found.append({
                "loss": name, "rows": rows, "dim": dim, "milliseconds": median(ours), "of_plain": median(ratios),
                "of_plain_quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]],
            })  # fmt: skip
            print(json.dumps(found[-1]), flush=True)
    return found


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating point operations a millisecond of a large product."""
    size = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2.0 * size**3 / milliseconds(lambda: a @ b, device)


def measure_chain(device: torch.device) -> dict[str, Any]:
    """EMC2: 512 chains of 510 proposals."""
    scores = torch.randn(512, 510, device=device)
    proposals = torch.randint(0, 510, (512, 510), device=device)
    parts = scores, proposals[:, 0].contiguous(), proposals, torch.rand(512, 510, device=device).log()
    found = {"loop_milliseconds": milliseconds(lambda: chain.metropolis_hastings(*parts, 255), device)}
    if triton_chains.why_unsupported(scores) is None:
        found["kernel_milliseconds"] = milliseconds(lambda: triton_chains.metropolis_hastings(*parts, 255), device)
        pairs = zip(chain.metropolis_hastings(*parts, 255), triton_chains.metropolis_hastings(*parts, 255), strict=True)
        found["same_visits"] = all(torch.equal(one, other) for one, other in pairs)
    found["walk_milliseconds"] = milliseconds(walk_of(device), device)
    return found


def walk_of(device: torch.device) -> Callable[[], Any]:
    """``Chain.walk`` of 256 instances in two views: proposals, uniform numbers and what is stored included."""
    rows, walking = torch.arange(256, device=device), Chain(1000, num_views=2).to(device)
    scores = hn.two_views(*make_vectors(512, 128, torch.float32, device).chunk(2), 0.1, rows)
    slots = torch.cat([walking.slots(rows, view) for view in range(2)])
    return lambda: walking.walk(scores, slots, num_steps=510)


def jobs(options: argparse.Namespace) -> list[tuple[str, Callable[[], Loss], int, int]]:
    if options.small:
        return []
    if options.targets:
        every = [(name, make, rows, dim) for name, (make, sizes) in OURS.items() for rows, dim in sizes]
    else:
        every = [
            (name, make, rows, dim) for dim in options.dims for rows in options.rows for name, make in PEERS.items()
        ]
    return [one for one in every if not options.only or one[0] in options.only]


def run(options: argparse.Namespace) -> dict[str, Any]:
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    rate = product_rate(device, dtype)
    results: dict[str, Any] = {"product_teraflops": rate / 1e9, "losses": []}
    for name, make, rows, dim in jobs(options):
        if rows > options.dense_rows and name in DENSE:
            continue
        z1, z2 = (each.clone().requires_grad_() for each in make_vectors(rows, dim, dtype, device).chunk(2))
        found = {"loss": name, "rows": rows, "dim": dim} | tried(make, (z1, z2))
        if "milliseconds" in found and "queue" not in name:
            found["products_milliseconds"] = 3 * 2.0 * rows**2 * dim / rate
            found["ratio"] = found["milliseconds"] / found["products_milliseconds"]
        results["losses"].append(found)
        print(json.dumps(found), flush=True)
        options.out.write_text(json.dumps(results | provenance(options), indent=1) + "\n")
    if options.targets or options.small:
        results["small"] = side_by_side(options)
    results["chain"] = measure_chain(device)
    print(json.dumps({name: value for name, value in results.items() if name not in ("losses", "small")}), flush=True)
    return results


def provenance(options: argparse.Namespace) -> dict[str, Any]:
    plain_options = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    return {"options": plain_options, "environment": environment()}


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[512, 2048, 8192, 32768, 65536, 262144])
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--dense-rows", type=int, default=65536, help="no whole matrix above so many rows")
    parser.add_argument("--targets", action="store_true", help="the sizes of the targets, ours only")
    parser.add_argument("--small", action="store_true", help="small batches only, side by side with plain eager")
    parser.add_argument("--small-rows", type=int, nargs="+", default=SMALL)
    parser.add_argument("--only", nargs="+", default=[], metavar="LOSS", help="of these losses only")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "losses.json")
    return parser.parse_args()


def main() -> None:
    options = read_options()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    results = run(options)
    options.out.write_text(json.dumps(results | provenance(options), indent=1) + "\n")


if __name__ == "__main__":
    main()
