"""The skill for coding agents: its form, commands, and templates that run. Its Python blocks run in test_docs.py."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.main import get_command

import hardneg as hn
from hardneg.cli.app import app
from support.libraries import part_of_sentence_transformers

SKILL = Path(__file__).parents[2] / "skills" / "hardneg"
PAGES = sorted(SKILL.rglob("*.md"))
WORDS = 20


def test_the_head_names_and_describes_it() -> None:
    yaml = pytest.importorskip("yaml")
    head = yaml.safe_load((SKILL / "SKILL.md").read_text(encoding="utf-8").split("---\n")[1])
    assert head["name"] == SKILL.name
    assert 100 < len(head["description"]) < 1024


def test_links_lead_to_files_and_every_file_is_linked() -> None:
    text = (SKILL / "SKILL.md").read_text(encoding="utf-8")
    linked = {*re.findall(r"\]\((references/[\w.-]+)\)", text), *re.findall(r"`(templates/[\w.]+)`", text)}
    files = {path.relative_to(SKILL).as_posix() for path in SKILL.rglob("*") if path.is_file()}
    assert linked == {name for name in files if name != "SKILL.md" and "__pycache__" not in name}


def flags_of(words: list[str]) -> set[str]:
    command: Any = get_command(app)
    while (below := getattr(command, "commands", None)) and words:
        command = below[words.pop(0)]
    return {flag for one in command.params for flag in (*one.opts, *one.secondary_opts)} | {"-h", "--help"}


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_commands_have_verbs_and_flags_that_exist(page: Path) -> None:
    for line in re.findall(r"^hardneg .*$", page.read_text(encoding="utf-8"), re.MULTILINE):
        words = shlex.split(line, comments=True)[1:]
        used = {word for word in words if re.fullmatch(r"-\w|--[\w-]+", word)}
        assert used <= flags_of(words), line


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_names_and_expressions_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"\bhn\.([A-Za-z_]\w*)", text):
        assert hasattr(hn, name), name
    distributions = "|".join(hn.registered_negatives())
    for quoted in re.findall(rf"`((?:{distributions})\([^`]*\))`", text):
        if not re.search(r"\((beta|x|pairs|start, stop|inner, outer|\.\.\.)|=\.\.\.", quoted):
            for text_of_one in quoted.split("`, `"):
                hn.parse(text_of_one)


def test_the_loop_template_improves_its_encoder(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn", reason="needs the extra eval")
    template = runpy.run_path(str(SKILL / "templates" / "train_loop.py"))
    template["main"].__globals__["EPOCHS"] = 5
    template["main"]()
    before, after = (float(one) for one in re.findall(r"accuracy ([\d.]+)", capsys.readouterr().out))
    assert after > before + 0.1


@pytest.fixture
def beir(tmp_path: Path) -> Path:
    """Queries of two words, and documents of their translations, which a model has to learn."""
    pairs = np.random.default_rng(0).permutation(list(combinations(range(WORDS), 2)))[:120]
    queries, documents = ([" ".join(f"{side}{word}" for word in pair) for pair in pairs] for side in "qd")
    folder = tmp_path / "data"
    (folder / "qrels").mkdir(parents=True)
    for name, texts in (("queries", queries), ("corpus", documents)):
        lines = [json.dumps({"_id": f"{name}{i}", "text": text}) for i, text in enumerate(texts)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    for split, rows in (("train", range(90)), ("test", range(90, 120))):
        lines = [f"queries{i}\tcorpus{i}\t1" for i in rows]
        (folder / "qrels" / f"{split}.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *lines]))
    return folder


def test_the_fine_tuning_template_mines_audits_trains_and_evaluates(beir: Path, tmp_path: Path) -> None:
    for name in ("sentence_transformers", "accelerate", "datasets", "pyarrow", "ir_measures"):
        pytest.importorskip(name, reason="needs the extras eval, text and train")
    from sentence_transformers import SentenceTransformer
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"{side}{i}": i + WORDS * (side == "d") for i in range(WORDS) for side in "qd"}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="q0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    model = str(tmp_path / "model")
    static = part_of_sentence_transformers("modules").StaticEmbedding(tokenizer, embedding_dim=16)
    SentenceTransformer(modules=[static], device="cpu").save_pretrained(model)
    command = [sys.executable, str(SKILL / "templates" / "finetune.py"), str(beir), "--model", model]
    more = ["--out", str(tmp_path / "out"), "--epochs", "8", "--batch-size", "30", "--learning-rate", "0.1"]
    done = subprocess.run([*command, *more], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    before, after = (float(one) for one in re.findall(r"([\d.]+) (?:before|after)", done.stdout))
    assert after > before + 0.2
    assert (tmp_path / "out" / "audit" / "audit.html").exists()
    assert SentenceTransformer(str(tmp_path / "out" / "model"), device="cpu").encode(["q1 q2"]).shape == (1, 16)
