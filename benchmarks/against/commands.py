"""Commands from the start of the process to its end: explaining an expression, a short training, a comparison."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from cases import Work, case

IMAGES = (256, 512, 1024, 2048, 4096)
COMPARED = (128, 256, 512, 1024, 2048)


def run(*command: str) -> None:
    """Run Python with these arguments."""
    subprocess.run([sys.executable, *command], check=True, capture_output=True)


def images(n: int) -> Path:
    """Write n images of 32 x 32 pixels with 10 labels, in a new folder."""
    import numpy as np

    file = Path(tempfile.mkdtemp()) / "images.npz"
    pixels = np.random.default_rng(0).integers(0, 256, (n, 32, 32, 3), dtype=np.uint8)
    np.savez(file, images=pixels, labels=np.arange(n) % 10)
    return file


@case("hardneg explain", seconds=0.5, sizes=(1,), unit="expression")
def explain(size: int) -> tuple[Work, None]:
    return lambda: run("-m", "hardneg", "explain", "OtherLabel() * Tilt(1.0)"), None


@case("hardneg train", "the bare loop in torch", goal=1.4, sizes=IMAGES, at=(256,), unit="images", growth=1.0)
def train(n: int) -> tuple[Work, Work]:
    """One epoch of SimCLR with the small encoder. Ours also evaluates before and after, and records the run."""
    file = images(n)
    options = ["--encoder", "tiny", "--epochs", "1", "--batch-size", "64", "--quiet"]

    def ours() -> None:
        shutil.rmtree(file.parent / "run", ignore_errors=True)
        run("-m", "hardneg", "train", "simclr", "--data", f"npz:{file}", "--out", str(file.parent / "run"), *options)

    return ours, lambda: run(str(Path(__file__).with_name("bare_loop.py")), str(file), str(file.parent / "weights.pt"))


@case("hardneg compare", sizes=COMPARED, unit="images", growth=1.0)
def compare(n: int) -> tuple[Work, None]:
    """Two arms, two seeds and one epoch each, one process at a time."""
    file = images(n)
    arms = ["--arm", "simclr()", "--arm", "hcl(beta=1)", "--seeds", "2", "--jobs", "1", "--epochs", "1"]

    def ours() -> None:
        shutil.rmtree(file.parent / "runs", ignore_errors=True)
        options = ["--data", f"npz:{file}", "--encoder", "tiny", "--batch-size", "64", "--quiet"]
        run("-m", "hardneg", "compare", *arms, *options, "--out", str(file.parent / "runs"))

    return ours, None
