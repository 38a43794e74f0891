"""CLIP on vectors that were made elsewhere: do two projection heads learn to find one kind of vector by another?

    HARDNEG_DATA=data python experiments/clip_embeddings.py --minilm FOLDER

Needs $HARDNEG_DATA/sentences; FOLDER is all-MiniLM-L6-v2 as transformers read it. The first vector of a sentence counts
its words (TF-IDF, 256 dimensions of an SVD), the second is MiniLM's. The figure is the share of the held-out sentences
(a fifth, at most 2,048) whose MiniLM vector is the nearest to that of their words. Rows beside CLIP: the heads as they
begin, and least squares from the first to the second vectors, which needs no negatives. Values were chosen before any
run.
"""

from __future__ import annotations

import argparse
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentences import RESULTS, ROOT, articles, of_seeds, without_paths, write_result

from hardneg.comparing.comparing import compare
from hardneg.comparing.request import Comparison
from hardneg.training.data.items import Splits, retrieved
from hardneg.training.data.pairs import VectorPairs
from hardneg.training.encoders import Represent
from hardneg.training.options import CLIPOptions
from hardneg.training.text_encoders import text_encoder

ARMS = {
    "CLIP": "clip()",
    "HCL": "clip(negatives='Tilt(1.0)')",
    "ProSampler": "clip() @ proximity()",
    "sigmoid": "clip(objective='sigmoid')",
}


def write_vectors(path: Path, number: int, minilm: Path) -> None:
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer

    texts = list(chain.from_iterable(articles(number)))
    counts = TfidfVectorizer(min_df=2, sublinear_tf=True).fit_transform(texts)
    first = TruncatedSVD(256, random_state=0).fit_transform(counts)
    second = text_encoder(f"hf:{minilm}").to("cuda" if torch.cuda.is_available() else "cpu").encode(texts)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, first=first.astype(np.float32), second=second.cpu().numpy())


def least_squares(splits: Splits) -> float:
    """Retrieval by the linear map that brings the first vectors closest to the second ones."""
    train, test = splits.train, splits.test
    found = torch.linalg.lstsq(train.first.double(), train.second.double()).solution
    return float(retrieved(test.first.double() @ found, test.second.double()).double().mean())


def untrained(options: CLIPOptions, splits: Splits) -> float:
    found = splits.test.evaluate(splits, Represent(splits.train.encoder(options)), options)
    return float(found.figures["retrieval"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minilm", type=Path, required=True, help="a folder with all-MiniLM-L6-v2")
    parser.add_argument("--sentences", type=int, default=20_000)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=None, help="runs side by side")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/clip_embeddings", help="for the vectors and the runs")
    parser.add_argument("--result", type=Path, default=RESULTS / "clip_embeddings.json")
    options = parser.parse_args()
    vectors = options.out / f"vectors_{options.sentences}.npz"
    if not vectors.exists():
        write_vectors(vectors, options.sentences, options.minilm)
    common: dict[str, Any] = {"data": f"embeddings:{vectors}", "epochs": options.epochs, "batch_size": 256}
    splits = VectorPairs.splits(CLIPOptions(**common))
    starts = [untrained(CLIPOptions(**common, seed=seed), splits) for seed in range(options.seeds)]
    rows = {"untrained": of_seeds(starts), "least squares": of_seeds([least_squares(splits)])}
    print(rows, flush=True)
    summary = compare(Comparison(tuple(ARMS.values()), options.seeds, common), options.out, jobs=options.jobs)
    rows |= {name: of_seeds(summary["measures"][text]["retrieval"]) for name, text in ARMS.items()}
    print(rows)
    about = {one: summary[one] for one in ("answer", "sentences", "notes", "cautions")}
    write_result(
        options.result,
        {"sentences": options.sentences, "options": without_paths(common), "retrieval": rows, "clip": about},
    )


if __name__ == "__main__":
    main()
