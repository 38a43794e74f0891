"""What the tests of reports share: runs and comparisons as files, and the page made of them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hardneg.comparing.arms import parse_arm
from hardneg.comparing.comparing import _as_json
from hardneg.comparing.request import Comparison
from hardneg.comparing.verdict import answer, headline, rows_of, sentences, temperature_notes, verdicts_of
from hardneg.reporting import write_report
from hardneg.training.data.images import load
from hardneg.training.loop.data_record import fingerprint
from hardneg.training.loop.records import text_of
from support.html_page import Page

ARMS = (
    "simclr(temperature=0.5)",
    "simclr(temperature=0.25)",
    "hcl(beta=1, tau_plus=0.1)",
    "hcl(beta=3) @ proximity(num_candidates=500)",
)


ACCURACY = {ARMS[0]: [0.80, 0.82, 0.81], ARMS[1]: [0.85, 0.86, 0.865], ARMS[2]: [0.855, 0.859, 0.864]}
ACCURACY[ARMS[3]] = [0.79, 0.83, 0.815]


NUM_TEST = 40


def read(path: Path) -> Page:
    return Page(path.read_text())


def make_data(folder: Path) -> str:
    rng = np.random.default_rng(0)
    labels = np.arange(NUM_TEST) % 4
    images = rng.integers(0, 255, (NUM_TEST, 8, 8), dtype=np.uint8)
    np.savez(folder / "data.npz", images=images, labels=labels, test_images=images, test_labels=labels)
    return f"npz:{folder / 'data.npz'}"


@cache
def images_of(data: str) -> str:
    return fingerprint(load(data, "test"))


def make_run(
    path: Path, arm: str, seed: int, data: str, *, accuracy: float = 0.8, common: Any = None
) -> dict[str, Any]:
    parsed = parse_arm(arm)
    options = parsed.complete(**{"data": data, "epochs": 2, **(common or {})}, seed=seed).as_dict()
    path.mkdir(parents=True)
    config = {"recipe": parsed.recipe, "options": options, "command": "hardneg train", "python": "3.11", "versions": {}}
    encoder = {
        "name": options["encoder"],
        "parameters": options["dim"],
        "class": "Encoder",
        "initial_weights": f"{options['encoder']} {options['dim']} {seed}",
    }
    train = hashlib.sha256(data.encode()).hexdigest()
    images = {"train": {"images": 40, "fingerprint": train}, "test": {"images": 40, "fingerprint": images_of(data)}}
    config["trained"] = {"encoder": encoder, "views": options["augment"], "data": images}
    (path / "config.json").write_text(json.dumps(config))
    shift = ARMS.index(arm) if arm in ARMS else 0
    records = [
        {
            "step": 10 * i, "epoch": 0, "loss": 5.0 - 0.1 * i + 0.01 * seed, "hardness": 0.1 + 0.05 * shift,
            "uniform_hardness": 0.1, "effective_number": 510.0 - 100.0 * shift - i,
            "false_negatives": 0.1 + 0.02 * shift, "attracted": 0.0, "clamped": 0.03 * shift,
            "effective_temperature": parsed.effective_temperature, "empty": 0.0,
        }
        for i in range(1, 6)
    ]  # fmt: skip
    (path / "metrics.jsonl").write_text(text_of(records))
    labels = torch.arange(NUM_TEST) % 4
    features = torch.eye(4)[labels] + 0.1 * torch.randn(NUM_TEST, 4, generator=torch.Generator().manual_seed(seed))
    np.savez(path / "embeddings.npz", train_x=features, train_y=labels, test_x=features, test_y=labels)
    histogram = {"edges": [-1.0, -0.5, 0.0, 0.5, 1.0], "same": [0, 0, 10, 30], "other": [0, 30, 30, 0]}
    result = {
        "final": records[-1], "knn": accuracy, "1nn": accuracy + 0.01, "linear": accuracy + 0.02, "k": 10,
        "alignment": 0.25, "uniformity": -1.5, "steps": 50, "num_test": NUM_TEST, "seconds": 12.0 + seed, "epochs": 2,
        "similarities": histogram | {"same_mean": 0.6, "other_mean": 0.05},
    }  # fmt: skip
    (path / "result.json").write_text(json.dumps(result))
    return result


def make_comparison(path: Path, arms: tuple[str, ...] = ARMS, seeds: int = 3) -> dict[str, Any]:
    path.mkdir(parents=True, exist_ok=True)
    common = {"data": make_data(path), "epochs": 2, "batch_size": 16}
    results = [
        [
            make_run(path / "runs" / f"arm{number}-seed{seed}", arm, seed, common["data"], accuracy=v, common=common)
            for seed, v in enumerate(ACCURACY[arm][:seeds])
        ]
        for number, arm in enumerate(arms)
    ]
    parsed = [parse_arm(arm) for arm in arms]
    rows, verdicts = rows_of(parsed, results, "knn"), verdicts_of(parsed, results, "knn")
    summary = {
        "metric": "knn", "num_test": NUM_TEST, "rows": [asdict(row) for row in rows],
        "headline": headline(verdicts, "data.npz"),
        "answer": answer(verdicts, "10-NN accuracy"), "verdicts": [_as_json(one) for one in verdicts],
        "sentences": sentences(verdicts), "notes": temperature_notes(parsed), "tuned": None,
        "comparison": asdict(Comparison(arms, seeds, common)),
        "command": 'hardneg compare --arm "simclr()" --epochs 2', "python": "3.11.7", "versions": {"torch": "2.99"},
        "machine": "a machine", "device": "cpu", "commit": "abc1234",
    }  # fmt: skip
    (path / "comparison.json").write_text(json.dumps(summary))
    return summary


def places(value: Any, before: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every part of a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [before, *(place for key, one in inside for place in places(one, (*before, key)))]


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    path = tmp_path_factory.mktemp("comparison")
    return path, make_comparison(path)


@pytest.fixture(scope="module")
def compared(comparison: tuple[Path, dict[str, Any]]) -> Page:
    written = write_report(comparison[0])
    assert written == comparison[0] / "report.html"
    return read(written)
