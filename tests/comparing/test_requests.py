"""What a comparison checks before it trains anything."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from hardneg.cli.app import app
from hardneg.comparing import compare
from hardneg.comparing.request import Comparison
from hardneg.core.errors import ArgumentError
from support.command import hardneg
from support.comparisons import Started, nothing
from support.errors import raises
from support.training_runs import short


@pytest.mark.parametrize(
    ("line", "reported"),
    [
        ("arms: [1, 2]", "arms to be a list of texts, got arms=[1, 2]"),
        ("arms: simclr()", "at least two arms, got arms=('simclr()',)"),
        ("arms:", "arms to be a list of texts, got arms=None"),
        ("out: 5", "--out to be text, got 5"),
        ("out:", "--out to be text, got None"),
        ("seeds: two", "--seeds to be a whole number, got 'two'"),
        ("seeds: true", "--seeds to be a whole number, got True"),
        ("jobs: 0", "--jobs of at least 1, got 0"),
        ("metric: 3", "--metric to be text, got 3"),
        ("metric: knm", "--metric to be one of auto, knn, 1nn, linear, retrieval"),
        ("tune: [0.1]", "tune to be a list of texts, got tune=[0.1]"),
        ("tune: {temperature: 0.1}", "tune to be a list of texts, got tune={'temperature': 0.1}"),
        ("tune: {temperature: []}", "--tune like temperature=0.1,0.2, got 'temperature='"),
        ("tune: {temperature: [warm]}", "--tune like temperature=0.1,0.2, got 'temperature=warm'"),
        ("tune: {temperature: [true]}", "--tune like temperature=0.1,0.2, got 'temperature=True'"),
        ("data: 5", "--data to be text, got 5"),
        ("epochs: many", "--epochs to be a whole number, got 'many'"),
    ],
)
def test_wrong_kinds_in_a_file_are_named(line: str, reported: str, started: Started, tmp_path: Path) -> None:
    file, name = tmp_path / "comparison.yaml", line.partition(":")[0]
    usual = {"arms": "[simclr(), hcl()]", "out": tmp_path / "out"}
    lines = [f"{key}: {value}" for key, value in usual.items() if key != name]
    file.write_text("\n".join([*lines, line]))
    done = hardneg("compare", "--config", str(file))
    assert (done.exit_code, started) == (2, []), done.output
    assert reported in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (("--arm", "hcl(seed=7)"), "the same seed for every arm, got seed=7 in 'hcl(seed=7)'"),
        (("--arm", "simclr(seed=7)"), "the same seed for every arm, got seed=7 in 'simclr(seed=7)'"),
        (("--arm", "simclr(epochs=3)"), "compare needs the same epochs for every arm"),
        (("--arm", "moco(epochs=8)"), "got epochs=8 in 'moco(epochs=8)'"),
        (("--arm", "moco(batch_size=100)"), "--batch-size of at most the 96 images"),
        (("--arm", "hcl()", "--tune", "beta=1,2"), "a tuned option in every arm, got simclr(tau_plus=0.2), which"),
        (("--arm", "hcl(beta=1)", "--tune", "temperature=0.1", "--tune", "beta=1"), "arms without beta, which --tune"),
        (("--arm", "hcl()", "--tune", "temperature=0.1", "--tune", "margin=1"), "--tune: 'margin' is not known."),
        (("--arm", "hcl()", "--tries", "4"), "a positive number of --tries, together with --tune"),
        (("--arm", "hcl()", "--tune-seeds", "4"), "a positive number of --tune-seeds, together with --tune"),
        (("--arm", "hcl()", "--tune", "temperature=0.2", "--tries", "3"), "3 distinct tries of temperature for"),
        (("--arm", "simclr(evaluate_on='validation')"), "the same evaluate_on for every arm"),
        (("--arm", "simclr(validation_share=0.1)"), "the same validation_share for every arm"),
        (("--arm", "simclr(data='digits')"), "the same data for every arm"),
        (("--arm", "hcl()", "--tune", "epochs=1,3"), "may differ between arms, not one of seed, data"),
        (("--arm", "hcl()", "--tune", "temperature=0.5,-1"), "--temperature of at least 0.0001, got -1.0"),
        (("--arm", "hcl()", "--tune", "dim=8.5"), "--dim to be a whole number, got 8.5"),
        (("--arm", "hcl()", "--option", "seed=5"), "compare needs the number of --seeds instead of a single seed"),
        (("--arm", "hcl()", "--option", "encoder=resnet19"), "Did you mean resnet18?"),
        (("--arm", "hcl()", "--option", "batches=proximty()"), "Did you mean proximity?"),
        (("--arm", "hcl()", "--option", "negatives=Tilt(2.0)"), "hcl() needs its own negatives, Tilt(1.0), got"),
        (("--arm", "hcl()", "--option", "queue=64"), "--option to be an option of at least one arm, got 'queue'"),
        (("--arm", "hcl()", "--batch-size", "100000"), "--batch-size of at most the 96 images"),
        # Of 96 images a validation split leaves 76.
        (("--arm", "hcl()", "--batch-size", "90", "--tune", "temperature=0.2"), "--batch-size of at most the 76"),
        (
            ("--arm", "hcl(temprature=1)"),
            "Did you mean temperature? It is called as hcl(temperature=0.5, tau_plus=0.1, beta=1",
        ),
        (("--arm", "simclr(temprature=1)"), "Did you mean temperature?"),
        (("--arm", "ring(foo=1)"), "'foo' is not known. Known in ring: temperature, inner, outer, dynamic_inner"),
        (("--arm", "moco(momentum=linear(0.1, 0.2))"), "only temperature and tau_plus may be schedules"),
        # What only a step of training would find
        (
            ("--arm", "emc2(negatives='Tilt(1.0)')"),
            "emc2(negatives='Tilt(1.0)') cannot be trained: emc2 needs --negatives to be",
        ),
        (("--arm", "sogclr(tau_plus=0.1)"), "sogclr(tau_plus=0.1) cannot be trained: sogclr needs --tau-plus of 0"),
        (("--arm", "simclr(negatives='SameCluster()')"), "cannot be trained: train needs --negatives for candidates"),
        (("--arm", "simclr(negatives=\"From('queue')\")"), "cannot be trained: train needs --negatives for candidates"),
        (("--arm", "simclr(negatives=\"BelowPositive(0.1, by='guide')\")"), "cannot be trained: train needs"),
        (("--arm", "hcl(beta=linear(1.0, -1.0))"), "cannot be trained: Tilt needs beta in [0.0, inf), got beta=-1.0"),
        (("--arm", "hcl() @ proximity(restart=linear(0.1, 2.0), warmup=0)"), "Proximity needs restart in [0.0, 1.0]"),
        (("--arm", "simclr(augment='cifar')"), "simclr(augment='cifar') cannot be trained: "),
        (("--arm", "simclr(encoder='torchvision:resnet19')"), "cannot be trained: "),
        (("--arm", "simclr(device='cpu', precision='fp16')"), "on a CPU, which has no fp16, got precision='fp16'"),
        (
            ("--arm", "sogclr()", "--tune", "tau_plus=0,0.1"),
            "arms without tau_plus, which --tune sets, got tau_plus=0.2 in",
        ),
        (("--arm", "simclr(temperature=0.1)", "--tune", "temperature=0.1,0.2"), "got temperature=0.1 in 'simclr(temp"),
        (("--arm", "hcl()", "--tune", "dim=8,8"), "distinct values in --tune"),
        (("--arm", "hcl()", "--tune", "dim=8,16", "--option", "dim=8"), "dim to be either tuned or given for all arms"),
        (("--arm", "hcl()", "--epochs", "9", "--option", "epochs=3"), "--epochs or --option epochs=..., got both"),
        (("--arm", "hcl()", "--batch-size", "8", "--option", "batch-size=3"), "--batch-size or --option batch_size"),
        (("--arm", "hcl()", "--option", "dim=8", "--option", "dim=16"), "one --option for dim"),
    ],
)
def test_what_cannot_be_compared_is_2_and_nothing_is_started(
    arguments: tuple[str, ...], reported: str, data: str, started: Started, tmp_path: Path
) -> None:
    usual = ("--arm", "simclr(tau_plus=0.2)", "--data", data, "--out", str(tmp_path / "out"))
    batch = () if "--batch-size" in arguments else ("--batch-size", "32")
    done = hardneg("compare", *usual, *arguments, *batch)
    assert done.exit_code == 2, done.output
    assert reported in done.stderr, done.stderr
    assert started == []
    assert "runs" not in done.stdout, "no bar before a refusal"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("common", [{}, {"evaluate_on": "validation"}], ids=["test", "validation"])
def test_a_test_split_without_labels_is_refused_where_it_is_needed(
    common: dict[str, str], started: Started, tmp_path: Path
) -> None:
    images = np.random.default_rng(0).integers(0, 256, (64, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "half.npz", images=images, labels=np.arange(64) % 4, test_images=images[:20])
    comparison = Comparison(("simclr()", "hcl()"), 2, short(f"npz:{tmp_path / 'half.npz'}", **common))
    if common:
        compare(comparison, tmp_path / "out", show=nothing)
        assert len(started) == 4
        return
    with raises(ArgumentError, who="compare, of its test images,", what="labels", got="none"):
        compare(comparison, tmp_path / "out")
    assert started == []


def test_nothing_is_cut_at_80_columns(data: str, started: Started, tmp_path: Path) -> None:
    arms = ("simclr()", "simclr(temperature=0.25)", "hcl(beta=1)", "supcon()")
    common = ("--data", data, "--batch-size", "32", "--out", str(tmp_path), "--seeds", "10")
    words = [word for arm in arms for word in ("--arm", arm)]
    for arguments in (["compare", *words, *common], ["compare", "--help"], ["report", "--help"], ["--help"]):
        done = CliRunner().invoke(app, arguments, env={"COLUMNS": "80", "NO_COLOR": "1"})
        assert done.exit_code == 0
        assert "\N{HORIZONTAL ELLIPSIS}" not in done.output
        lines = [line for line in done.output.splitlines() if not line.startswith("report: ")]  # a path stays whole
        assert max(map(len, lines)) <= 80
