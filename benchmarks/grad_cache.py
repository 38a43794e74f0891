"""A batch of 65,536 images of 32 x 32 pixels on one GPU: a ResNet-18 with GroupNorm in bf16, in chunks of views.

    python benchmarks/grad_cache.py --images 65536 --chunk 4096 --steps 3

Both views of all images are candidates of each other: 131,072 rows in the loss, which streams. A step is views to
weights: encoding twice, the loss, its backward pass and Adam. Images are random patches of 8 x 8 pixels, and their
views differ by noise. Memory is the peak of what torch allocated, that of the weights and of the views included.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate, normalize

from hardneg.io.files import write_json
from hardneg.io.provenance import environment
from hardneg.losses import ContrastiveLoss, GradCache
from hardneg.training.encoders import build_encoder


def two_views(number: int, device: torch.device, generator: torch.Generator) -> Tensor:
    """[2 n, 3, 32, 32]"""
    patches = torch.rand(number, 3, 4, 4, generator=generator, device=device, dtype=torch.bfloat16)
    images = interpolate(patches, scale_factor=8).repeat(2, 1, 1, 1)
    noise = torch.rand(images.shape, generator=generator, device=device, dtype=torch.bfloat16)
    return images.add_(noise, alpha=0.2).to(memory_format=torch.channels_last)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=65_536)
    parser.add_argument("--chunk", type=int, default=4096, help="views that are encoded at once")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--negatives", default="Tilt(1.0)")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out", type=Path, default=None, help="a JSON file for the figures")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    encoder = build_encoder("resnet18", 3, norm="group", seed=0).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    encode: Any = torch.compile(encoder) if args.compile else encoder
    cache, loss = GradCache(encode, args.chunk), ContrastiveLoss(args.negatives, impl="streamed")
    optimizer = torch.optim.Adam(encoder.parameters(), 1e-3)
    generator = torch.Generator(device).manual_seed(0)
    views, ids = two_views(args.images, device, generator), torch.arange(args.images, device=device)
    seconds, losses = [], []
    for _ in range(args.steps + 1):  # the first one warms up
        begun = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16):
            z1, z2 = normalize(cache(views).float(), dim=-1).chunk(2)
            value = loss(z1, z2, ids)
        optimizer.zero_grad(set_to_none=True)
        value.backward()
        optimizer.step()
        losses.append(value.item())
        seconds.append(time.perf_counter() - begun)
        print(f"loss {losses[-1]:.4f}, {seconds[-1]:.2f} s", flush=True)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    figures = {"seconds": seconds[1:], "first": seconds[0], "losses": losses, "peak_GiB": peak}
    print(f"{args.images} images, chunks of {args.chunk}: {min(seconds[1:]):.2f} s a step, {peak:.2f} GiB at most")
    if args.out is not None:
        options = {name: getattr(args, name) for name in ("images", "chunk", "steps", "negatives", "compile")}
        write_json(args.out, {"figures": figures, "options": options, **environment()})


if __name__ == "__main__":
    main()
