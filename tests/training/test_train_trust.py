"""What is sealed and refused: a run never resumes from damaged files, and its lock follows no link."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hardneg.core.errors import Damaged, FileError, HardnegWarning
from hardneg.io.embeddings import load_embeddings
from hardneg.training.loop.checkpoints import NEWEST, PREVIOUS
from hardneg.training.loop.runs import Run
from support.errors import raises, warns
from support.training_runs import assert_same, everything, options_of, run

pytest.importorskip("accelerate", reason="training needs the extra train")


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


# Damage.


def test_a_damaged_checkpoint_falls_back_on_the_one_before(data: str, begun: Path, whole: Path) -> None:
    assert Run(begun).checkpoints.previous.exists()
    size = 8 * (begun / NEWEST).stat().st_size
    flip(begun / NEWEST, size // 3)
    with pytest.warns(HardnegWarning, match=r"checkpoint.pt is damaged .*resumes from the checkpoint before it"):
        run("simclr", begun, options_of(data), resume=True)
    assert_same(everything(begun), everything(whole))


def test_no_whole_checkpoint_is_refused_by_name(data: str, begun: Path) -> None:
    for name in (NEWEST, PREVIOUS):
        flip(begun / name, 4 * (begun / name).stat().st_size)
    before = {file: file.read_bytes() for file in begun.iterdir()}
    with pytest.raises(Damaged) as raised:
        run("simclr", begun, options_of(data), resume=True)
    assert raised.value.path == begun / NEWEST
    assert before == {file: file.read_bytes() for file in before}


@pytest.mark.parametrize("name", [NEWEST, "config.json", "result.json", "metrics.jsonl", "embeddings.npz"])
def test_flipped_bits_are_found(name: str, whole: Path, tmp_path: Path) -> None:
    """Each reading gives what was written, or raises Damaged with the file's name."""
    shutil.copytree(whole, tmp_path / "run")
    file, draw = tmp_path / "run" / name, random.Random(0)
    good = file.read_bytes()

    def content() -> Any:
        one = Run(tmp_path / "run")
        if name == "embeddings.npz":
            return [part.tolist() for part in load_embeddings(file)]
        return {
            NEWEST: lambda: str(one.checkpoints.load()),
            "config.json": one.config,
            "result.json": one.result,
            "metrics.jsonl": one.metrics,
        }[name]()

    expected, refused = content(), 0
    for _ in range(60):
        flip(file, draw.randrange(8 * len(good)))
        found = refused_or(content, file)
        refused += found is None
        if isinstance(found, dict):  # the name of the checksum itself may be hit, and what it covers is whole
            found = {key: value for key, value in found.items() if key in expected}
        assert found in (None, expected)
        file.write_bytes(good)
    assert refused >= 50


def refused_or(content: Callable[[], Any], file: Path) -> Any:
    """The content, or None if it is refused by the name of the file."""
    try:
        return content()
    except Damaged as error:
        return None if error.path == file else pytest.fail(str(error))


def test_the_end_of_the_last_record_counts(whole: Path, tmp_path: Path) -> None:
    """Half a last line is a killed writer's; a changed one is damage, also if its end was hit."""
    lines = Run(whole).metrics_path.read_bytes().splitlines(keepends=True)[:2]
    expected, file, size = Run(whole).metrics()[:2], tmp_path / "metrics.jsonl", 8 * sum(map(len, lines))
    for bit in [*range(size - 5 * 8, size), *range(size - 8 * len(lines[-1]), size, 41)]:
        file.write_bytes(b"".join(lines))
        flip(file, bit)
        found = refused_or(Run(tmp_path).metrics, file)
        assert found in (None, expected), bit
    file.write_bytes(b"".join(lines)[:-20])
    assert Run(tmp_path).metrics() == expected[:-1]


def test_a_config_without_checksum_and_record_of_what_was_trained_is_read(data: str, begun: Path, whole: Path) -> None:
    config = Run(begun).config()
    del config["trained"]
    (begun / "config.json").write_text(json.dumps(config))
    run("simclr", begun, options_of(data), resume=True)
    assert_same(everything(begun), everything(whole))


def test_a_checkpoint_without_its_checksum_is_damaged(data: str, begun: Path) -> None:
    state = Run(begun).load()
    torch.save(state, begun / NEWEST)
    (begun / PREVIOUS).unlink()
    with pytest.raises(Damaged) as refused:
        run("simclr", begun, options_of(data), resume=True)
    assert refused.value.path == begun / NEWEST


@pytest.mark.parametrize("name", ["whole", "begun"])
@pytest.mark.parametrize("keep", [lambda n: [*range(n - 1)], lambda n: [*range(1, n)], lambda n: [0, *range(2, n)]])
def test_lost_records_are_damage(
    name: str, keep: Callable[[int], list[int]], data: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """The last, the first or one between, of a finished run and of one that is resumed."""
    shutil.copytree(request.getfixturevalue(name), tmp_path / "run")
    file = Run(tmp_path / "run").metrics_path
    lines = file.read_text().splitlines(keepends=True)
    assert len(lines) > 2
    file.write_text("".join(lines[number] for number in keep(len(lines))))
    with pytest.raises(Damaged) as refused:
        Run(tmp_path / "run").metrics() if name == "whole" else run(
            "simclr", tmp_path / "run", options_of(data), resume=True
        )
    assert refused.value.path == file


def test_a_run_whose_records_were_deleted_resumes_with_a_warning(data: str, begun: Path, whole: Path) -> None:
    Run(begun).metrics_path.unlink()
    with warns("lost records", "metrics.jsonl"):
        run("simclr", begun, options_of(data), resume=True)
    assert 0 < len(Run(begun).metrics()) < len(Run(whole).metrics())


@pytest.mark.parametrize(
    "change",
    [
        {"recipe": None},
        {"options": []},
        {"trained": {}},
        {"trained": {"encoder": {}, "data": {"train": 3}}},
        {"trained": "auto"},
    ],
    ids=str,
)
def test_a_config_of_another_shape_is_refused_by_name(change: dict[str, Any], data: str, begun: Path) -> None:
    (begun / "config.json").write_text(json.dumps(Run(begun).config() | change))
    with raises(Damaged, who="train", what="the description", got="the description"):
        run("simclr", begun, options_of(data), resume=True)


def test_a_damaged_list_of_warnings_is_mentioned(tmp_path: Path) -> None:
    one = Run(tmp_path)
    one.warn("first")
    one.warn("second")
    assert [warned.text for warned in one.warned()] == ["first", "second"]
    flip(tmp_path / "warnings.json", 8 * (tmp_path / "warnings.json").read_text().index("second"))
    ((_, mentioned),) = one.warned()
    assert "warnings.json is damaged" in mentioned
    (tmp_path / "warnings.json").write_text('["no record"]')
    assert one.warned()[0].kind == "damaged"


# The lock.


@pytest.mark.skipif(os.name == "nt", reason="links of POSIX")
def test_a_lock_never_follows_a_link(data: str, tmp_path: Path) -> None:
    precious = tmp_path / "precious.txt"
    precious.write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(precious)
    with pytest.raises(FileError, match=r"\.lock.*link") as raised:
        run("simclr", tmp_path / "run", options_of(data))
    assert raised.value.path == tmp_path / "run" / ".lock"
    assert precious.read_text() == "mine"
    (tmp_path / "run" / ".lock").unlink()
    os.link(precious, tmp_path / "run" / ".lock")
    with Run(tmp_path / "run").exclusive():
        assert precious.read_text() == "mine"
