"""Small data sets of texts and of pairs, in files: sentences of a few topics, in the order of documents."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

TOPICS = {
    "sea": ["ship", "wave", "harbour", "sail", "fish", "captain", "storm", "anchor", "tide", "shore"],
    "kitchen": ["bread", "oven", "salt", "butter", "knife", "soup", "pepper", "flour", "spoon", "onion"],
    "music": ["violin", "choir", "melody", "drum", "concert", "piano", "rhythm", "singer", "tune", "opera"],
}


def sentences(number: int, seed: int = 0) -> tuple[list[str], list[str]]:
    """Sentences of six words and their topics; five of one topic stand together, as in a document."""
    random = torch.Generator().manual_seed(seed)
    names = list(TOPICS)
    topics = [names[(i // 5) % len(names)] for i in range(number)]
    picks = torch.randint(10, (number, 6), generator=random).tolist()
    texts = [
        " ".join([*(TOPICS[topic][j] for j in row), f"s{i}"])
        for i, (topic, row) in enumerate(zip(topics, picks, strict=True))
    ]
    return texts, topics


def text_file(path: Path, number: int = 100) -> str:
    """One sentence per line, an empty line between documents; its name as a data set."""
    texts, _ = sentences(number)
    path.write_text("\n\n".join("\n".join(texts[i : i + 5]) for i in range(0, number, 5)))
    return f"text:{path}"


def text_table(path: Path, number: int = 100) -> str:
    """A JSONL file with the columns note and topic."""
    rows = [{"note": text, "topic": topic} for text, topic in zip(*sentences(number), strict=True)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return f"text:{path}[note,topic]"


def pair_table(path: Path, number: int = 100, num_negatives: int = 2) -> str:
    """Anchor, positive and mined negatives as ``hardneg mine`` names them; two rows share their positive."""
    texts, _ = sentences(2 * number)
    rows = []
    for i in range(number):
        row = {"anchor": texts[2 * i], "positive": texts[2 * i + 1] if i != 1 else texts[1]}
        row |= {f"negative_{k + 1}": texts[(2 * i + 21 + 10 * k) % (2 * number)] for k in range(num_negatives)}
        rows.append(row)
    path.write_text("\n".join(map(json.dumps, rows)))
    return f"pairs:{path}"


COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (30, 40, 220), "white": (245, 245, 245)}


def image_text_table(path: Path, number: int = 100, size: int = 8) -> str:
    """A JSONL file with the columns file_name and text, and pictures of a bar beside it; every fifth has two texts."""
    from PIL import Image

    names, rows = list(COLOURS), []
    for i in range(number):
        colour, ground = names[i % 4], names[(i // 4 + i % 4 + 1) % 4]
        pixels = np.full((size, size, 3), COLOURS[ground], dtype=np.uint8)
        pixels[:, i % size] = COLOURS[colour]
        Image.fromarray(pixels).save(path.parent / f"bar{i}.png")
        texts = [f"a {colour} bar at place {i % size} on {ground}", f"{ground} with {colour}, number {i}"]
        rows += [{"file_name": f"bar{i}.png", "text": text} for text in (texts if i % 5 == 0 else texts[1:])]
    path.write_text("\n".join(map(json.dumps, rows)))
    return f"imagetext:{path}"


def vector_file(path: Path, number: int = 100) -> str:
    """Vectors of 6 numbers and a linear map of them to 9, with noise."""
    random = np.random.default_rng(0)
    first = random.normal(size=(number, 6))
    second = first @ random.normal(size=(6, 9)) + 0.1 * random.normal(size=(number, 9))
    np.savez(path, first=first, second=second)
    return f"embeddings:{path}"


def sts_file(path: Path, number: int = 60) -> str:
    """Pairs of sentences with the number of words that they share as their score; two tasks."""
    texts, _ = sentences(2 * number, seed=1)
    lines = ["task\tscore\tsentence1\tsentence2"]
    for i in range(number):
        first, second = texts[i], texts[i + 1 + i % 3]
        lines.append(f"{'AB'[i % 2]}\t{len(set(first.split()) & set(second.split()))}\t{first}\t{second}")
    path.write_text("\n".join(lines))
    return f"sts:{path}"
