"""Make pairs of texts from libraries that are installed: the name of a function, and the first sentence about it.

    python examples/docstrings.py pairs.jsonl
    hardneg compare --data pairs:pairs.jsonl --arm "pairs(temperature=0.1)" --arm "pairs(temperature=0.05)"

Real sentences for a first comparison on texts. Replace `pairs_of` by pairs of yours: questions and answers, titles and
articles. docstrings.jsonl is what this wrote with the versions in docstrings.LICENSE.txt; `make demo` and the studies
read it, so that their figures do not depend on what is installed.
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
    "numpy": ["", "char", "fft", "linalg", "ma", "polynomial", "random", "testing"],
    "scipy": ["cluster.hierarchy", "cluster.vq", "fft", "integrate", "interpolate", "io", "linalg", "ndimage",
              "optimize", "signal", "signal.windows", "sparse", "sparse.csgraph", "sparse.linalg", "spatial",
              "spatial.distance", "spatial.transform", "special", "stats", "stats.contingency", "stats.mstats",
              "stats.qmc"],
    "sklearn": ["calibration", "cluster", "covariance", "cross_decomposition", "datasets", "decomposition",
                "discriminant_analysis", "ensemble", "feature_extraction.text", "feature_selection",
                "gaussian_process.kernels", "impute", "inspection", "isotonic", "linear_model", "manifold", "metrics",
                "metrics.pairwise", "mixture", "model_selection", "multiclass", "naive_bayes", "neighbors",
                "neural_network", "pipeline", "preprocessing", "random_projection", "semi_supervised", "svm", "tree",
                "utils"],
    "torch": ["", "autograd", "cuda", "distributed", "distributions", "fft", "linalg", "nn", "nn.functional", "nn.init",
              "nn.utils", "nn.utils.rnn", "optim", "optim.lr_scheduler", "sparse", "special", "utils.data"],
    "pandas": ["", "api.types", "testing"],
    "networkx": [""],
}  # fmt: skip


def pairs_of(module: str) -> Iterator[tuple[str, str]]:
    try:
        found = importlib.import_module(module)
    except ImportError:
        return
    for name in sorted(getattr(found, "__all__", dir(found))):
        try:
            value = getattr(found, name)
        except (AttributeError, ImportError):  # listed, but experimental or without its dependency
            continue
        sentence = first_sentence(inspect.getdoc(value) or "")
        if not name.startswith("_") and callable(value) and 4 <= len(sentence.split()) <= 60:
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
