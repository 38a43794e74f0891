"""A damaged file: the same result, or an error that names the file. Never another result.

Files of mining are in tests/mining/test_damage.py.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

import hardneg as hn
from hardneg.batching.graph import ProximityGraph, build_graph
from hardneg.batching.plan import Plan
from hardneg.batching.planners import Proximity
from hardneg.cli.app import app
from hardneg.core.errors import HardnegError, HardnegWarning, forget_warnings
from hardneg.training.loop.runs import Run
from support.comparisons import here
from support.damage import KINDS, damage
from support.stored_files import commands, make_stored
from support.training_runs import everything

pytest.importorskip("accelerate", reason="training needs the extra train")


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_stored(tmp_path_factory.mktemp("stored"))
    vectors = torch.nn.functional.normalize(torch.randn(60, 4, generator=torch.Generator().manual_seed(0)), dim=1)
    graph = build_graph(vectors, 5, 20, torch.Generator().manual_seed(0))
    graph.save(folder / "graph.npz")
    Proximity(num_neighbours=5).plan(graph, 10, torch.Generator().manual_seed(0)).save(folder / "plan.npz")
    run = Run(folder / "run")
    run.warn("2 images are odd.")
    run.save_best({"step": 1, "epoch": 1, "monitor": 0.5, "method": run.load()["method"]})
    assert not CliRunner().invoke(app, ["audit", str(folder / "run"), "--out", str(folder / "audited")]).exit_code
    return folder


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("hardneg.comparing.runs.in_a_process", here)
    monkeypatch.setattr("hardneg.io.provenance._commit", lambda: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", HardnegWarning)
        yield


@dataclass
class Answer:
    """What came of reading: a result, or a refusal; and all that was said."""

    result: Any
    words: str


def ask(name: str, look: Callable[[Path, Result], Any]) -> Callable[[Path, Path], Answer]:
    """The answer of a command to the files at a place, with ``look`` for its result."""

    def answer(at: Path, stored: Path) -> Answer:
        arguments = commands(f"npz:{stored / 'data.npz'}")[name][0]
        with warnings.catch_warnings(record=True) as heard:
            done = CliRunner().invoke(app, arguments(at))
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        words = done.output + done.stderr + "".join(str(one.message) for one in heard)
        return Answer(None if done.exit_code else look(at, done), words)

    return answer


def load(kind: type[ProximityGraph] | type[Plan], name: str) -> Callable[[Path, Path], Answer]:
    def answer(at: Path, stored: Path) -> Answer:
        try:
            found: Any = kind.load(at / name)
        except HardnegError as error:
            return Answer(None, str(error))
        parts = {one: getattr(found, one) for one in found.__dataclass_fields__}
        return Answer(str({one: _plain(value) for one, value in parts.items()}), "")

    return answer


def loaded(weights: str) -> Callable[[Path, Path], Answer]:
    def answer(at: Path, stored: Path) -> Answer:
        try:
            found = hn.load_encoder(at / "run", weights)
        except HardnegError as error:
            return Answer(None, str(error))
        return Answer(str({name: _plain(value) for name, value in found.state_dict().items()}), "")

    return answer


def audited_again(at: Path, stored: Path) -> Answer:
    """The audit of a run, over the files of an earlier one, which it replaces only if they are its own."""
    done = CliRunner().invoke(app, ["audit", str(at / "run"), "--out", str(at / "audited")])
    return Answer(None if done.exit_code else "replaced", done.stderr)


def _plain(value: Any) -> Any:
    value = value.numpy() if isinstance(value, torch.Tensor) else value
    return (value.dtype, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value


def printed(at: Path, done: Result) -> str:
    return done.output.replace(str(at), "@")


def page(at: Path, done: Result) -> str:
    return next((at / "out").glob("*.html")).read_text().replace(str(at), "@")


def trained(at: Path, done: Result) -> str:
    return str({name: sorted(str(one) for one in _items(part)) for name, part in everything(at / "begun").items()})


def _items(part: Any) -> Any:
    return [(name, _plain(value)) for name, value in part.items()] if isinstance(part, dict) else [part]


def compared(at: Path, done: Result) -> str:
    return _without_checksum(at, at / "compare" / "comparison.json")


def audited(at: Path, done: Result) -> str:
    return _without_checksum(at, at / "out" / "audit.json")


def _without_checksum(at: Path, path: Path) -> str:
    """Which is that of the paths, too."""
    return str({k: v for k, v in json.loads(path.read_text()).items() if k != "checksum"}).replace(str(at), "@")


REPORT, OF_ALL, AGAIN = ask("report run", page), ask("report comparison", page), ask("train again", printed)
FILES: dict[str, tuple[str, Callable[[Path, Path], Answer]]] = {
    "checkpoint": ("begun/checkpoint.pt", ask("train", trained)),
    "metrics of a resumed run": ("begun/metrics.jsonl", ask("train", trained)),
    "config of a resumed run": ("begun/config.json", ask("train", trained)),
    "config of a finished run": ("run/config.json", AGAIN),
    "result of a finished run": ("run/result.json", AGAIN),
    "embeddings to evaluate": ("run/embeddings.npz", ask("evaluate", printed)),
    "embeddings to audit": ("run/embeddings.npz", ask("audit run", audited)),
    "embeddings in a report": ("run/embeddings.npz", REPORT),
    "config in a report": ("run/config.json", REPORT),
    "result in a report": ("run/result.json", REPORT),
    "metrics in a report": ("run/metrics.jsonl", REPORT),
    "memory": ("run/memory.json", REPORT),
    "warnings": ("run/warnings.json", REPORT),
    "best checkpoint": ("run/checkpoint.best.pt", loaded("best")),
    "checkpoint of an encoder": ("run/checkpoint.pt", loaded("last")),
    "metrics of a finished run": ("run/metrics.jsonl", AGAIN),
    "metrics in a comparison": ("compare/runs/*/metrics.jsonl", OF_ALL),
    "embeddings in a comparison": ("compare/runs/*/embeddings.npz", OF_ALL),
    "audit that is replaced": ("audited/audit.json", audited_again),
    "page of an audit that is replaced": ("audited/audit.html", audited_again),
    "mined file": ("mined/mined.jsonl", ask("audit mined", audited)),
    "manifest": ("mined/mined.jsonl.manifest.json", ask("audit mined", audited)),
    "queries of a mined file": ("mined/q.jsonl", ask("audit mined", audited)),
    "vectors of a mined file": ("mined/?.npy", ask("audit mined", audited)),
    "cached vectors of a mined file": ("mined/coded.jsonl.embeddings/*.npy", ask("audit coded", audited)),
    "sizes of cached vectors": ("mined/coded.jsonl.embeddings/*.json", ask("audit coded", audited)),
    "comparison": ("compare/comparison.json", OF_ALL),
    "result in a comparison": ("compare/runs/*/result.json", ask("compare", compared)),
    "config in a comparison": ("compare/runs/*/config.json", ask("compare", compared)),
    "request": ("compare/request.json", ask("compare", compared)),
    "plan": ("plan.npz", load(Plan, "plan.npz")),
    "graph": ("graph.npz", load(ProximityGraph, "graph.npz")),
}
GRID = 200
"""Damages of each kind over all files in the long test."""


def one_damage(name: str, kind: str, number: int, stored: Path, folder: Path, whole: Any) -> str | None:
    """What is wrong with the answer to this damage, or None."""
    pattern, answer = FILES[name]
    at = folder / "damaged"
    _copy(stored, at)
    random = Random(f"{name} {kind} {number}")
    path = random.choice(sorted(at.glob(pattern)))
    what = f"{name} {number}, {damage(path, kind, random)}"
    forget_warnings()
    try:
        found = answer(at, stored)
    except Exception as error:
        return f"{what}: traceback {type(error).__name__}: {str(error)[:200]}"
    finally:
        shutil.rmtree(at)
    words = found.words.replace("\n", "") + (found.result if isinstance(found.result, str) else "")
    if found.result == whole or (path.name in words and (found.result is None or "damaged" in words)):
        return None
    how = "refused without its name" if found.result is None else "another result, in silence"
    return f"{what}: {how}: {found.words[-300:]!r}"


def _copy(stored: Path, at: Path) -> None:
    shutil.copytree(stored, at)
    (at / "out").mkdir()


def answered(name: str, stored: Path, folder: Path) -> Any:
    """The answer to the files as they are."""
    _copy(stored, folder / "whole")
    found = FILES[name][1](folder / "whole", stored)
    shutil.rmtree(folder / "whole")
    assert found.result is not None, found.words
    return found.result


def check(name: str, damages: list[tuple[str, int]], stored: Path, folder: Path) -> None:
    whole = answered(name, stored, folder)
    assert answered(name, stored, folder) == whole, "two answers to the same files differ, so that damage shows nothing"
    found = [one_damage(name, kind, number, stored, folder, whole) for kind, number in damages]
    if problems := [one for one in found if one is not None]:
        pytest.fail("\n".join(problems), pytrace=False)


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_harmless_or_refused_by_name(name: str, stored: Path, tmp_path: Path) -> None:
    kind = KINDS[list(FILES).index(name) % len(KINDS)]  # the next file has the next one
    check(name, [(kind, 0)], stored, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", FILES)
def test_every_damage_is_harmless_or_refused_by_name(name: str, stored: Path, tmp_path: Path) -> None:
    each = -(-GRID // len(FILES))
    check(name, [(kind, number) for kind in KINDS for number in range(1, 1 + each)], stored, tmp_path)
