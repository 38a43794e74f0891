"""An encoder whose weights lie anywhere never gets the vectors of an earlier state of it."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hardneg as hn
from hardneg.auditing.files import AuditOptions, audit_files
from hardneg.auditing.options import Settings
from hardneg.core.errors import ArgumentError, DataChanged, MiningWarning
from hardneg.mining import encode as encode_module
from hardneg.mining.job import run
from hardneg.mining.options import MineOptions
from support.mining_jobs import lines

HEAD = """
import functools, os, types
import numpy as np
import torch
from support.mining_jobs import encode as letters

HERE = os.path.dirname(os.path.abspath(__file__))

def weights():
    return float(np.load(os.path.join(HERE, "w" + ".npy"))[0])

def turned(texts, w):
    return np.roll(letters(texts), int(w), axis=1) + np.float32(0.3 * w) * letters([text[::-1] for text in texts])
"""
WAYS = {
    "a dict": "W = {'w': weights()}\ndef encode(texts):\n    return turned(texts, W['w'])\n",
    "a list": "W = [weights()]\ndef encode(texts):\n    return turned(texts, W[0])\n",
    "a tuple of arrays": "W = (np.array([weights()]),)\ndef encode(texts):\n    return turned(texts, W[0][0])\n",
    "an array": "W = np.array([weights()])\ndef encode(texts):\n    return turned(texts, W[0])\n",
    "an object": "W = types.SimpleNamespace(w=weights())\ndef encode(texts):\n    return turned(texts, W.w)\n",
    "an attribute of the function": "def encode(texts):\n    return turned(texts, encode.w)\nencode.w = weights()\n",
    "a bound method": (
        "class Model:\n    def __init__(self):\n        self.w = weights()\n"
        "    def encode(self, texts):\n        return turned(texts, self.w)\nencode = Model().encode\n"
    ),
    "a callable object": (
        "class Model:\n    def __init__(self):\n        self.w = weights()\n"
        "    def __call__(self, texts):\n        return turned(texts, self.w)\nencode = Model()\n"
    ),
    "a class attribute": "class W:\n    w = weights()\ndef encode(texts):\n    return turned(texts, W.w)\n",
    "a default argument": "def encode(texts, w=weights()):\n    return turned(texts, w)\n",
    "a keyword default": "def encode(texts, *, w=weights()):\n    return turned(texts, w)\n",
    "a partial of a list": "encode = functools.partial(lambda w, texts: turned(texts, w[0]), [weights()])\n",
    "a closure": (
        "def make():\n    w = {'w': weights()}\n    def encode(texts):\n        return turned(texts, w['w'])\n"
        "    return encode\nencode = make()\n"
    ),
    "a module without state_dict": (
        "class Model(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.w = [weights()]\n"
        "    def forward(self, texts):\n        return turned(texts, self.w[0])\nencode = Model()\n"
    ),
    "a cached loader": (
        "@functools.cache\ndef load():\n    return weights()\ndef encode(texts):\n    return turned(texts, load())\n"
    ),
    "a file read at each call": "def encode(texts):\n    return turned(texts, weights())\n",
    "the environment": "def encode(texts):\n    return turned(texts, float(os.environ['WEIGHTS_OF_THIS_TEST']))\n",
}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Writes the module ``ways_of_this_test``, as if each run after it were a process of its own."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("WEIGHTS_OF_THIS_TEST", "0")
    np.save(tmp_path / "w.npy", np.zeros(1))
    monkeypatch.delitem(sys.modules, "ways_of_this_test", raising=False)

    def write(source: str) -> None:
        (tmp_path / "ways_of_this_test.py").write_text(HEAD + source)

    return write


def again(job: MineOptions, weight: float | None = None) -> Any:
    """The rows that a new process mines, after the weights were set."""
    sys.modules.pop("ways_of_this_test", None)
    if weight is not None:
        np.save(Path(job.queries).with_name("w.npy"), np.full(1, weight))
        os.environ["WEIGHTS_OF_THIS_TEST"] = str(weight)
    run(job)
    return lines(job.out)


@pytest.mark.parametrize("way", list(WAYS))
def test_changed_weights_are_encoded_again_wherever_they_are(
    way: str, job: MineOptions, module: Callable[[str], None], tmp_path: Path
) -> None:
    module(WAYS[way])
    job = replace(job, encoder="ways_of_this_test:encode", cache_key=None)
    before, after = again(job, 0.0), again(job, 3.0)
    assert after != before
    assert after == again(replace(job, out=str(tmp_path / "fresh.jsonl")))


def test_a_key_reuses_vectors_and_another_key_does_not(
    job: MineOptions, module: Callable[[str], None], tmp_path: Path
) -> None:
    module(WAYS["a dict"])
    job = replace(job, encoder="ways_of_this_test:encode", cache_key="a")
    before = again(job, 0.0)
    assert again(job, 3.0) == before  # as the user says
    assert again(replace(job, cache_key="b")) != before


def test_a_note_tells_that_nothing_is_reused(job: MineOptions) -> None:
    with pytest.warns(MiningWarning, match="cache_key") as heard:
        run(replace(job, cache_key=None, rescore="support.mining_jobs:overlap", negatives="Uniform()"))
    kinds = [one.message.kind for one in heard if isinstance(one.message, MiningWarning)]
    assert kinds.count("not cached") == 3  # queries, corpus, scores
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(replace(job, rescore="support.mining_jobs:overlap", negatives="Uniform()"))


def test_vectors_of_one_run_serve_its_audit_and_are_replaced_by_the_next(job: MineOptions) -> None:
    job = replace(job, cache_key=None, negatives="Rank(1, 40)", k=4)
    kept = []
    for _ in range(2):
        run(job)
        audited = audit_files(AuditOptions(job.out, settings=Settings(frontier=False)))
        assert audited.row("mined").effective_number == pytest.approx(4)
        kept.append(sorted(path.name for path in Path(f"{job.out}.embeddings").rglob("*.npy")))
    assert len(kept[0]) == len(kept[1])
    assert not set(kept[0]) & set(kept[1])


@pytest.mark.parametrize("what", ["encoder", "rescore"])
def test_a_killed_job_without_a_key_is_computed_again(
    what: str, job: MineOptions, module: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its vectors nor its pieces are those of the function as it is now."""
    source = "W = {'w': weights()}\ndef scores(pairs):\n    return [(len(d) * (1 + W['w'])) % 7 for _, d in pairs]\n"
    module(WAYS["a dict"] + source)
    own = {what: f"ways_of_this_test:{'encode' if what == 'encoder' else 'scores'}"}
    job = replace(job, cache_key=None, negatives="Uniform()", **own)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("hardneg.mining.job.write_output", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            again(job, 0.0)
    assert again(job, 3.0) == again(replace(job, out=str(tmp_path / "fresh.jsonl")))


@pytest.mark.parametrize("which", [{"part": "0/2"}, {"merge": True}])
@pytest.mark.parametrize("what", ["encoder", "rescore"])
def test_parts_need_a_key_for_functions(which: dict[str, Any], what: str, job: MineOptions) -> None:
    named = {"encoder": {}, "rescore": {"rescore": "support.mining_jobs:overlap", "negatives": "Uniform()"}}[what]
    with pytest.raises(ArgumentError, match="cache_key"):
        run(replace(job, cache_key=None, **named, **which))
    run(replace(job, **named, **which))


def test_an_audit_encodes_by_a_function_as_it_is(job: MineOptions, module: Callable[[str], None]) -> None:
    module(WAYS["a list"])
    job = replace(job, encoder="ways_of_this_test:encode", cache_key=None, negatives="Rank(1, 40)", k=4)
    again(job, 0.0)
    options = AuditOptions(job.out, encoder=job.encoder, settings=Settings(frontier=False))
    before = audit_files(options).row("mined")
    np.save(Path(job.queries).with_name("w.npy"), np.full(1, 3.0))
    sys.modules.pop("ways_of_this_test", None)
    assert audit_files(options).row("mined") != before


def test_a_data_set_keeps_the_vectors_of_a_function_by_its_key(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="needs the extra 'text'")
    from support.mining_jobs import encode

    calls: list[int] = []

    def model(texts: list[str]) -> np.ndarray:
        calls.append(len(texts))
        return encode(texts)

    pairs = datasets.Dataset.from_dict({"a": [f"cat {i}" for i in range(20)], "b": [f"dog {i} sun" for i in range(20)]})
    options: dict[str, Any] = {"model": model, "negatives": "Uniform()", "k": 2, "verbose": False}
    plain = hn.mine(pairs, **options).to_dict()
    kept = {**options, "cache_folder": str(tmp_path / "cache")}
    with pytest.warns(MiningWarning, match="cache_key"):
        assert hn.mine(pairs, **kept).to_dict() == plain
    assert not (tmp_path / "cache").exists()
    assert hn.mine(pairs, cache_key="1", **kept).to_dict() == plain
    calls.clear()
    assert hn.mine(pairs, cache_key="1", **kept).to_dict() == plain
    assert calls == []
    hn.mine(pairs, cache_key="2", **kept)
    assert calls


def test_a_model_with_modules_of_the_users_own_needs_a_key() -> None:
    library = pytest.importorskip("sentence_transformers", reason="needs the extra 'text'")
    import torch

    from hardneg.mining.cache_key import key_of_model

    class Own(torch.nn.Module):
        def forward(self, features: Any) -> Any:
            return features

    model = library.SentenceTransformer(modules=[Own()], device="cpu")
    assert key_of_model("", model) is None
    assert key_of_model("", model, "1") == key_of_model("", model, "1") != key_of_model("", model, "2")


def test_a_run_file_that_is_replaced_while_it_is_mined_is_an_error(
    job: MineOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "other.trec"
    path.write_text("".join(f"q{i} Q0 d{(i + j) % 60} {j} {1.0 / (j + 1)} x\n" for i in range(20) for j in range(1, 9)))
    job = replace(job, runs=(f"other={path}",), negatives="Uniform()")
    make = encode_module.embed

    def embed(*given: Any, **more: Any) -> Any:
        path.write_text(path.read_text().replace(" d5", " d6"))
        return make(*given, **more)

    monkeypatch.setattr("hardneg.mining.inputs.embed", embed)
    with pytest.raises(DataChanged, match=r"other\.trec"):
        run(job)
