"""The dense loss beside pytorch-metric-learning's NTXentLoss: time and extra memory of one forward and backward on CPU.

    python benchmarks/dense_loss.py

First checks that the losses and their gradients agree. Then measures each loss in a fresh process, all of them in turn,
several rounds. Time is the processor's, so that other work on the machine does not count; the clock's is in the file
too. Extra memory is the peak of the first full-size step above what the process held before it; ours includes the look
at the negatives that eager ContrastiveLoss takes on its first calls.

pytorch-metric-learning compares each positive pair with each negative pair, 2B x 2B(2B - 2) numbers; hardneg and plain
torch hold 2B x 2B. HCL has no counterpart there: its line says what the tilt and the debiasing cost.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

import hardneg as hn

ROOT = Path(__file__).resolve().parent.parent
OURS, HCL, PLAIN, PML = "hardneg, uniform", "hardneg, HCL", "plain torch", "pytorch-metric-learning"
COMPILED = {"hardneg, uniform, compiled": OURS, "hardneg, HCL, compiled": HCL}

Loss = Callable[[Tensor], Tensor]  # embeddings [2b, d], row i + b the other view of row i -> scalar


def build(name: str, temperature: float) -> Loss:
    if name in (OURS, HCL):
        negatives, tau_plus = ("Uniform()", 0.0) if name == OURS else ("Tilt(1.0)", 0.1)
        loss = hn.ContrastiveLoss(negatives, temperature, tau_plus)
        return lambda embeddings: loss(*embeddings.chunk(2))
    if name in COMPILED:
        return torch.compile(build(COMPILED[name], temperature), fullgraph=True)
    if name == PLAIN:
        return lambda embeddings: plain_nt_xent(embeddings, temperature)
    if name == PML:
        from pytorch_metric_learning.losses import NTXentLoss

        peer = NTXentLoss(temperature)
        return lambda embeddings: peer(embeddings, torch.arange(len(embeddings) // 2).repeat(2))
    raise ValueError(f"dense_loss.py needs a known loss, got name={name!r}.")


def plain_nt_xent(embeddings: Tensor, temperature: float) -> Tensor:
    """NT-Xent in three lines of torch: the least that any dense loss has to do."""
    z = F.normalize(embeddings, dim=-1)
    logits = (z @ z.T / temperature).fill_diagonal_(float("-inf"))
    return F.cross_entropy(logits, torch.arange(len(z)).roll(len(z) // 2))


def make_embeddings(rows: int, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, dim, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def step(loss: Loss, embeddings: Tensor) -> tuple[Tensor, Tensor]:
    """The value and the gradient, [2b, d]."""
    value = loss(embeddings)
    return value.detach(), torch.autograd.grad(value, embeddings)[0]


def check_agreement(rows: int, dim: int, temperature: float) -> dict[str, float]:
    """The largest relative differences from pytorch-metric-learning: all in float32, a smaller batch in float64.

    Raises if one of them is more than rounding.
    """
    found = {}
    for dtype, size, tolerance in ((torch.float64, min(rows, 64), 1e-10), (torch.float32, rows, 1e-4)):
        embeddings = make_embeddings(size, dim, dtype)
        value, gradient = step(build(PML, temperature), embeddings)
        for name in (OURS, PLAIN):
            our_value, our_gradient = step(build(name, temperature), embeddings)
            off = max(
                (our_value / value - 1).abs().item(),
                ((our_gradient - gradient).abs().max() / gradient.abs().max()).item(),
            )
            found[f"{name}, {str(dtype).removeprefix('torch.')}, 2B={size}"] = off
            if not off < tolerance:
                raise AssertionError(f"{name} and {PML} differ by {off:.1e}, more than {tolerance:g}, in {dtype}.")
    return found


def measure(name: str, rows: int, dim: int, temperature: float, seconds: float) -> dict[str, Any]:
    """In this process: the extra peak memory of the first step, and the times of as many as fit in ``seconds``."""
    loss, embeddings = build(name, temperature), make_embeddings(rows, dim)
    step(loss, make_embeddings(rows if name in COMPILED else 16, dim))  # loads and compiles what is needed
    before = reset_peak()
    step(loss, embeddings)
    extra = peak() - before
    clock, processor = [], []
    while not processor or sum(processor) < 1e3 * seconds:
        at, spent = time.perf_counter(), time.process_time()
        step(loss, embeddings)
        clock.append(1e3 * (time.perf_counter() - at))
        processor.append(1e3 * (time.process_time() - spent))
    # The step that compiles leaves memory behind to be used again, so a compiled loss is only timed.
    extra_mib = None if name in COMPILED else extra / 2**20
    return {"milliseconds": median(processor), "clock_milliseconds": median(clock), "extra_mib": extra_mib}


def reset_peak() -> int:
    """Bytes held now; later peaks count from here. Where the kernel cannot reset the peak, the peak so far."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> int:
    """The most bytes this process ever held, or has since ``reset_peak``."""
    try:
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.split("VmHWM:")[1].split()[0])
    except (OSError, IndexError):
        unit = 1 if platform.system() == "Darwin" else 1024
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def in_fresh_process(options: argparse.Namespace, job: str) -> Any:
    shared = ("rows", "dim", "temperature", "seconds", "threads")
    flags = [f"--{name}={getattr(options, name)}" for name in shared]
    done = subprocess.run(
        [sys.executable, __file__, f"--job={job}", *flags], capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{job} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def summarise(rounds: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Medians over the rounds, and how many times our uniform loss each takes: the median of the rounds' ratios."""
    found: dict[str, dict[str, Any]] = {}
    for name, each in rounds.items():
        found[name] = {"rounds": each}
        for what in ("milliseconds", "clock_milliseconds", "extra_mib"):
            pairs = [(one[what], ours[what]) for one, ours in zip(each, rounds[OURS], strict=True)]
            known = all(mine is not None for mine, _ in pairs)
            found[name][what] = median(mine for mine, _ in pairs) if known else None
            found[name][f"{what}_ratios"] = ratios = [mine / ours for mine, ours in pairs] if known else None
            found[name][f"{what}_ratio"] = median(ratios) if ratios else None
    return found


def show(console: Console, options: argparse.Namespace, found: dict[str, dict[str, Any]]) -> None:
    title = (
        f"Forward and backward on CPU, 2B = {options.rows}, d = {options.dim}: medians of {options.rounds} processes"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("loss", no_wrap=True)
    for column in ("ms", "ratio", "extra MiB", "ratio"):
        table.add_column(column, justify="right")
    for name, one in found.items():
        cells = (one["milliseconds"], one["milliseconds_ratio"], one["extra_mib"], one["extra_mib_ratio"])
        table.add_row(name, *("-" if cell is None else f"{cell:.2f}" for cell in cells))
    console.print(table)
    console.print(
        f"{PML} takes {found[PML]['milliseconds_ratio']:.0f} times the time and {found[PML]['extra_mib_ratio']:.0f} "
        f"times the extra memory of the same loss in hardneg; plain torch {found[PLAIN]['milliseconds_ratio']:.2f} and "
        f"{found[PLAIN]['extra_mib_ratio']:.2f} times.",
        highlight=False,
    )


def provenance(options: argparse.Namespace) -> dict[str, Any]:
    from importlib.metadata import version

    packages = ("hardneg", "torch", "pytorch-metric-learning")
    return {
        "command": shlex.join(["python", "benchmarks/dense_loss.py", *sys.argv[1:]]),
        "options": {name: value for name, value in vars(options).items() if name not in ("job", "out")},
        "commit": git("rev-parse", "HEAD"),
        "uncommitted": (git("status", "--porcelain", "--", "src", "benchmarks/dense_loss.py") or "").splitlines(),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in packages},
        "machine": {
            "system": platform.system(),
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
        },
    }


def git(*arguments: str) -> str | None:
    if not shutil.which("git"):
        return None
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512, help="2B, both views together (default 512)")
    parser.add_argument("--dim", type=int, default=128, help="features (default 128)")
    parser.add_argument("--temperature", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=5, help="fresh processes for each loss (default 5)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of timing in each process (default 2)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default 1)")
    parser.add_argument("--compile", action="store_true", help="also time our losses under torch.compile")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "dense_loss.json")
    parser.add_argument("--job", default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options, console = read_options(), Console()
    torch.set_num_threads(options.threads)
    sizes = (options.rows, options.dim, options.temperature)
    if options.job is not None:
        print(
            json.dumps(
                check_agreement(*sizes) if options.job == "agree" else measure(options.job, *sizes, options.seconds)
            )
        )
        return
    names = [OURS, HCL, PLAIN, PML]
    if options.compile and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        console.print("No C++ compiler here: the compiled losses are left out.")
    elif options.compile:
        names[2:2] = COMPILED
    results = provenance(options)
    with console.status("checking that the losses agree") as status:
        results["agreement"] = in_fresh_process(options, "agree")
        rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        for number in range(options.rounds):
            for name in names:
                status.update(f"round {number + 1} of {options.rounds}: {name}")
                rounds[name].append(in_fresh_process(options, name))
    results["losses"] = summarise(rounds)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    show(console, options, results["losses"])


if __name__ == "__main__":
    try:
        import pytorch_metric_learning  # noqa: F401
    except ImportError:
        sys.exit("dense_loss.py needs pytorch-metric-learning, which is not installed: pip install 'hardneg[bench]'")
    main()
