"""Images and their texts: what is read, held out, evaluated, compared and loaded, and wrong input."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize
from typer.testing import CliRunner

import hardneg as hn
import hardneg.comparing.runs
from hardneg.cli.app import app
from hardneg.comparing import Comparison, compare
from hardneg.core.errors import HardnegError, NoFile, UnknownName
from hardneg.reporting import write_report
from hardneg.training.data.image_texts import ImageTexts, ranks
from hardneg.training.data.inputs import Sided
from hardneg.training.encoders import Represent
from hardneg.training.evaluation.sts import evaluate_sts, read_sts, sts_figures
from hardneg.training.loop.data_record import fingerprint
from hardneg.training.loop.parts import splits
from hardneg.training.options import CLIPOptions
from hardneg.training.recipes import run_recipe
from support.errors import raises
from support.html_page import Page
from support.texts import image_text_table, sts_file
from support.training_runs import run

pytest.importorskip("accelerate", reason="training needs the extra train")
Image = pytest.importorskip("PIL.Image", reason="image files need the extra vision")


@pytest.fixture
def table(tmp_path: Path) -> str:
    return image_text_table(tmp_path / "bars.jsonl", 60)


def short(data: str, **options: Any) -> dict[str, Any]:
    return {"data": data, "epochs": 2, "batch_size": 16, "log_every": 1, "dim": 12, "device": "cpu", **options}


def read(data: str) -> ImageTexts:
    return ImageTexts.read(data.partition(":")[2], CLIPOptions(data=data))


def test_tables_and_folders_are_read_alike(table: str, tmp_path: Path) -> None:
    data = read(table)
    assert (len(data), tuple(data.pictures.images.shape)) == (72, (60, 3, 8, 8)), "an image is held once"
    assert data.captions.texts[:2] == ["a red bar at place 0 on green", "green with red, number 0"]
    assert data.picture_of[:4].tolist() == [0, 0, 1, 2], "the first image has two texts"
    assert data.documents[:4].tolist() == [0, 0, 2, 3], "two texts of one image are one document"
    assert read(f"{table}[file_name,text]@4").pictures.images.shape == (60, 3, 4, 4)
    (tmp_path / "metadata.jsonl").write_text((tmp_path / "bars.jsonl").read_text())
    assert read(f"imagetext:{tmp_path}").captions.texts == data.captions.texts
    with raises(UnknownName, name="words"):
        read(f"imagetext:{tmp_path}[file_name,words]")
    beside = tmp_path / "beside"
    beside.mkdir()
    for number in (0, 1):
        Image.open(tmp_path / f"bar{number}.png").save(beside / f"{number}.png")
    (beside / "0.txt").write_text("one\ntwo\n")
    (beside / "1.txt").write_text("three")
    found = read(f"imagetext:{beside}")
    assert (found.captions.texts, found.documents.tolist()) == (["one", "two", "three"], [0, 0, 2])
    assert torch.equal(found.pictures.images[found.picture_of[2]], data.pictures.images[1])


def test_the_fingerprint_is_that_of_an_image_for_each_pair(table: str) -> None:
    data = read(table)
    assert fingerprint(data) != fingerprint(replace(data, picture_of=data.picture_of.flip(0)))
    pictures = data.pictures
    doubled = [torch.cat([part, part]) for part in (pictures.images, pictures.digests)]
    twice = replace(pictures, images=doubled[0], digests=doubled[1], ids=torch.arange(120))
    assert fingerprint(data) == fingerprint(replace(data, pictures=twice, picture_of=data.picture_of + 60))


def test_the_pairs_of_an_image_are_held_out_together(table: str) -> None:
    found = splits(CLIPOptions(data=table))
    train, test = (set(part.documents.tolist()) for part in found[:2])
    assert train.isdisjoint(test)
    assert len(found.train) + len(found.test) == 72
    assert len(test) == 12, "a fifth of the 60 images"
    assert [len(part.pictures) for part in found[:2]] == [48, 12], "each with its own images only"
    whole, held = read(table), found.test
    images, before = held.pictures.images[held.picture_of], whole.pictures.images[whole.picture_of]
    assert torch.equal(images, before[held.ids]), "and each text with its image"
    rest = splits(CLIPOptions(data=table, evaluate_on="validation"))
    assert test.isdisjoint(rest.test.documents.tolist()), "validation leaves the test split alone"


def test_the_rank_of_a_document_is_that_of_its_nearest_row() -> None:
    random = torch.Generator().manual_seed(0)
    queries, others = (torch.randn(20, 4, generator=random) for _ in range(2))
    documents = torch.arange(20) // 2
    cosines = normalize(queries, dim=1) @ normalize(others, dim=1).T
    for i, rank in enumerate(ranks(queries, others, documents).tolist()):
        best = [max(float(cosines[i, j]) for j in range(20) if j // 2 == one) for one in range(10)]
        assert rank == sum(one > best[i // 2] for one in best)


def test_retrieval_improves_over_the_start_in_both_directions(table: str, tmp_path: Path) -> None:
    options = short(table, epochs=20, dim=32, learning_rate=3e-3)
    result = run("clip", tmp_path / "run", options)
    wanted = CLIPOptions(**options)
    found = splits(wanted)
    prepared = found._replace(train=found.train.prepared(wanted), test=found.test.prepared(wanted))
    before = prepared.test.evaluate(prepared, Represent(prepared.train.encoder(wanted)), wanted).figures
    assert result["both_ways"] > before["both_ways"] + 0.2
    assert result["both_ways"] == pytest.approx((result["image_to_text"] + result["text_to_image"]) / 2)
    for way in ("image_to_text", "text_to_image"):
        recall = result["recall"][way]
        assert result[way] == recall["@1"] <= recall["@5"] <= recall["@10"]
    encoder: Any = hn.load_encoder(tmp_path / "run")
    index = torch.arange(len(found.test))
    images = encoder(Sided(first=found.test.pictures.images[found.test.picture_of[index]]))  # which it normalises
    places = torch.unique(found.test.documents, return_inverse=True)[1]
    right = (ranks(images, encoder.encode(found.test.captions.texts), places) == 0).double().mean()
    assert float(right) == result["image_to_text"]


def test_pairs_are_compared_and_shown(table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        hardneg.comparing.runs,
        "in_a_process",
        lambda recipe, options, one, environ, **_: run_recipe(recipe, options, one.path, quiet=True),
    )
    arms = ("clip()", "clip(negatives='Tilt(1.0)')")
    summary = compare(Comparison(arms, 3, short(table, epochs=1)), tmp_path / "out", jobs=1, show=lambda line: None)
    assert summary["metric"] == "both_ways"
    assert summary["verdicts"][0]["half_width"] > 0
    page = Page(write_report(tmp_path / "out").read_text())
    assert "retrieval both ways" in page.words
    assert "number" in page.words


def test_a_view_is_a_crop_and_texts_stay_whole(table: str) -> None:
    options = CLIPOptions(data=table)
    data = read(table).prepared(options)
    index = torch.arange(6)
    (image, text), (again, _) = data.views(index, 0, 0), data.views(index, 0, 0)
    assert isinstance(image, Sided)
    assert torch.equal(image.first, again.first)
    assert not torch.equal(image.first, data.views(index, 1, 0)[0].first)
    assert text.second.rows.tolist() == data.captions.plain(index).rows.tolist()
    assert not torch.equal(image.first[0], image.first[1]), "another crop for each text of an image"
    assert torch.equal(data.plain(index).first[0], data.plain(index).first[1])
    blind = data.prepared(replace(options, augment="cifar"))
    assert blind.described() != data.described()


@pytest.mark.parametrize(
    ("rows", "columns", "match"),
    [
        ([{"image": "none.png", "caption": "a"}], "", "readable images, got .*none.png"),
        (
            [{"image": "none.png", "caption": "a"}, {"image": "/no/b.png", "caption": "a"}],
            "",
            "2 of 2 that are unreadable",
        ),
        ([{"image": "bar0.png", "caption": " "}], "", "a text in every row of the column 'caption'"),
        ([{"image": "bar0.png", "words": "a"}], "", "a column among caption, text.*name both"),
        ([{"image": "bar0.png", "caption": "a"}], "[image]", "imagetext:TABLE"),
        ([{"image": "bar0.png", "caption": "a"}], "[image,word]", "'word' is not known"),
        ([{"image": "bar0.png", "caption": "a"}], "@2", "at least 4 pixels"),
        ([{"image": "bar0.png", "caption": "a"}] * 3, "", "more images with different texts, got 1"),
        ([{"image": "bar0.png", "caption": "a"}, {"image": "wide.png", "caption": "b"}], "", "images of one size"),
    ],
)
def test_wrong_pairs_are_reported_and_nothing_is_left(
    rows: list[dict[str, str]], columns: str, match: str, table: str, tmp_path: Path
) -> None:
    Image.fromarray(np.zeros((8, 12, 3), dtype=np.uint8)).save(tmp_path / "wide.png")
    (tmp_path / "wrong.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(HardnegError, match=match):
        run("clip", tmp_path / "run", short(f"imagetext:{tmp_path / 'wrong.jsonl'}{columns}"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"encoder": "resnet19"}, "--encoder: 'resnet19' is not known"),
        ({"text_encoder": "resnet18"}, "--text-encoder: 'resnet18' is not known"),
        ({"augment": "jitters"}, "--augment"),
        ({"data": "imagetext:"}, "imagetext:TABLE"),
        ({"evaluate_with": "sts:x"}, "no --evaluate-with for pairs"),
    ],
)
def test_wrong_options_are_reported_before_the_run(
    options: dict[str, Any], match: str, table: str, tmp_path: Path
) -> None:
    with pytest.raises(HardnegError, match=match):
        run("clip", tmp_path / "run", short(table) | options)
    assert not (tmp_path / "run").exists()


def test_an_empty_folder_is_reported(tmp_path: Path) -> None:
    with raises(NoFile, who="data", what="metadata.jsonl", got="which has none"):
        read(f"imagetext:{tmp_path}")
    with raises(NoFile, who="data", path="metadata.jsonl", got="which does not exist"):
        read(f"imagetext:{tmp_path}[image,caption]")


def test_the_texts_of_a_run_on_pairs_are_evaluated(table: str, tmp_path: Path) -> None:
    run("clip", tmp_path / "run", short(table, epochs=1))
    file = sts_file(tmp_path / "sts.tsv").partition(":")[2]
    done = CliRunner().invoke(app, ["evaluate", str(tmp_path / "run"), "--sts", file, "--json"])
    assert done.exit_code == 0, done.output
    pairs, encode = read_sts(file), hn.load_encoder(tmp_path / "run").encode
    assert json.loads(done.output)["sts"] == sts_figures(evaluate_sts(pairs, encode))
