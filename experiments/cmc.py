"""Contrastive Multiview Coding (Tian et al. 2019): two encoders, two aspects of one image, two banks, crossed.

    python experiments/cmc.py                                    uniform noise, binary NCE
    python experiments/cmc.py --negatives "Ring(0.0, 0.5)"       the closer half of the other aspect's bank, softmax
    python experiments/cmc.py --data cifar10 --encoder resnet18  lightness against colour, as the authors

The aspects of a colour image are L and ab of CIE Lab; those of a grey image are its intensities and its gradients,
across and down. Each aspect is compared with the other one's past: its own instance is the positive, draws from the
bank with the weights of the expression are the negatives. Binary NCE (--loss nce) takes its noise for uniform, also in
the running Z, so it is the default for Uniform() only; other negatives go into a softmax over the positive and the
draws (--loss softmax). Both encoders' features together are judged by their nearest neighbours and a linear probe on
images that they were not trained on, before and after.

Leaves in --out: metrics.jsonl, one line for each epoch, and result.json.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

import hardneg as hn
from hardneg.training.augmentation.augment import PRESETS, preset_for
from hardneg.training.data.images import ImageData, load_splits
from hardneg.training.encoders import Encoder, build_encoder, embed
from hardneg.training.evaluation.embeddings import evaluate_embeddings

LOSSES = ("auto", "nce", "softmax")


@dataclass(frozen=True)
class Options:
    out: str = "runs/cmc"
    data: str = "digits"
    encoder: str = "tiny"
    loss: str = "auto"  # nce for uniform negatives, else softmax; or nce, softmax
    negatives: str = "Uniform()"
    num_draws: int = 128
    temperature: float = 0.2  # 0.07 for a million images
    momentum: float = 0.5
    dim: int = 64
    epochs: int = 20
    batch_size: int = 128
    learning_rate: float = 5e-4
    seed: int = 0


def lab_of(rgb: Tensor) -> Tensor:
    """sRGB in [0, 1], [b, 3, h, w], as CIE L in [0, 100], a and b, for daylight (D65)."""
    linear = torch.where(rgb > 0.04045, ((rgb + 0.055) / 1.055) ** 2.4, rgb / 12.92)
    rows = [[0.412453, 0.357580, 0.180423], [0.212671, 0.715160, 0.072169], [0.019334, 0.119193, 0.950227]]
    white = rgb.new_tensor([0.95047, 1.0, 1.08883])[:, None, None]
    xyz = torch.einsum("ij,bjhw->bihw", rgb.new_tensor(rows), linear) / white
    f = torch.where(xyz > (6 / 29) ** 3, xyz.clamp(min=1e-8) ** (1 / 3), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    x, y, z = f.unbind(1)
    return torch.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], dim=1)


def aspects_of(images: Tensor) -> tuple[Tensor, Tensor]:
    """The two aspects of float images in [0, 1]: [b, 1, h, w] and [b, 2, h, w], each of about unit size."""
    if images.shape[1] == 3:
        lab = lab_of(images)
        return lab[:, :1] / 25.0 - 2.0, lab[:, 1:] / 25.0
    padded = pad(images, (1, 1, 1, 1), mode="replicate")
    across = padded[:, :, 1:-1, 2:] - padded[:, :, 1:-1, :-2]
    down = padded[:, :, 2:, 1:-1] - padded[:, :, :-2, 1:-1]
    return (images - 0.5) / 0.25, 2.0 * torch.cat([across, down], dim=1)


def draw_ids(
    z: Tensor,
    ids: Tensor,
    bank: hn.Bank,
    negatives: hn.negatives.Negatives,
    options: Options,
    generator: torch.Generator,
) -> Tensor | None:
    """Ids [b, k] of the negatives of each anchor, by its own weights over the whole bank; None while that is empty."""
    members, own = bank.keys(), bank.of(ids)
    if len(members) == 0:
        return None
    anchors = hn.Keys(z.detach(), ids)
    scores = hn.score(anchors, own.vectors, members, options.temperature, positive_mask=(own.ids >= 0)[:, None])
    index = hn.draw(negatives.log_weights(scores), options.num_draws, generator)  # [b, k], own ids never
    return torch.where(index >= 0, members.ids[index.clamp(min=0)], -1)


def main() -> dict[str, Any]:
    options = read_options()
    negatives = hn.parse(options.negatives)
    train, test = load_splits(options.data)
    if options.batch_size > len(train):
        most = f"at most the {len(train)} images of {options.data}"
        arguments().error(f"--batch-size of {most} is needed, got {options.batch_size}.")
    augment = replace(PRESETS[preset_for(train.images)], mean=(), std=())  # aspects are taken of values in [0, 1]
    channels = (1, 2)
    encoders = [
        build_encoder(options.encoder, c, projection_dim=options.dim, seed=options.seed + i)
        for i, c in enumerate(channels)
    ]
    sizes = {"num_draws": options.num_draws, "temperature": options.temperature, "momentum": options.momentum}
    cmc = hn.losses.CMC(len(train), options.dim, objective=options.loss, **sizes)
    generator = torch.Generator().manual_seed(options.seed)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)

    before = accuracy(encoders, train, test)
    parameters = [parameter for encoder in encoders for parameter in encoder.parameters()]
    optimizer = torch.optim.Adam(parameters, options.learning_rate, weight_decay=1e-6)
    steps = len(train) // options.batch_size
    with (out / "metrics.jsonl").open("w") as file:
        for epoch in range(options.epochs):
            losses: list[float] = []
            order = torch.randperm(len(train), generator=generator)[: steps * options.batch_size]
            for i, batch in enumerate(order.chunk(steps)):
                view, _ = augment.views(train.images[batch], batch, epoch, options.seed)  # [b, c, h, w]
                z1, z2 = (normalize(e(v), dim=-1) for e, v in zip(encoders, aspects_of(view), strict=True))  # [b, d]
                now = negatives.at(epoch * steps + i, options.epochs * steps)
                first, second = cmc.banks
                # As cmc(z1, z2, batch), but each aspect draws by its own scores.
                value = cmc.contrasts[0](z1, batch, second, draw_ids(z1, batch, second, now, options, generator))
                value += cmc.contrasts[1](z2, batch, first, draw_ids(z2, batch, first, now, options, generator))
                first.push(hn.Keys(z1, batch))
                second.push(hn.Keys(z2, batch))
                optimizer.zero_grad()
                value.backward()  # 0 in the first epoch, which fills the banks
                optimizer.step()
                losses.append(value.item())
            record = {"epoch": epoch, "loss": sum(losses) / len(losses)}
            file.write(json.dumps(record) + "\n")
            file.flush()
    result = {"options": asdict(options), "before": before, "after": accuracy(encoders, train, test), "last": record}
    (out / "result.json").write_text(json.dumps(result, indent=1))
    for when in ("before", "after"):
        print(f"{when} training: {', '.join(f'{name} {100 * value:.1f} %' for name, value in result[when].items())}")
    print(f"figures: {out}")
    return result


def accuracy(encoders: list[Encoder], train: ImageData, test: ImageData) -> dict[str, float]:
    """Of the features of both encoders side by side, each of unit norm so that neither decides alone."""

    def features(images: Tensor) -> Tensor:
        parts = [
            embed(encoder, images, lambda batch, i=i: aspects_of(batch.float() / 255.0)[i])
            for i, encoder in enumerate(encoders)
        ]
        return torch.cat([normalize(part, dim=-1) for part in parts], dim=1)

    labels = (data.labelled("cmc.py") for data in (train, test))
    split = [x for pair in zip((features(train.images), features(test.images)), labels, strict=True) for x in pair]
    found = evaluate_embeddings(*split, seed=0)
    return {name: found[name] for name in ("knn", "1nn", "linear")}


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for one in fields(Options):
        flag = "--" + one.name.replace("_", "-")
        parser.add_argument(flag, type=type(one.default), default=one.default, metavar="", help=f"{one.default}")
    return parser


def read_options() -> Options:
    parser = arguments()
    options = Options(**vars(parser.parse_args()))
    for name in ("epochs", "batch_size", "num_draws"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} of at least 1 is needed, got {getattr(options, name)}.")
    if options.loss not in LOSSES:
        parser.error(f"--loss is {', '.join(LOSSES[:-1])} or {LOSSES[-1]}, got {options.loss}.")
    try:
        uniform = hn.parse(options.negatives) == hn.Uniform()
    except ValueError as error:
        parser.error(f"--negatives: {error}")
    if options.loss == "nce" and not uniform:
        parser.error(f"--loss nce needs uniform noise, got --negatives {options.negatives}; use --loss softmax.")
    return replace(options, loss="nce" if uniform else "softmax") if options.loss == "auto" else options


if __name__ == "__main__":
    main()
