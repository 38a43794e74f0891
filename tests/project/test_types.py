"""What type checkers find in a user's script: strings with few values, and losses that return tensors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import hardneg as hn

api = pytest.importorskip("mypy.api", reason="needs the extra dev")

SCRIPT = """
import torch
from torch import Tensor

import hardneg as hn

loss = hn.ContrastiveLoss("Tilt(1.0)", temperature=0.5, views="two", reduction="mean")
z1, z2 = torch.randn(8, 4), torch.randn(8, 4)
value: Tensor = loss(z1, z2)
scores = hn.two_views(z1, z2, temperature=0.5)
pairs: Tensor = hn.info_nce(scores, hn.Tilt(1.0).log_weights(scores), positives_in_denominator="all")
mean: Tensor = hn.reduce(pairs, scores, "pairs")
other: Tensor = hn.SogCLR(100)(z1, z2, ids=torch.arange(8))
mined = hn.mine(z1, z2, torch.arange(8), hn.BelowPositive(0.05), 2, draw="gumbel", similarity="dot")
hardness: float = float(mined.scores.mean())
report = hn.audit(z1, "Uniform()", similarity="cosine")
queue = hn.Queue(64, 4)
queue.push(hn.Keys(z2))
"""
WRONG = {
    'hn.ContrastiveLoss(views="three")': "views",
    'hn.ContrastiveLoss(reduction="median")': "reduction",
    'hn.ContrastiveLoss(positives="class")': "positives",
    'hn.ContrastiveLoss(positives_in_denominator="some")': "positives_in_denominator",
    'hn.ContrastiveLoss(num_negatives="few")': "num_negatives",
    'hn.ContrastiveLoss(impl="fast")': "impl",
    'hn.SogCLR(100, views="pool")': "views",
    'hn.EMC2(100, views="pool")': "views",
    'hn.reduce(pairs, scores, "max")': "reduce",
    'hn.Tilt(1.0, by="teacher")': "by",
    'hn.audit(z1, similarity="l2")': "similarity",
    'hn.mine(z1, z2, torch.arange(8), "Uniform()", 2, draw="random")': "mine",
    'hn.mine(z1, z2, torch.arange(8), "Uniform()", 2, similarity="l2")': "mine",
    'hn.mining.Search("fast")': "Search",
    'hn.load_encoder("run", weights="first")': "weights",
    "number: int = loss(z1, z2)": "Tensor",
    "loss(z1, z2, wrong=3)": "wrong",
}


def test_pyright_finds_wrong_words_and_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("basedpyright", reason="needs the extra dev")
    (tmp_path / "script.py").write_text(SCRIPT + "\n".join(WRONG) + "\n")
    environment = {"venvPath": str(Path(sys.prefix).parent), "venv": Path(sys.prefix).name}
    config = {"typeCheckingMode": "strict", **environment, "extraPaths": [str(Path(hn.__file__).parents[1])]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({**config, "include": ["script.py"]}))
    command = [sys.executable, "-m", "basedpyright", "--project", str(tmp_path), "--outputjson"]
    found = json.loads(subprocess.run(command, capture_output=True, check=False).stdout)["generalDiagnostics"]
    errors = {one["range"]["start"]["line"]: one["message"] for one in found if one["severity"] == "error"}
    first = SCRIPT.count("\n")
    assert sorted(errors) == list(range(first, first + len(WRONG))), found


def test_mypy_finds_wrong_words_and_nothing_else(tmp_path: Path) -> None:
    wrong = [*WRONG]
    (tmp_path / "script.py").write_text(SCRIPT + "\n".join(wrong) + "\n")
    options = ["--strict", "--config-file", "", "--python-executable", sys.executable, "--no-incremental"]
    out, problem, _ = api.run([*options, "--follow-imports", "silent", str(tmp_path / "script.py")])
    assert problem == ""
    first = SCRIPT.count("\n") + 1
    errors = {int(line.split(":")[1]) - first: line for line in out.splitlines() if " error: " in line}
    assert sorted(errors) == list(range(len(wrong))), out
    for place, call in enumerate(wrong):
        assert WRONG[call] in errors[place]
