"""Time and memory of contrastive losses, forward and backward, on one GPU, from 512 rows to 262,144.

    python benchmarks/losses.py                        # the grid of rows and dimensions, all losses
    python benchmarks/losses.py --targets              # the sizes of the kernels' targets, ours only
    python benchmarks/losses.py --rows 64 --dims 16 --device cpu --dtype float32      # a small try anywhere

Two views of unit vectors, temperature 0.5. A time is the median of several rounds of steps that are not waited for one
by one. "products" is the work that no method avoids: three rows x rows x dim products at the rate of an 8192^3 product
measured in the same run. Extra memory is the peak of a step above what was held before it. A loss that is not
installed, or has no room, is in the file with its reason. ``linear_cross_entropy`` has no masks: it is the cross-view
loss, a quarter of the pairs.
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
from hardneg.core.objectives import debiased
from hardneg.io.provenance import environment
from hardneg.kernels import chain, triton_chain
from hardneg.kernels.triton import row_statistics, two_view_losses
from hardneg.kernels.triton_labels import pair_losses, positive_statistics

ROOT = Path(__file__).resolve().parent.parent
TEMPERATURE = 0.5
Loss = Callable[[Tensor], Tensor]  # both views [2b, d], row i + b the other view of row i -> scalar


class Unavailable(Exception):
    """Why a loss cannot be measured here."""


def positives(z: Tensor) -> Tensor:
    return (z * z.roll(len(z) // 2, 0)).sum(-1, dtype=torch.float32) / TEMPERATURE


def ids_of(z: Tensor) -> Tensor:
    return torch.arange(len(z) // 2, device=z.device).repeat(2)


def labels_of(z: Tensor, classes: int) -> Tensor:
    return (torch.arange(len(z) // 2, device=z.device) * 7919 % classes).repeat(2)


def streamed(**options: Any) -> Loss:
    """InfoNCE of two views in the Triton kernels, with masks by id."""
    return lambda z: two_view_losses(z, **({"temperature": TEMPERATURE} | options)).losses.mean()


def composed(tau_plus: float = 0.0, **options: Any) -> Loss:
    """The same from the row statistics and operations on vectors of a number per row."""

    def loss(z: Tensor) -> Tensor:
        positive = positives(z)
        log_mean, _, support = row_statistics(z, temperature=TEMPERATURE, anchor_ids=ids_of(z), **options)
        if tau_plus:
            log_mean = debiased(log_mean[:, None], positive[:, None], tau_plus, TEMPERATURE)[0][:, 0]
        return -F.logsigmoid(positive - log_mean - support.log()).mean()

    return loss


def against_queue(size: int) -> Callable[[Tensor], Loss]:
    def prepare(z: Tensor) -> Loss:
        queue = make_vectors(size, z.shape[1], z.dtype, z.device)
        return lambda z: row_statistics(z, queue, temperature=TEMPERATURE, beta=1.0).log_mean.mean()

    return prepare


def hscl(classes: int) -> Loss:
    def loss(z: Tensor) -> Tensor:
        tags = {"temperature": TEMPERATURE, "anchor_ids": ids_of(z), "anchor_labels": labels_of(z, classes)}
        log_negative = row_statistics(z, beta=1.0, **tags).log_mean + float(torch.tensor(len(z) - 2.0).log())
        total, count = pair_losses(z, log_negative=log_negative, **tags)
        return (total - F.logsigmoid(positives(z) - log_negative)).sum() / (count + 1).sum()

    return loss


def supcon(classes: int) -> Loss:
    def loss(z: Tensor) -> Tensor:
        tags = {"temperature": TEMPERATURE, "anchor_ids": ids_of(z), "anchor_labels": labels_of(z, classes)}
        log_mean, _, support = row_statistics(z, **tags)
        log_sum, total, count = positive_statistics(z, **tags)
        own = positives(z)
        everybody = torch.logaddexp(log_mean + support.log(), torch.logaddexp(log_sum, own))
        return (everybody - (total + own) / (count + 1)).mean()

    return loss


def plain(z: Tensor) -> Tensor:
    """NT-Xent in two lines of torch."""
    logits = (z @ z.T / TEMPERATURE).fill_diagonal_(float("-inf"))
    return F.cross_entropy(logits.float(), torch.arange(len(z), device=z.device).roll(len(z) // 2))


def dense_hcl(z: Tensor) -> Tensor:
    return hn.papers.hcl(TEMPERATURE, tau_plus=0.1, beta=1.0)(*z.chunk(2))


def metric_learning() -> Loss:
    if find_spec("pytorch_metric_learning") is None:
        raise Unavailable("pytorch-metric-learning is not installed")
    from pytorch_metric_learning.losses import NTXentLoss

    peer = NTXentLoss(TEMPERATURE)
    return lambda z: peer(z.float(), ids_of(z))


def linear_cross_entropy() -> Loss:
    if not hasattr(F, "linear_cross_entropy"):
        raise Unavailable(f"torch {torch.__version__} has no linear_cross_entropy")

    def loss(z: Tensor) -> Tensor:
        z1, z2 = z.chunk(2)
        target = torch.arange(len(z1), device=z.device)
        found: Tensor = F.linear_cross_entropy(z1, z2 / TEMPERATURE, target)
        return found

    return loss


def flex() -> Loss:
    """NT-Xent as the log-sum-exp of flex_attention over other instances."""
    if not torch.cuda.is_available():
        raise Unavailable("flex_attention is measured on a GPU only")
    from torch.nn.attention.flex_attention import flex_attention

    attention = torch.compile(flex_attention)

    def loss(z: Tensor) -> Tensor:
        half = len(z) // 2

        def other(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
            return torch.where(row % half == column % half, -float("inf"), score)

        x = z[None, None]
        _, log_sum = attention(x, x, x, score_mod=other, scale=1.0 / TEMPERATURE, return_lse=True)
        return F.softplus(log_sum.flatten() - positives(z)).mean()

    return loss


PEERS: dict[str, Callable[[], Loss]] = {
    "plain eager": lambda: plain,
    "plain compiled": lambda: torch.compile(plain),
    "hardneg dense, HCL": lambda: dense_hcl,
    "pytorch-metric-learning": metric_learning,
    "linear_cross_entropy, cross views": linear_cross_entropy,
    "flex_attention": flex,
    "ours, uniform": streamed,
    "ours, HCL": lambda: streamed(tau_plus=0.1, beta=1.0),
}
OURS: dict[str, tuple[Callable[[], Loss], tuple[tuple[int, int], ...]]] = {
    "HCL": (lambda: streamed(tau_plus=0.1, beta=1.0), ((65536, 128), (262144, 128), (32768, 256), (65536, 64))),
    "HCL, normalised inside": (lambda: streamed(tau_plus=0.1, beta=1.0, normalize=True), ((65536, 128),)),
    "any beta": (lambda: streamed(beta=0.7), ((65536, 128), (262144, 128))),
    "detached": (lambda: streamed(beta=0.7, detach=True), ((65536, 128),)),
    "uniform": (streamed, ((65536, 128), (262144, 128), (32768, 256))),
    "HCL, running maximum": (lambda: streamed(beta=1.0, temperature=0.02), ((65536, 128),)),
    "HCL, from row statistics": (lambda: composed(tau_plus=0.1, beta=1.0), ((65536, 128),)),
    "HCL, band": (lambda: composed(beta=1.0, low=-0.1, high=0.2), ((65536, 128),)),
    "SupCon, 10 labels": (lambda: supcon(10), ((65536, 128),)),
    "SupCon, 1000 labels": (lambda: supcon(1000), ((65536, 128),)),
    "H-SCL, 10 labels": (lambda: hscl(10), ((65536, 128),)),
    "H-SCL, 1000 labels": (lambda: hscl(1000), ((65536, 128),)),
    "small, HCL": (lambda: streamed(tau_plus=0.1, beta=1.0), ((512, 128), (2048, 128), (4096, 128))),
    "small, uniform": (streamed, ((512, 128), (2048, 128), (4096, 128))),
    "small, plain eager": (lambda: plain, ((512, 128), (2048, 128), (4096, 128))),
}


def make_vectors(rows: int, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
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
    calls = max(1, min(10, int(budget / 5 / (1e3 * (perf_counter() - begin)))))
    times = []
    for _ in range(5):
        begin = perf_counter()
        for _ in range(calls):
            call()
        wait(device)
        times.append(1e3 * (perf_counter() - begin) / calls)
    return median(times)


def measure(loss: Loss, z: Tensor) -> dict[str, Any]:
    z.requires_grad_()

    def step() -> Tensor:
        return torch.autograd.grad(loss(z), z)[0]

    found: dict[str, Any] = {"milliseconds": milliseconds(step, z.device)}
    with torch.no_grad():
        found["forward_milliseconds"] = milliseconds(lambda: loss(z), z.device)
    if z.is_cuda:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        found["extra_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    return found


def tried(make: Callable[[], Loss], z: Tensor) -> dict[str, Any]:
    try:
        return measure(make(), z)
    except Unavailable as reason:
        return {"skipped": str(reason)}
    except ArgumentError as refused:
        return {"skipped": refused.got}
    except torch.OutOfMemoryError:
        return {"skipped": "out of memory"}
    except Exception as error:  # a peer that fails at one size must not end the others
        return {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
    finally:
        if z.is_cuda:
            torch.cuda.empty_cache()


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
    if triton_chain.supports(scores) is None:
        found["kernel_milliseconds"] = milliseconds(lambda: triton_chain.walk(*parts, 255), device)
        pairs = zip(chain.metropolis_hastings(*parts, 255), triton_chain.walk(*parts, 255), strict=True)
        found["same_visits"] = all(torch.equal(one, other) for one, other in pairs)
    return found


def jobs(options: argparse.Namespace) -> list[tuple[str, Callable[[], Loss], int, int]]:
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
        if rows > options.dense_rows and name in ("plain eager", "plain compiled", "hardneg dense, HCL"):
            continue
        z = make_vectors(rows, dim, dtype, device)
        found = {"loss": name, "rows": rows, "dim": dim} | tried(make, z)
        if "milliseconds" in found:
            found["products_milliseconds"] = 3 * 2.0 * rows**2 * dim / rate
            found["ratio"] = found["milliseconds"] / found["products_milliseconds"]
        results["losses"].append(found)
        print(json.dumps(found), flush=True)
        options.out.write_text(json.dumps(results | provenance(options), indent=1) + "\n")
    queue = make_vectors(8192, 128, dtype, device)
    if options.targets:
        make = against_queue(65536)
        results["queue of 65,536, 8,192 anchors"] = tried(lambda: make(queue), queue)
    results["chain"] = measure_chain(device)
    print(json.dumps({name: value for name, value in results.items() if name != "losses"}), flush=True)
    return results


def provenance(options: argparse.Namespace) -> dict[str, Any]:
    plain_options = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    return {"options": plain_options, "environment": environment()}


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[512, 2048, 8192, 32768, 65536, 262144])
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--dense-rows", type=int, default=65536, help="no whole matrix above so many rows")
    parser.add_argument("--targets", action="store_true", help="the sizes of the kernels' targets, ours only")
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
