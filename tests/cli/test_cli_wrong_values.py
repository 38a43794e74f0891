"""train and compare on the command line: wrong values are named before anything is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.command import hardneg

pytest.importorskip("yaml", reason="configuration files need the extra train")


@pytest.mark.parametrize(
    ("recipe", "flag", "text", "message"),
    [
        ("simclr", "--temperature", "linear(0.5, 0)", "of at least 0.0001, got linear(0.5, 0), which ends"),
        (
            "simclr",
            "--tau-plus",
            "linear(2, 0.1)",
            "between 0 and 0.999, got linear(2, 0.1), which begins at 2",
        ),
        ("simclr", "--temperature", "liner(0.5, 0.1)", "Did you mean linear?"),
        ("simclr", "--temperature", "linear(0.5)", "it takes start, end"),
        ("simclr", "--temperature", "linear", "a number or a schedule"),
        ("sogclr", "--temperature", "linear(0.5, 0.1)", "a number as --temperature"),
        ("emc2", "--tau-plus", "linear(0, 0.1)", "--tau-plus of 0"),
    ],
)
def test_wrong_schedules_are_named_before_data_is_loaded(
    recipe: str, flag: str, text: str, message: str, tmp_path: Path
) -> None:
    done = hardneg("train", recipe, flag, text, "--data", "npz:nowhere.npz", "--out", str(tmp_path / "run"))
    assert done.exit_code == 2
    assert message in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("epocs: 3", "'epocs' is not known. Did you mean epochs? It is a whole number of at least 1, by default 50."),
        ("tempratur: 0.1", "Did you mean temperature? It is a number or a schedule"),
        ("weight-decy: 0", "Did you mean weight_decay? It is a number of at least 0."),
        ("precison: no", "Did you mean precision? It is one of no, bf16, fp16, by default no."),
        ("resum: true", "Did you mean resume? It is true or false, by default False."),
        ("zzz: 1", "FILE: 'zzz' is not known. Known: data, "),
    ],
)
def test_an_unknown_name_in_a_file_gets_the_nearest(text: str, answer: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    done = hardneg("train", "simclr", "--config", str(file))
    assert done.exit_code == 2
    assert answer.replace("FILE", str(file)) in done.stderr


def test_an_unknown_argument_gets_the_nearest(tmp_path: Path) -> None:
    done = hardneg("train", "simclr", "--negatives", "Tilt(betta=1)", "--out", str(tmp_path / "run"))
    assert done.exit_code == 2
    assert "did you mean beta? It takes beta, detach=False, source=None" in done.stderr


WRONG = [
    ("--epochs 0", "--epochs", "of at least 1"),
    ("--epochs many", "--epochs", "integer"),
    ("--temperature 0", "--temperature", "of at least 0.0001"),
    ("--temperature nan", "--temperature", "of at least 0.0001"),
    ("--learning-rate inf", "--learning-rate", "of at least 0"),
    ("--tau-plus 1", "--tau-plus", "between 0 and 0.999"),
    ("--precision half", "--precision", "no, bf16, fp16"),
    ("--num-negatives some", "--num-negatives", "support, candidates, mass"),
    ("--tempratur 1", "--tempratur", "--temperature"),
]


def test_wrong_values_are_named_before_anything_is_loaded() -> None:
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from hardneg.cli.app import app\n"
        f"for words in {[words for words, *_ in WRONG]!r}:\n"
        "    done = CliRunner().invoke(app, ['train', 'simclr', *words.split()], env={'COLUMNS': '250'})\n"
        "    print(repr((words, done.exit_code, done.stderr, done.stdout)))\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *lines, loaded = done.stdout.splitlines()
    assert loaded == "False"
    for (words, option, allowed), line in zip(WRONG, lines, strict=True):
        words_of, exit_code, reported, printed = eval(line)
        assert (words_of, exit_code, printed) == (words, 2, "")
        assert option in reported
        assert allowed in reported, reported


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("augment", "cifr", "Did you mean cifar?"),
        ("augment", "cifar(blur=1)", "blur_probability"),
        ("negatives", "SameCluster()", "candidates of the batch"),
        ("batches", "near()", "proximity"),
        ("encoder", "resnet19", "Did you mean resnet18?"),
    ],
)
def test_wrong_words_are_named_before_data_is_loaded(option: str, value: str, allowed: str, tmp_path: Path) -> None:
    """The data is not there, and is not read."""
    done = hardneg("train", "simclr", f"--{option}", value, "--data", "npz:nowhere.npz", "--out", str(tmp_path / "run"))
    reported = " ".join(done.stderr.split())
    assert done.exit_code == 2
    assert value.partition("(")[0] in reported
    assert allowed in reported
    assert "nowhere" not in reported
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("epochs: 0", "train needs --epochs of at least 1, got 0."),
        ("epochs: 2.5", "train needs --epochs to be a whole number, got 2.5."),
        ("epochs: many", "train needs --epochs to be a whole number, got 'many'."),
        ("epochs: true", "train needs --epochs to be a whole number, got True."),
        (
            "temperature: warm",
            """train needs --temperature to be a number or a schedule such as "linear(0.5, 0.1)", got""",
        ),
        ("negatves: Tilt(1.0)", "Did you mean negatives?"),
        ("temperature: .nan", "train needs --temperature of at least 0.0001, got nan."),
        ("tau_plus: 1.0", "train needs --tau-plus between 0 and 0.999, got 1.0."),
        ("compile: sometimes", "train needs --compile to be true or false, got 'sometimes'."),
        ("negatives: [Uniform()]", "train needs --negatives to be text, got ['Uniform()']."),
        ("device: tpu", "train needs --device to be one of auto, cpu, cuda, got 'tpu'."),
        ("epoch: 1", "Did you mean epochs?"),
        ("- epochs", "--config needs lines like 'temperature: 0.5', got "),
        ("batch-size: 32\nepochs: 2\nbatch_size: 64", "which sets batch_size twice"),
        ("epochs: [", "which is not valid YAML in line 1: expected the node content, but found"),
    ],
)
def test_wrong_files_are_named(text: str, reported: str, requested: list[Any], tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text)
    done = hardneg("train", "simclr", "--config", str(tmp_path / "run.yaml"))
    assert done.exit_code == 2
    assert reported in done.stderr
    assert requested == []


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        ((), "at least two arms"),
        (("--arm", "simclr()"), "at least two arms"),
        (("--arm", "simclr()", "--arm", "simclr()"), "distinct arms"),
        (
            ("--arm", "simclr()", "--arm", "hcl()", "--metric", "f1"),
            "--metric to be one of auto, knn, 1nn, linear, retrieval",
        ),
        (("--arm", "simclr()", "--arm", "hcl()", "--seeds", "1"), "--seeds"),
        (("--arm", "simclr()", "--arm", "hcl()", "--tune", "temperature"), "temperature=0.1,0.2"),
        (
            ("--arm", "simclr()", "--arm", "hcl()", "--tune", "temperature=0.1", "--tune", "temperature=0.2"),
            "one --tune for temperature, got tune=('temperature=0.1', 'temperature=0.2')",
        ),
        (
            ("--arm", "simclr()", "--arm", "hcl()", "--option", "epoch=3"),
            "--option: 'epoch' is not known. Did you mean",
        ),
        (("--arm", "simclr()", "--arm", "hcl()", "--tune", "temprature=1,2"), "--tune: 'temprature' is not known. Did"),
        (
            ("--arm", "simclr()", "--arm", "hcl()", "--data", "digit"),
            "--data: 'digit' is not known. Did you mean digits?",
        ),
        (("--arm", "simclr()", "--arm", "hcl(beta=-1)"), "beta in [0.0, inf), got beta=-1"),
        (("--arm", "simclr()", "--arm", "simclr(temperature=0)"), "a temperature above 0, got temperature=0"),
        (("--arm", "simclr()", "--arm", "smclr()"), "Did you mean simclr?"),
        (("--arm", "simclr()", "--arm", "simclr() @ proximty()"), "Did you mean proximity?"),
        (("--config", "no-such-file.yaml", "--arm", "hcl()"), "no-such-file.yaml"),
    ],
)
def test_a_wrong_comparison_is_named_before_anything_runs(
    arguments: tuple[str, ...], reported: str, tmp_path: Path
) -> None:
    done = hardneg("compare", *arguments, "--out", str(tmp_path / "out"))
    assert done.exit_code == 2
    assert reported in done.stderr, done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("verb", "flag", "ours"),
    [
        (("mine", "a.jsonl"), "--num-negatives", "-k"),
        (("mine", "a.jsonl"), "--num_negatives", "-k"),
        (("mine", "a.jsonl"), "--qrels", "--judgements"),
        (("mine", "a.jsonl"), "--relative-margin", "BelowPositive(relative="),
        (("train", "simclr"), "--lr", "--learning-rate"),
        (("train", "simclr"), "--num-epochs", "--epochs"),
        (("train", "simclr"), "--learning_rate", "--learning-rate"),
        (("compare",), "--lr", "--option learning_rate="),
        (("compare",), "--learning-rate", "--option learning_rate="),
        (("evaluate", "run"), "--output-dir", None),
    ],
)
def test_flags_of_other_libraries_suggest_ours(verb: tuple[str, ...], flag: str, ours: str | None) -> None:
    done = hardneg(*verb, flag, "1")
    assert done.exit_code == 2
    if ours is not None:
        assert ours in done.stderr.partition("No such option")[2]


def test_a_plain_path_as_data_suggests_its_kinds(tmp_path: Path) -> None:
    from hardneg.core.errors import ArgumentError
    from hardneg.training.data.kinds import kind_of

    (tmp_path / "photos" / "cats").mkdir(parents=True)
    for name in ("a.csv", "a.npz", "a.txt"):
        (tmp_path / name).touch()
    for name, kinds in (("photos", ["folder"]), ("a.csv", ["pairs", "text"]), ("a.npz", ["npz"]), ("a.txt", ["text"])):
        path = tmp_path / name
        with pytest.raises(ArgumentError) as error:
            kind_of(str(path))
        assert all(f"{kind}:{path}" in str(error.value.fix) for kind in kinds)


@pytest.mark.parametrize("name", ["/no/folder", "./no-folder", "~/no-folder"])
def test_a_path_as_data_that_does_not_exist_is_named(name: str) -> None:
    from hardneg.core.errors import NoFile
    from hardneg.training.data.kinds import kind_of

    with pytest.raises(NoFile) as error:
        kind_of(name)
    assert f"folder:{name}" in str(error.value.fix)
