"""The encoder of a run elsewhere: loaded, exported and read back with the same features."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import hardneg as hn
import hardneg.comparing.runs
from hardneg.cli.app import app
from hardneg.cli.options import FORMATS as OF_COMMAND_LINE
from hardneg.comparing import Comparison, compare
from hardneg.core.errors import ArgumentError, Damaged, FileError, NoFile
from hardneg.io.embeddings import load_embeddings, load_evaluated
from hardneg.training.augmentation.augment import TINY
from hardneg.training.augmentation.transforms import from_transform
from hardneg.training.data.images import load
from hardneg.training.encoders import Represent, auto_encoder, build_encoder, embed
from hardneg.training.evaluation.protocols import transfer
from hardneg.training.export import FORMATS, Export, export, how_to_load
from hardneg.training.loop.data_record import digest_of_weights
from hardneg.training.loop.parts import splits
from hardneg.training.loop.runs import Run
from hardneg.training.options import RECIPES, CLIPOptions
from hardneg.training.trained import CHANNELS, HUB_WEIGHTS, Preprocessing, may_run_code
from hardneg.training.weights import resnet_names
from support.errors import raises
from support.graphs import graph_file
from support.libraries import library
from support.texts import text_file, vector_file
from support.training_runs import few_digits, run, short

pytest.importorskip("accelerate", reason="training needs the extra train")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return few_digits(tmp_path_factory.mktemp("export") / "digits.npz", 64)


@pytest.fixture(scope="module")
def trained(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export") / "run"
    run("simclr", path, short(data, epochs=2, monitor_every=1))
    return path


def names_of_resnet18() -> set[str]:
    """As torchvision and timm have them, without the layer of classes."""
    norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    names = ["conv1.weight", *(f"bn1.{one}" for one in norm)]
    for layer in (1, 2, 3, 4):
        for block in (0, 1):
            where = f"layer{layer}.{block}"
            for number in (1, 2):
                names += [f"{where}.conv{number}.weight", *(f"{where}.bn{number}.{one}" for one in norm)]
            if layer > 1 and block == 0:
                names += [f"{where}.downsample.0.weight", *(f"{where}.downsample.1.{one}" for one in norm)]
    return set(names)


class TestLoading:
    def test_the_features_are_those_of_the_run(self, trained: Path, data: str) -> None:
        encoder = hn.load_encoder(trained)
        assert not encoder.training
        expected = load_embeddings(trained / "embeddings.npz")[2]
        images = load(data, "test").images
        for given in (images, images.float() / 255.0):  # as users have them
            torch.testing.assert_close(encoder.features(given), expected)  # type: ignore[operator]
        with pytest.raises(ArgumentError, match="normalise=False"):
            encoder(TINY.plain(images))
        raw = hn.load_encoder(trained, normalise=False)
        assert torch.equal(embed(raw, images, TINY.plain), expected)

    def test_the_best_weights_are_those_of_the_monitor(self, trained: Path) -> None:
        saved = torch.load(trained / "checkpoint.best.pt")["method"]
        best = hn.load_encoder(trained, "best").state_dict()
        assert all(torch.equal(value, saved[f"encoder.{name}"]) for name, value in best.items())

    @pytest.mark.filterwarnings("ignore:The run in .* has collapsed")  # one epoch of few images
    @pytest.mark.parametrize("recipe", ["moco", "byol", "nnclr", "swav"])
    def test_the_encoder_is_loaded_without_predictor_and_prototypes(
        self, recipe: str, data: str, tmp_path: Path
    ) -> None:
        more = {"version": "v3"} if recipe == "moco" else {}
        run(recipe, tmp_path / "run", short(data, epochs=1, hidden_dim=16, **more))
        encoder = hn.load_encoder(tmp_path / "run", normalise=False)
        expected = load_embeddings(tmp_path / "run" / "embeddings.npz")[2]
        assert torch.equal(embed(encoder, load(data, "test").images, TINY.plain), expected)

    def test_the_scale_of_views_of_a_callable_is_measured(self, data: str, tmp_path: Path) -> None:
        flip = from_transform(lambda image: image.flip(-1) if torch.rand(()) < 0.5 else image, lambda x: x / 127.5 - 1)
        run("simclr", tmp_path / "run", short(data, epochs=1), views=flip)
        expected = load_embeddings(tmp_path / "run" / "embeddings.npz")[2]
        found: Any = hn.load_encoder(tmp_path / "run")
        torch.testing.assert_close(found.features(load(data, "test").images), expected, atol=1e-4, rtol=1e-4)

    def test_views_that_are_no_mean_and_std_are_refused(self, data: str, tmp_path: Path) -> None:
        path = tmp_path / "run"
        own = from_transform(lambda image: image.flip(-1) if torch.rand(()) < 0.5 else image, lambda x: (x / 255) ** 3)
        run("simclr", path, short(data, epochs=1), views=own)
        with pytest.raises(ArgumentError, match="normalise=False"):
            hn.load_encoder(path)
        with pytest.raises(ArgumentError, match="--no-normalise"):
            export(path, "safetensors")
        assert export(path, "safetensors", normalise=False).exists()
        expected = load_embeddings(path / "embeddings.npz")[2]
        found = hn.load_encoder(path, normalise=False)
        assert torch.equal(embed(found, load(data, "test").images, lambda x: (x / 255) ** 3), expected)

    def test_what_is_not_there_is_named(self, data: str, tmp_path: Path, trained: Path) -> None:
        run("simclr", tmp_path / "run", short(data, epochs=1))
        with raises(
            NoFile,
            who="load_encoder",
            path="checkpoint.best.pt",
            what="a run",
            got="which does not exist",
            fix="--monitor-every",
        ):
            hn.load_encoder(tmp_path / "run", "best")
        with raises(ArgumentError, who="load_encoder", got="'first'"):
            hn.load_encoder(trained, "first")
        with pytest.raises(ValueError, match=r"no config\.json"):
            hn.load_encoder(tmp_path)


class TestResNets:
    @pytest.mark.parametrize("name", ["resnet18", "resnet18-imagenet"])
    def test_names_are_those_of_torchvision_and_timm(self, name: str) -> None:
        backbone: Any = build_encoder(name, 3, seed=0).backbone
        found = resnet_names(backbone)
        assert set(found) == names_of_resnet18()
        assert len(found) == len(backbone.state_dict())
        assert found["conv1.weight"].shape == ((64, 3, 7, 7) if "imagenet" in name else (64, 3, 3, 3))
        assert torch.equal(found["layer4.1.conv2.weight"], backbone.layers[7].residual[3].weight)
        assert torch.equal(found["layer3.0.downsample.1.bias"], backbone.layers[4].shortcut[1].bias)

    def test_bottlenecks_have_three_convolutions(self) -> None:
        found = resnet_names(build_encoder("resnet50", 3, seed=0).backbone)  # type: ignore[arg-type]
        assert {"layer1.0.downsample.0.weight", "layer3.5.conv3.weight", "layer4.2.bn3.running_var"} <= set(found)
        assert len([name for name in found if name.endswith("conv2.weight")]) == 16

    def test_group_normalisation_has_no_names_there(self) -> None:
        with raises(ArgumentError, who="export", what="ResNet", got="one with group normalisation"):
            resnet_names(build_encoder("resnet18", 3, norm="group").backbone)  # type: ignore[arg-type]

    def test_auto_has_a_stem_of_imagenet_above_64_pixels(self) -> None:
        assert [auto_encoder(size) for size in (28, 29, 64, 65)] == ["tiny", *["resnet18"] * 2, "resnet18-imagenet"]
        from torch.utils.flop_counter import FlopCounterMode

        with torch.device("meta"), FlopCounterMode(display=False) as flops, torch.no_grad():
            build_encoder(auto_encoder(224), 3).eval()(torch.zeros(1, 3, 224, 224))
        assert flops.get_total_flops() < 4e9  # 54e9 with the stem of CIFAR


def test_a_run_of_a_resnet_is_exported(data: str, tmp_path: Path) -> None:
    run("simclr", tmp_path / "run", short(data, epochs=1, encoder="resnet18"))
    encoder: Any = hn.load_encoder(tmp_path / "run")
    for kind in ("torchvision", "timm"):
        done = CliRunner().invoke(app, ["export", str(tmp_path / "run"), "--format", kind])
        assert done.exit_code == 0, done.output
        assert "model.conv1 = torch.nn.Conv2d(1, 64, 3, 1, 1, bias=False)" in done.output
        state = torch.load(tmp_path / "run" / f"{kind}.pth", weights_only=True)
        assert set(state) == names_of_resnet18()
        assert torch.equal(state["layer2.0.conv1.weight"], encoder.backbone.layers[2].residual[0].weight)
        beside = json.loads((tmp_path / "run" / f"{kind}.pth.json").read_text())
        assert {name: beside[name] for name in PREPARED} == PREPARED
        assert "mean, std = [0.5], [0.25]" in done.output
    assert "timm.create_model('resnet18', num_classes=0, in_chans=1)" in how_to_load(tmp_path / "run", "timm", tmp_path)
    with raises(ArgumentError, who="export", what="stem of ImageNet", got="resnet18"):
        export(tmp_path / "run", "detectron2")


PREPARED = {"mean": [0.5], "std": [0.25], "size": [8, 8], "channels": "grey"}
"""Preprocessing of the digits: in the metadata of every format."""


@pytest.mark.parametrize("format", ["safetensors", "hub", "torch-export"])
def test_the_printed_lines_give_the_features_of_the_run(format: str, trained: Path, data: str, tmp_path: Path) -> None:
    library("safetensors")
    path = export(trained, format, tmp_path / FORMATS[format].file)
    images = load(data, "test").images.float() / 255.0
    names: dict[str, Any] = {"hardneg": hn, "torch": torch, "images": images}
    exec(how_to_load(trained, format, path), names)
    expected = load_embeddings(trained / "embeddings.npz")[2]
    torch.testing.assert_close(names["features"].detach(), expected, rtol=0, atol=1e-6)
    if format == "torch-export":
        about = {"preprocessing": ""}
        torch.export.load(path, extra_files=about)
        assert json.loads(about["preprocessing"]) == PREPARED
        return
    assert names["encoder"].preprocessing._asdict() == PREPARED
    with library("safetensors").safe_open(path / HUB_WEIGHTS if path.is_dir() else path, "pt") as file:
        assert set(file.keys()) == set(hn.load_encoder(trained).state_dict())
        options = json.loads(file.metadata()["options"])
        assert (options["dim"], options["data"]) == (32, "npz:digits.npz")  # without the user's folder
        assert json.loads(file.metadata()["preprocessing"]) == PREPARED


def test_onnx_takes_images_in_0_to_1(trained: Path, data: str, tmp_path: Path) -> None:
    onnx = library("onnx")
    library("onnxscript")
    from onnx.reference import ReferenceEvaluator

    path = export(trained, "onnx", tmp_path / "encoder.onnx")
    model = onnx.load(path)
    assert json.loads({one.key: one.value for one in model.metadata_props}["preprocessing"]) == PREPARED
    images = load(data, "test").images[:3].float() / 255.0  # other than the two that were traced
    (features,) = ReferenceEvaluator(model).run(None, {"images": images.numpy()})
    expected = load_embeddings(trained / "embeddings.npz")[2][:3]
    torch.testing.assert_close(torch.from_numpy(features), expected, rtol=1e-5, atol=1e-5)
    assert "in [0, 1]" in how_to_load(trained, "onnx", path)


def output_of(name: str, path: Path, channels: int = 3) -> Export:
    """An export of a run that was never trained, for images of 32 x 32 pixels."""
    prepared = Preprocessing([0.4] * channels, [0.2] * channels, [32, 32], CHANNELS[channels])
    trained = {"encoder": {"name": name}, "data": {"train": {"shape": [channels, 32, 32]}}, "views": "some"}
    options = {"data": "folder:/home/user/photos", "negatives": "Tilt(1.0)"}
    return Export(path, {"recipe": "simclr", "options": options, "trained": trained}, prepared, {"linear": 0.5})


def test_detectron2_reads_its_own_names(tmp_path: Path) -> None:
    """Names of a ResNet in Detectron2's model zoo, whose rules differ for stem, stages and shortcuts."""
    encoder: Any = build_encoder("resnet18-imagenet", 3, seed=0)
    output = output_of("resnet18-imagenet", tmp_path / "detectron2.pkl")
    FORMATS["detectron2"].write(encoder, output)
    found = pickle.loads(output.path.read_bytes())
    norm = ("weight", "bias", "running_mean", "running_var")
    names = {"stem.conv1.weight", *(f"stem.conv1.norm.{one}" for one in norm)}
    for stage in (2, 3, 4, 5):
        for block in (0, 1):
            parts = ["conv1", "conv2", *["shortcut"] * (stage > 2 and block == 0)]
            for part in (f"res{stage}.{block}.{one}" for one in parts):
                names |= {f"{part}.weight", *(f"{part}.norm.{one}" for one in norm)}
    assert set(found["model"]) == names
    assert found["matching_heuristics"] is True
    np.testing.assert_array_equal(
        found["model"]["res4.0.shortcut.weight"], encoder.backbone.layers[4].shortcut[0].weight.detach().numpy()
    )
    cfg = SimpleNamespace(MODEL=SimpleNamespace(RESNETS=SimpleNamespace()), INPUT=SimpleNamespace())
    exec("\n".join(FORMATS["detectron2"].lines(output)), {"cfg": cfg})
    assert cfg.MODEL.PIXEL_MEAN == [102.0] * 3  # of pixels in [0, 255]
    assert (cfg.INPUT.FORMAT, cfg.MODEL.RESNETS.DEPTH) == ("RGB", 18)


