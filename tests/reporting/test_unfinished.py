"""Runs that are missing, unfinished or without some of their files."""

from __future__ import annotations

import base64
import json
import re
import struct
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch

from hardneg.comparing.arms import parse_arm
from hardneg.comparing.runs import run_of
from hardneg.pages.graph_drawing import thumbnail
from hardneg.reporting import write_report
from hardneg.training.loop.records import text_of
from hardneg.training.loop.runs import Run
from support.reports import ARMS, make_comparison, make_data, make_run, read


def test_a_single_run(tmp_path: Path) -> None:
    result = make_run(tmp_path / "run", ARMS[2], 0, make_data(tmp_path), accuracy=0.8125)
    written = write_report(tmp_path / "run", tmp_path / "pages" / "one.html")
    assert written == tmp_path / "pages" / "one.html"
    page = read(written)
    head, line = page.cells["results"]
    cell = dict(zip(head, line, strict=True))
    assert "against the first, points" not in cell
    assert (cell["10-NN accuracy, %"], cell["effective temperature"], cell["steps"]) == ("81.25", "0.25", "50")
    assert cell["false negatives"] == f"{100 * result['final']['false_negatives']:.1f} %"
    assert "Not complete" not in page.words
    assert not page.with_class("dot")
    assert not page.with_class("badge"), "a run alone needs no letter"
    assert sum(tag == "img" for tag, _ in page.tags) == 4 + 4 * (8 + 4 + 8)


def test_missing_and_unfinished_runs_are_named(tmp_path: Path) -> None:
    make_comparison(tmp_path, ARMS[:3])
    for name in ("config.json", "result.json", "metrics.jsonl", "embeddings.npz"):
        (tmp_path / "runs" / "arm0-seed1" / name).unlink()
    (tmp_path / "runs" / "arm1-seed2" / "result.json").unlink()
    (tmp_path / "runs" / "arm2-seed0" / "metrics.jsonl").unlink()
    page = read(write_report(tmp_path))
    assert f"{ARMS[0]}, seed 1: no run directory with these options" in page.words
    assert f"{ARMS[1]}, seed 2: not finished (last record at step 50)" in page.words
    assert f"{ARMS[2]}, seed 0: no records over training (metrics.jsonl)" in page.words
    assert len(page.cells["results"]) == 1 + 3, "the table is that of comparison.json all the same"


def test_a_comparison_that_was_stopped_shows_what_is_finished(tmp_path: Path) -> None:
    make_comparison(tmp_path, ARMS[:2])
    (tmp_path / "comparison.json").unlink()
    (tmp_path / "runs" / "arm1-seed1" / "result.json").unlink()
    page = read(write_report(tmp_path))
    assert "not finished, so there is no answer yet" in page.words
    head, first, second = page.cells["results"]
    column = head.index("10-NN accuracy of every seed, %")
    assert first[column].split() == ["80.00", "82.00", "81.00"]
    assert second[column].split() == ["85.00", "86.50"]
    assert "simclr(temperature=0.25), seed 1: not finished" in page.words
    titles = re.findall(r"<title>(simclr\(temperature=0.25\), seed \d): ", (tmp_path / "report.html").read_text())
    assert titles == ["simclr(temperature=0.25), seed 0", "simclr(temperature=0.25), seed 2"]


def test_tuned_arms_find_their_runs_and_say_what_was_taken(tmp_path: Path) -> None:
    summary = make_comparison(tmp_path, ARMS[:2])
    # The second arm took 0.1, so that the runs at 0.25 are not its own.
    summary["tuned"] = {ARMS[0]: {"temperature": 0.5}, ARMS[1]: {"temperature": 0.1}}
    summary["comparison"]["tune"] = {"temperature": [0.1, 0.5]}
    (tmp_path / "comparison.json").write_text(json.dumps(summary))
    words = read(write_report(tmp_path)).words
    assert f"chosen: {ARMS[0]}: temperature=0.5; {ARMS[1]}: temperature=0.1" in words
    assert f"{ARMS[1]}, seed 0: no run directory with these options" in words
    assert f"{ARMS[0]}, seed 0: no run" not in words


def test_runs_of_a_version_with_another_default_are_known_by_their_folders(tmp_path: Path) -> None:
    summary = make_comparison(tmp_path, ARMS[:2])
    for number, text in enumerate(ARMS[:2]):
        arm = parse_arm(text).with_defaults(summary["comparison"]["common"])
        for seed in range(3):
            run = (tmp_path / "runs" / f"arm{number}-seed{seed}").rename(run_of(arm, seed, tmp_path).path)
            config = json.loads((run / "config.json").read_text())
            config["options"]["weight_decay"] = 1e-6
            (run / "config.json").write_text(json.dumps(config))
    assert "no run directory" not in read(write_report(tmp_path)).words


@pytest.mark.parametrize(
    ("lost", "reported"),
    [
        ("embeddings", "no finished run has saved its embeddings"),
        ("images", "No images are shown"),
        ("other images", "report needs the images that run was evaluated on"),
    ],
)
def test_without_embeddings_or_images_the_section_says_so(tmp_path: Path, lost: str, reported: str) -> None:
    make_run(tmp_path / "run", ARMS[0], 0, make_data(tmp_path))
    if lost == "embeddings":
        (tmp_path / "run" / "embeddings.npz").unlink()
    elif lost == "images":
        (tmp_path / "data.npz").unlink()
    else:
        images = np.zeros((8, 8, 8), np.uint8)
        labels = np.arange(8) % 2
        np.savez(tmp_path / "data.npz", images=images, labels=labels, test_images=images, test_labels=labels)
    page = read(write_report(tmp_path / "run"))
    assert reported in page.words
    assert not any(tag == "img" for tag, _ in page.tags)


