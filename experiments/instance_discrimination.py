"""Instance discrimination (Wu et al. 2018): every image against its own past in a memory bank, with any negatives.

    python experiments/instance_discrimination.py                                  uniform noise, binary NCE
    python experiments/instance_discrimination.py --negatives "Ring(0.1, outer=linear(1.0, 0.2), dynamic_inner=True)"
    python experiments/instance_discrimination.py --negatives "SameCluster()" --clusters 20   (Ring's Cave negatives)
    python experiments/instance_discrimination.py --loss local-aggregation --clusters 100

Negatives are drawn with replacement from the whole bank, with the weights of the expression: uniform ones as in the
original, a ring by rank as in Ring's IRing. Binary NCE (--loss nce) takes its noise for uniform, also in the running Z,
so it is the default for Uniform() only; other negatives go into a softmax over the own entry and the draws (--loss
softmax), as in IRing. The bank remembers unit(momentum * old + (1 - momentum) * new). An encoder is judged by its
nearest neighbours and a linear probe on images that it was not trained on, before and after.

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
from torch.nn.functional import normalize

import hardneg as hn
from hardneg.state.clusters import Clusters
from hardneg.training.augmentation.augment import PRESETS, preset_for
from hardneg.training.data.images import load_splits
from hardneg.training.encoders import build_encoder, embed
from hardneg.training.evaluation.embeddings import evaluate_embeddings

LOSSES = ("auto", "nce", "softmax", "local-aggregation")


@dataclass(frozen=True)
class Options:
    out: str = "runs/instance_discrimination"
    data: str = "digits"
    encoder: str = "tiny"
    loss: str = "auto"  # nce for uniform negatives, else softmax; or nce, softmax, local-aggregation
    negatives: str = "Uniform()"
    num_draws: int = 128
    temperature: float = 0.2  # 0.07 for a million images
    momentum: float = 0.5
    clusters: int = 0  # k-means of the bank before every epoch; 0: none
    dim: int = 64
    epochs: int = 20
    batch_size: int = 128
    learning_rate: float = 5e-4
    seed: int = 0


def draw_ids(
    z: Tensor, ids: Tensor, bank: hn.Bank, clusters: Clusters | None, negatives: hn.negatives.Negatives,
    options: Options,
    generator: torch.Generator,
) -> Tensor | None:  # fmt: skip
    """Ids [b, k] of the negatives of each anchor, by its own weights over the whole bank; None while that is empty."""
    members, anchors = bank.keys(), hn.Keys(z.detach(), ids)
    if len(members) == 0:
        return None
    if clusters is not None:
        members, anchors = clusters.tag(members), clusters.tag(anchors)
    own = bank.of(ids)
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
    labels = train.labelled("instance_discrimination.py")
    ids = torch.arange(len(train))  # of the bank
    augment = PRESETS[preset_for(train.images)]
    encoder = build_encoder(options.encoder, train.in_channels, projection_dim=options.dim, seed=options.seed)
    clusters = Clusters(len(train), seed=options.seed) if options.clusters else None
    generator = torch.Generator().manual_seed(options.seed)

    if options.loss == "local-aggregation":
        bank = hn.Bank(len(train), options.dim, options.momentum)
        aggregate = hn.papers.local_aggregation(temperature=options.temperature, num_background=options.num_draws)
    else:
        sizes = {"num_draws": options.num_draws, "temperature": options.temperature, "momentum": options.momentum}
        loss = hn.losses.InstanceDiscrimination(len(train), options.dim, objective=options.loss, **sizes)
        bank = loss.bank

    def accuracy() -> dict[str, float]:
        split = (embed(encoder, train.images, augment.plain), labels, embed(encoder, test.images, augment.plain))
        found = evaluate_embeddings(*split, test.labelled("instance_discrimination.py"), seed=options.seed)
        return {name: found[name] for name in ("knn", "1nn", "linear")}

    def loss_of(z: Tensor, batch: Tensor, step: int, total: int) -> tuple[Tensor, Tensor | None]:
        """The loss of unit vectors [b, d], and the ids that they were pushed away from."""
        if options.loss == "local-aggregation":
            value = aggregate(z, batch, bank, clusters)
            bank.push(hn.Keys(z, batch))
            return value, None
        draws = draw_ids(z, batch, bank, clusters, negatives.at(step, total), options, generator)
        return loss(z, batch, draws), draws

    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    before = accuracy()
    optimizer = torch.optim.Adam(encoder.parameters(), options.learning_rate, weight_decay=1e-6)
    steps = len(train) // options.batch_size
    with (out / "metrics.jsonl").open("w") as file:
        for epoch in range(options.epochs):
            if clusters is not None and epoch > 0:
                clusters.refresh(bank, options.clusters)
            losses: list[float] = []
            false: list[float] = []
            order = torch.randperm(len(train), generator=generator)[: steps * options.batch_size]
            for i, batch in enumerate(order.chunk(steps)):
                view, _ = augment.views(train.images[batch], ids[batch], epoch, options.seed)  # [b, c, h, w]
                z = normalize(encoder(view), dim=-1)  # [b, d]
                value, draws = loss_of(z, batch, epoch * steps + i, options.epochs * steps)
                optimizer.zero_grad()
                value.backward()  # 0 in the first epoch, which fills the bank
                optimizer.step()
                losses.append(value.item())
                if draws is not None:
                    alike = labels[draws.clamp(min=0)] == labels[batch][:, None]
                    false.append(alike[draws >= 0].double().mean().item())
            record = {"epoch": epoch, "loss": sum(losses) / len(losses)}
            record["false_negatives"] = sum(false) / len(false) if false else None
            file.write(json.dumps(record) + "\n")
            file.flush()
    result = {"options": asdict(options), "before": before, "after": accuracy(), "last": record}
    (out / "result.json").write_text(json.dumps(result, indent=1))
    show(result)
    return result


def show(result: dict[str, Any]) -> None:
    for when in ("before", "after"):
        figures = ", ".join(f"{name} {100 * value:.1f} %" for name, value in result[when].items())
        print(f"{when} training: {figures}")
    false = result["last"]["false_negatives"]
    if false is not None:
        print(f"negatives of the last epoch that were of the anchor's own class: {100 * false:.1f} %")
    print(f"figures: {result['options']['out']}")


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
    if options.clusters < 1 and (options.loss == "local-aggregation" or "Cluster" in options.negatives):
        parser.error("--clusters of at least 1 is needed for negatives by cluster and for local-aggregation.")
    return replace(options, loss="nce" if uniform else "softmax") if options.loss == "auto" else options


if __name__ == "__main__":
    main()