def test_a_hub_folder_of_a_resnet_is_for_timm(tmp_path: Path) -> None:
    library("safetensors")
    encoder = build_encoder("resnet18-imagenet", 3, seed=0)
    output = output_of("resnet18-imagenet", tmp_path / "hub")
    FORMATS["hub"].write(encoder, output)
    assert library("safetensors.torch").load_file(tmp_path / "hub" / HUB_WEIGHTS).keys() == names_of_resnet18()
    config = json.loads((tmp_path / "hub" / "config.json").read_text())
    assert config["architecture"] == "resnet18"
    assert config["pretrained_cfg"]["mean"] == [0.4] * 3
    assert config["pretrained_cfg"]["input_size"] == [3, 32, 32]
    card = (tmp_path / "hub" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: timm\n")
    for part in (
        "local-dir:FOLDER",
        "`Tilt(1.0)`",
        "| linear probe | 50.00 |",
        "`folder:photos`",
        "| channels | RGB |",
    ):
        assert part in card
    assert "/home/user" not in card


@pytest.mark.parametrize("content", [b"no tensors", None])
def test_a_file_that_no_export_has_written_is_named(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    if content is None:
        library("safetensors.torch").save_file({"conv1.weight": torch.zeros(2)}, path)
    else:
        path.write_bytes(content)
    with raises(FileError, who="load_encoder", path="weights.safetensors", fix="hardneg export"):
        hn.load_encoder(path)


@pytest.mark.parametrize(
    ("recipe", "options"), [("moco", {"version": "v3"}), ("cmc", {"num_draws": 20}), ("quick-thoughts", {"dim": 8})]
)
def test_the_encoder_before_training_is_loaded(recipe: str, options: dict[str, Any], data: str, tmp_path: Path) -> None:
    named = text_file(tmp_path / "some.txt", 32) if recipe == "quick-thoughts" else data
    run(recipe, tmp_path / "run", {**short(named, epochs=1), "batch_size": 16, **options})
    config = Run(tmp_path / "run").config()
    found = hn.load_encoder(tmp_path / "run", "initial", normalise=False)
    assert digest_of_weights(found) == config["trained"]["encoder"]["initial_weights"]


def test_formats_that_do_not_fit_are_named(trained: Path) -> None:
    with raises(ArgumentError, who="export", what="ResNet", got="tiny"):
        export(trained, "torchvision")
    with raises(ArgumentError, who="export", what="stem of ImageNet", got="tiny"):
        export(trained, "detectron2")
    with raises(ArgumentError, who="export", what="or hf:PATH", got="tiny"):
        export(trained, "sentence-transformers")
    with raises(ArgumentError, who="export", got="'tflite'"):
        export(trained, "tflite")
    assert tuple(FORMATS) == OF_COMMAND_LINE


class TestTexts:
    @pytest.mark.filterwarnings("ignore:The run in .* has collapsed")  # the CLS tokens of random weights are alike
    @pytest.mark.parametrize("kind", ["st", "hf"])
    def test_sentence_transformers_encode_the_same(self, kind: str, tmp_path: Path) -> None:
        library("sentence_transformers")
        from sentence_transformers import SentenceTransformer

        from hardneg.training.trained import text_encoder_of
        from support.tiny_bert import texts, tiny_bert

        model = tiny_bert(tmp_path)
        model.save(str(tmp_path / "st"))
        (plain,) = tmp_path.glob("bert-*")
        (tmp_path / "lines.txt").write_text("\n".join(texts(80, seed=0)))
        path = tmp_path / "st" if kind == "st" else plain
        options = {"data": f"text:{tmp_path / 'lines.txt'}", "encoder": f"{kind}:{path}", "epochs": 1, "batch_size": 16}
        run("simcse", tmp_path / "run", {**options, "device": "cpu", "learning_rate": 0.01})
        exported = export(tmp_path / "run", "sentence-transformers", run_code=True)
        some = texts(9, seed=3)
        found = SentenceTransformer(str(exported), device="cpu").encode(some, convert_to_tensor=True)
        ours = text_encoder_of(tmp_path / "run", run_code=True).texts(some)
        torch.testing.assert_close(found, ours, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(found, model.encode(some, convert_to_tensor=True), atol=1e-3)  # it was trained

    def test_a_run_on_texts_is_evaluated_by_sts(self, tmp_path: Path) -> None:
        (tmp_path / "lines.txt").write_text("\n".join(f"a word {i} and the number {i * i}" for i in range(64)))
        options = {"data": f"text:{tmp_path / 'lines.txt'}", "epochs": 1, "batch_size": 16, "device": "cpu", "dim": 16}
        pairs = ["dev\t4\ta word\ta word", "dev\t2\ta word\ta number", "dev\t0\tthe 3\tword"]
        (tmp_path / "sts.tsv").write_text("\n".join(["split\tscore\tsentence1\tsentence2", *pairs]))
        monitor = f"sts('{tmp_path / 'sts.tsv'}')"
        run("simcse", tmp_path / "run", {**options, "monitor": monitor, "monitor_every": 1})
        command = ["evaluate", str(tmp_path / "run"), "--sts", str(tmp_path / "sts.tsv"), "--split", "dev", "--json"]
        found = json.loads(CliRunner().invoke(app, command).output)
        from hardneg.training.loop.runs import Run

        (look,) = [one["monitor"] for one in Run(tmp_path / "run").metrics() if "monitor" in one]
        assert found["sts"]["all"] == pytest.approx(look)


@pytest.mark.parametrize(("version", "refused"), [("5.9.0", True), ("6.0.0", False)])
def test_model_folders_that_may_run_code_are_refused(
    version: str, refused: bool, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", SimpleNamespace(__version__=version))
    assert may_run_code("st:folder") == refused
    for options in (RECIPES["simcse"](encoder="hf:folder"), CLIPOptions(text_encoder="hf:folder")):
        monkeypatch.setattr("hardneg.training.trained.options_in", lambda config, options=options: options)
        with raises(ArgumentError, who="load_encoder", what="no code", got="is built", fix="run_code=True"):
            hn.load_encoder(trained)


@pytest.mark.parametrize(("number", "kind"), [(10**399, Damaged), (10**20, ArgumentError)])
def test_a_config_with_an_endless_number_is_refused(
    number: int, kind: type[Exception], trained: Path, tmp_path: Path
) -> None:
    shutil.copytree(trained, tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    config = json.loads(path.read_text())
    del config["checksum"]
    config["options"]["dim"] = number
    path.write_text(json.dumps(config))
    with pytest.raises(kind, match=r"dim|config\.json"):
        hn.load_encoder(tmp_path / "run")


@pytest.mark.parametrize("recipe", ["infograph", "quick-thoughts", "cmc"])
def test_encoders_of_two_parts_are_loaded(recipe: str, tmp_path: Path) -> None:
    make = {"infograph": graph_file, "quick-thoughts": text_file, "cmc": few_digits}[recipe]
    data = make(tmp_path / "some.npz", 32)
    options = {"data": data, "epochs": 1, "batch_size": 16, "dim": 8, "device": "cpu"}
    run(recipe, tmp_path / "run", options)
    expected = load_evaluated(tmp_path / "run" / "embeddings.npz")[0]
    wanted = RECIPES[recipe](**options)
    found = Represent(hn.load_encoder(tmp_path / "run", normalise=False)).items(splits(wanted).test.prepared(wanted))
    torch.testing.assert_close(found, expected)
    if recipe == "cmc":
        encoder: Any = hn.load_encoder(tmp_path / "run")
        torch.testing.assert_close(encoder.features(splits(wanted).test.images), expected, atol=1e-4, rtol=1e-4)
    with raises(ArgumentError, who="export", fix="--format"):
        export(tmp_path / "run", "torchvision")


def test_an_encoder_of_texts_takes_texts(tmp_path: Path) -> None:
    data = text_file(tmp_path / "some.txt")
    for recipe in ("simcse", "quick-thoughts"):
        options = {"data": data, "epochs": 1, "batch_size": 16, "dim": 8, "device": "cpu"}
        run(recipe, tmp_path / recipe, options)
        expected = load_evaluated(tmp_path / recipe / "embeddings.npz")[0]
        texts = splits(RECIPES[recipe](**options)).test.texts
        encoder: Any = hn.load_encoder(tmp_path / recipe)
        torch.testing.assert_close(encoder.encode(texts), expected)
    for wrong in ("a text", []):
        with raises(ArgumentError, who="encode", what="more texts"):
            encoder.encode(wrong)


@pytest.mark.parametrize("recipe", ["graphcl", "clip"])
def test_an_encoder_is_loaded_without_its_data(recipe: str, tmp_path: Path) -> None:
    data = (graph_file if recipe == "graphcl" else vector_file)(tmp_path / "some.npz")
    run(recipe, tmp_path / "run", {"data": data, "epochs": 1, "batch_size": 16, "dim": 8, "device": "cpu"})
    before = hn.load_encoder(tmp_path / "run").state_dict()
    (tmp_path / "some.npz").unlink()
    assert export(tmp_path / "run", "safetensors").name == "encoder.safetensors"
    found = library("safetensors.torch").load_file(tmp_path / "run" / "encoder.safetensors")
    assert found.keys() == before.keys()
    assert all(torch.equal(found[name], before[name]) for name in before)


class TestTransfer:
    def test_to_its_own_data_gives_its_own_figures(self, trained: Path, data: str) -> None:
        result = json.loads((trained / "result.json").read_text())
        found = transfer(trained, data)
        assert {name: found[name] for name in ("knn", "1nn", "linear")} == {
            name: result[name] for name in ("knn", "1nn", "linear")
        }

    def test_on_the_command_line(self, trained: Path) -> None:
        done = CliRunner().invoke(app, ["evaluate", str(trained), "--on", "digits", "--json"])
        assert done.exit_code == 0, done.output
        found = json.loads(done.output)
        assert (found["data"], found["num_test"]) == ("digits", 360)

    def test_on_several_sets_each_has_its_own_figures(self, trained: Path, data: str) -> None:
        sets = ("digits", data)
        arguments = [part for one in sets for part in ("--on", one)]
        done = CliRunner().invoke(app, ["evaluate", str(trained), *arguments, "--json"])
        assert done.exit_code == 0, done.output
        each = json.loads(done.output)["on"]
        assert [(one["data"], one["knn"]) for one in each] == [(one, transfer(trained, one)["knn"]) for one in sets]
        table = CliRunner().invoke(app, ["evaluate", str(trained), *arguments]).output
        (probe,) = (line for line in table.splitlines() if "linear probe" in line)
        figures = [one["linear"] for found in each for one in (found, found["before_training"])]
        assert re.findall(r"[\d.]+ %", probe) == [f"{100 * figure:.2f} %" for figure in figures]
        assert CliRunner().invoke(app, ["evaluate", str(trained), "--on", "digits", "--on", "digits"]).exit_code == 2

    def test_other_features_of_nodes_are_named(self, tmp_path: Path) -> None:
        data, other = graph_file(tmp_path / "a.npz", 32), graph_file(tmp_path / "b.npz", 32, features=5)
        run("graphcl", tmp_path / "run", {"data": data, "epochs": 1, "batch_size": 16, "dim": 8, "device": "cpu"})
        with raises(ArgumentError, who="evaluate", got="5"):
            transfer(tmp_path / "run", other)
        assert transfer(tmp_path / "run", data)["svm"] == Run(tmp_path / "run").result()["svm"]  # type: ignore[index]

    def test_other_kinds_are_named(self, trained: Path, tmp_path: Path) -> None:
        (tmp_path / "lines.txt").write_text("a\nb\n")
        with raises(ArgumentError, who="evaluate", what="trained on"):
            transfer(trained, f"text:{tmp_path / 'lines.txt'}")


OWN = """
from torch import nn

def build(in_channels):
    return nn.Sequential(nn.Flatten(), nn.Linear(64 * in_channels, 24))

def wrong(in_channels):
    return nn.Conv2d(in_channels, 4, 3)
"""


class TestOwnEncoders:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        (tmp_path / "own.py").write_text(OWN)
        return tmp_path / "own.py"

    def test_of_a_file_are_trained_and_loaded(self, file: Path, data: str, tmp_path: Path) -> None:
        run("simclr", tmp_path / "run", short(data, epochs=1, encoder=f"{file}:build"))
        with raises(ArgumentError, who="load_encoder", fix="run_code=True"):
            hn.load_encoder(tmp_path / "run")
        encoder: Any = hn.load_encoder(tmp_path / "run", run_code=True, normalise=False)
        assert encoder.feature_dim == 24
        expected = load_embeddings(tmp_path / "run" / "embeddings.npz")[2]
        assert torch.equal(embed(encoder, load(data, "test").images, TINY.plain), expected)

    @pytest.mark.usefixtures("runs_here")
    def test_of_a_file_are_compared(self, file: Path, data: str, tmp_path: Path) -> None:
        common = {**short(data, epochs=1), "encoder": f"{file}:build"}
        found = compare(Comparison(("simclr()", "hcl()"), 2, common), tmp_path / "out", jobs=1, show=lambda line: None)
        assert len(found["rows"]) == 2

    @pytest.mark.parametrize(
        ("name", "message"),
        [("own.py:wrong", r"features \[b, d\], got \(2, 4, 6, 6\)"), ("own.py:none", "a function 'none'")],
    )
    def test_wrong_ones_are_named(self, name: str, message: str, file: Path) -> None:
        with pytest.raises(ValueError, match=message):
            build_encoder(str(file.parent / name), 1, size=8)

    def test_transformers_models_of_images(self, tmp_path: Path) -> None:
        transformers = library("transformers")
        config = transformers.ResNetConfig(
            num_channels=1, embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1], layer_type="basic"
        )
        torch.manual_seed(0)
        model = transformers.ResNetModel(config).eval()
        model.save_pretrained(tmp_path / "resnet")
        encoder = build_encoder(f"hf:{tmp_path / 'resnet'}", 1, seed=0).eval()
        images = torch.rand(2, 1, 32, 32)
        expected = model(pixel_values=images).pooler_output.flatten(1)
        torch.testing.assert_close(encoder.features(images), expected)
        with raises(ArgumentError, who="--encoder", what="3 channels"):
            build_encoder(f"hf:{tmp_path / 'resnet'}", 3)