def test_a_run_that_has_only_begun_or_has_no_labels(tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = make_run(run, ARMS[0], 0, make_data(tmp_path))
    (run / "result.json").write_text(json.dumps({key: result[key] for key in ("final", "steps", "seconds", "epochs")}))
    assert "There is no accuracy" in read(write_report(run)).words
    for name in ("result.json", "metrics.jsonl", "embeddings.npz"):
        (run / name).unlink()
    page = read(write_report(run))
    assert "not finished (last record at step 0)" in page.words
    assert "No run has records over training" in page.words
    assert "the data have no labels, or no run is finished" in page.words


def test_an_unfinished_run_shows_what_it_has(tmp_path: Path) -> None:
    run = tmp_path / "run"
    make_run(run, ARMS[2], 0, make_data(tmp_path))
    (run / "result.json").unlink()
    page = read(write_report(run))
    head, line = page.cells["results"]
    cell = dict(zip(head, line, strict=True))
    figures = (cell["effective temperature"], cell["false negatives"], cell["hardness"], cell["clamped"], cell["steps"])
    assert figures == ("0.25", "14.0 %", "0.200", "6.0 %", "50")
    assert cell["kNN accuracy, %"] == cell["seconds"] == "n/a"
    assert "This run is not finished, so there is no accuracy yet." in page.words
    assert "Measured by" not in page.words


def test_a_finished_seed_is_not_mixed_with_one_that_is_under_way(tmp_path: Path) -> None:
    make_comparison(tmp_path, ARMS[:2])
    (tmp_path / "comparison.json").unlink()
    for seed in (0, 1):
        (tmp_path / "runs" / f"arm0-seed{seed}" / "result.json").unlink()
        (tmp_path / "runs" / f"arm0-seed{seed}" / "metrics.jsonl").write_text(text_of([{"step": 20, "hardness": 0.9}]))
    head, first, _ = read(write_report(tmp_path)).cells["results"]
    assert (first[head.index("hardness")], first[head.index("steps")]) == ("0.100", "50")


def with_records(run: Path, number: int) -> None:
    """The run as if it had recorded so often."""
    (run / "metrics.jsonl").write_text(text_of(Run(run).metrics()[-number:]))


def test_one_record_is_no_curve(tmp_path: Path) -> None:
    make_comparison(tmp_path, ARMS[:2], seeds=2)
    for run in (tmp_path / "runs").iterdir():
        with_records(run, 1)
    page = read(write_report(tmp_path))
    assert "Every run has only one record, of step 50, so there is no curve to draw. --option log_every=1" in page.words
    assert "never changes" not in page.words
    assert not any("over training" in (a.get("aria-label") or "") for tag, a in page.tags if tag == "svg")
    alone = read(write_report(tmp_path / "runs" / "arm0-seed0"))
    assert "The run has only one record, of step 50" in alone.words
    make_run(tmp_path / "longer", ARMS[0], 0, make_data(tmp_path))
    assert "only one record" not in read(write_report(tmp_path / "longer")).words


def test_a_run_without_negatives_and_its_warnings_are_reported(tmp_path: Path) -> None:
    result = make_run(tmp_path / "run", ARMS[0], 0, make_data(tmp_path))
    result["final"]["empty"] = 1.0
    (tmp_path / "run" / "result.json").write_text(json.dumps(result))
    Run(tmp_path / "run").warn("2 images are odd.")
    words = read(write_report(tmp_path / "run")).words
    assert "What to know about these runs" in words
    assert f"{ARMS[0]}: 100% of the anchors had no negative in the last records" in words
    assert f"{ARMS[0]}: 2 images are odd." in words


def test_not_a_number_is_left_out(tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = make_run(run, ARMS[0], 0, make_data(tmp_path))
    records = Run(run).metrics()
    for record in records:
        record["false_negatives"] = None
    (run / "metrics.jsonl").write_text(text_of(records))
    (run / "result.json").write_text(json.dumps(result | {"final": records[-1]}))
    written = write_report(run)
    head, line = read(written).cells["results"]
    assert line[head.index("false negatives")] == "n/a"
    assert "nan" not in written.read_text().lower().replace("base64", "").split('<h2 class="h">the hardest')[0]


@pytest.mark.parametrize("channels", [1, 3])
def test_thumbnails_hold_every_pixel(channels: int) -> None:
    image = pytest.importorskip("PIL.Image", reason="pictures need the extra report")
    pixels = torch.randint(0, 256, (channels, 5, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    data = base64.b64decode(thumbnail(pixels).partition("base64,")[2])
    read = np.asarray(image.open(BytesIO(data)))
    assert (read.reshape(5, 7, channels) == pixels.permute(1, 2, 0).numpy()).all()


def test_large_images_are_shrunk_and_small_ones_kept() -> None:
    def size(uri: str) -> tuple[int, int]:
        data = base64.b64decode(uri.partition("base64,")[2])
        width, height = struct.unpack(">II", data[16:24])
        return width, height

    assert size(thumbnail(torch.zeros(3, 96, 192, dtype=torch.uint8))) == (48, 24)
    assert size(thumbnail(torch.zeros(1, 8, 8, dtype=torch.uint8))) == (8, 8)
