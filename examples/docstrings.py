"""Make pairs of texts from libraries that are installed: the name of a function, and the first sentence about it.

    python examples/docstrings.py docstrings.jsonl
    hardneg compare --data pairs:docstrings.jsonl --arm "pairs(temperature=0.1)" --arm "pairs(temperature=0.05)"

Real sentences that need no download, for a first comparison on texts. Replace `pairs_of` by pairs of yours: questions
and answers, titles and articles.
"""

import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from hardneg.io.files import run_again, write_atomically

PARTS = {
    "numpy": ["", "fft", "linalg", "random"],
    "scipy": ["cluster.hierarchy", "fft", "integrate", "interpolate", "linalg", "ndimage", "optimize", "signal",
              "sparse", "spatial.distance", "special", "stats"],
    "sklearn": ["cluster", "datasets", "decomposition", "ensemble", "linear_model", "metrics", "preprocessing"],
    "torch": ["", "distributions", "fft", "linalg", "nn", "nn.functional", "optim", "utils.data"],
}  # fmt: skip


def pairs_of(module: str) -> Iterator[tuple[str, str]]:
    try:
        found = importlib.import_module(module)
    except ImportError:
        return
    for name in getattr(found, "__all__", dir(found)):
        sentence = first_sentence(inspect.getdoc(getattr(found, name)) or "")
        if not name.startswith("_") and callable(getattr(found, name)) and 4 <= len(sentence.split()) <= 60:
            yield re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", name).lower().strip(), sentence


def first_sentence(text: str) -> str:
    """Of the first paragraph that is prose: some begin with a call, a directive, or a heading."""
    other = re.compile(r"\s*([^A-Za-z\s]|[\w.]+\(|Parameters\n)")
    prose = [" ".join(part.split()) for part in text.split("\n\n") if not other.match(part)]
    return next((re.split(r"(?<=[.]) ", part)[0] for part in prose if len(part.split()) >= 4), "")


pairs: dict[str, str] = {}
for module in [f"{library}.{part}".rstrip(".") for library, parts in PARTS.items() for part in parts]:
    for name, sentence in pairs_of(module):
        if sentence not in pairs.values():
            pairs.setdefault(name, sentence)  # of a name that several libraries have, the first
lines = [json.dumps({"anchor": name, "positive": sentence}) for name, sentence in pairs.items()]
print(f"{len(lines)} pairs, such as", *lines[:: len(lines) // 3], sep="\n")
if len(sys.argv) > 1:
    write_atomically(Path(sys.argv[1]), lambda file: file.write("\n".join([*lines, ""]).encode()), run_again)
