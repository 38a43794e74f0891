"""Every arm is tuned by the same tries on a validation split."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hardneg.comparing import compare
from hardneg.comparing import runs as comparison_runs
from hardneg.comparing.arms import Arm, parse_arm
from hardneg.comparing.comparing import AllDiverged, check_arms
from hardneg.comparing.request import Comparison, Try, tries_of
from hardneg.comparing.runs import Diverged
from hardneg.comparing.verdict import temperature_notes
from hardneg.core.errors import ArgumentError, FileError
from hardneg.negatives import parse
from hardneg.reporting import write_report
from hardneg.training.loop.parts import splits
from hardneg.training.loop.runs import Run
from hardneg.training.options import TrainOptions
from support.command import hardneg
from support.comparisons import Started, finish, nothing, result
from support.errors import raises
from support.training_runs import short


@pytest.mark.parametrize(
    "tune",
    ["temperature=0.25,1e-1", "'temperature=0.25, 0.1'", "{temperature: [0.25, 1e-1]}", "\n  temperature: [0.25, 0.1]"],
)
def test_a_file_may_tune_in_its_own_way(tune: str, data: str, started: Started, tmp_path: Path) -> None:
    file = tmp_path / "comparison.yaml"
    file.write_text(f"arms: [simclr(), hcl()]\ndata: {data}\nbatch-size: 32\ntune: {tune}\nout: {tmp_path / 'out'}\n")
    done = hardneg("compare", "--config", str(file))
    assert done.exit_code == 0, done.output
    facts = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert facts["comparison"]["tune"] == {"temperature": [0.25, 0.1]}
    assert facts["tuned"] == {arm: {"temperature": 0.25} for arm in ("simclr()", "hcl()")}


@pytest.mark.parametrize(
    ("first", "second", "tune"),
    [
        ("simclr()", "debiased()", {"tau_plus": (0.0, 0.1)}),
        ("supcon()", "supervised(positives_in_denominator='all')", {"temperature": (0.1, 0.2)}),
        ("hcl()", "simclr(negatives='Tilt(1.0)')", {"tau_plus": (0.0, 0.05)}),
    ],
)
def test_arms_that_tuning_would_make_alike_are_seen(
    first: str, second: str, tune: dict[str, tuple[float, ...]], data: str
) -> None:
    arms = [parse_arm(text).with_defaults(short(data)) for text in (first, second)]
    check_arms(arms, Comparison((first, second), 2, short(data)))
    with pytest.raises(
        ValueError, match=f"distinct arms, apart from the {next(iter(tune))} that --tune sets, got the same"
    ):
        check_arms(arms, Comparison((first, second), 2, short(data), tune))


def test_a_tuned_value_that_an_arm_cannot_train_with_is_seen(data: str, started: Started, tmp_path: Path) -> None:
    comparison = Comparison(("simclr()", "sogclr()"), 2, short(data), {"tau_plus": (0.0, 0.1)})
    with raises(ValueError, who="sogclr() tau_plus=0.1", got="--tau-plus"):
        compare(comparison, tmp_path, show=nothing)
    assert started == []


def test_a_try_may_be_as_the_arm_is(data: str) -> None:
    texts, common = ("simclr()", "hcl()"), short(data, evaluate_on="validation")
    tune = {"temperature": (0.5, 0.25)}
    assert check_arms([parse_arm(text).with_defaults(common) for text in texts], Comparison(texts, 2, common, tune))


def test_every_arm_is_tuned_on_the_validation_split_and_then_trained_on_all(
    data: str, started: Started, tmp_path: Path
) -> None:
    arms = ("simclr()", "hcl(beta=3)", "simclr(tau_plus=0.2)")
    comparison = Comparison(arms, 2, short(data), {"temperature": (0.5, 0.25, 0.1)})
    summary = compare(comparison, tmp_path, jobs=1, show=nothing)
    tried = [options for _, options, path in started if "tuning" in path.parts]
    trained = [options for _, options, path in started if "tuning" not in path.parts]
    assert [(one.temperature, one.evaluate_on, one.seed) for one in tried] == 3 * [
        (0.5, "validation", 0),
        (0.25, "validation", 0),
        (0.1, "validation", 0),
    ]
    assert sorted((one.tau_plus, one.seed) for one in trained) == sorted((t, s) for t in (0, 0.1, 0.2) for s in (0, 1))
    assert {(one.temperature, one.evaluate_on) for one in trained} == {(0.25, "test")}, "0.25 was the best"
    assert summary["tuned"] == {arm: {"temperature": 0.25} for arm in arms}
    assert summary["tries"] == {
        arm: [({"temperature": at}, reached) for at, reached in ((0.5, 0.6), (0.25, 0.85), (0.1, 0.8))] for arm in arms
    }
    assert [row["effective_temperature"] for row in summary["rows"]] == [0.25, 0.0625, 0.25]


def test_a_try_of_several_seeds_counts_by_their_mean(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.5 is better with seed 0 and diverges once; 0.25 is better than 0.1 only with seed 0."""
    reached = {(0.5, 0): 0.9, (0.25, 0): 0.8, (0.25, 1): 0.2, (0.1, 0): 0.6, (0.1, 1): 0.6}

    def train(recipe: str, options: TrainOptions, run: Run, environ: dict[str, str], **how: bool) -> dict[str, Any]:
        if options.evaluate_on == "validation" and (options.temperature, options.seed) not in reached:
            raise Diverged(run.path, "not finite")
        finish(run, found := result(reached.get((options.temperature, options.seed), 0.7), 100))
        return found

    monkeypatch.setattr(comparison_runs, "in_a_process", train)
    arms, tune = ("simclr()", "hcl()"), {"temperature": (0.5, 0.25, 0.1)}
    summary = compare(Comparison(arms, 3, short(data), tune, tune_seeds=2), tmp_path, jobs=1, show=nothing)
    assert summary["tuned"] == {arm: {"temperature": 0.1} for arm in arms}
    means = [mean for _, mean in summary["tries"]["hcl()"]]
    assert means == [None, pytest.approx(0.5), pytest.approx(0.6)]
    assert "mean of 2 seeds" in write_report(tmp_path).read_text()


def test_the_share_that_tuning_holds_out_can_be_chosen(data: str, started: Started, tmp_path: Path) -> None:
    comparison = Comparison(("simclr()", "hcl()"), 2, short(data, validation_share=0.1), {"temperature": (0.5, 0.25)})
    compare(comparison, tmp_path, jobs=1, show=nothing)
    tried = [options for _, options, path in started if "tuning" in path.parts]
    found = splits(tried[0])
    assert len(found.test) == round(0.1 * (len(found.train) + len(found.test)))


def test_a_try_that_diverges_has_lost_and_ends_nothing(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverge(recipe: str, options: TrainOptions, run: Run, environ: dict[str, str], **how: bool) -> dict[str, Any]:
        if options.learning_rate > 1.0 or (options.tau_plus and options.learning_rate > 0.1):
            raise Diverged(run.path, "not finite")
        finish(run, found := result(1.0 - options.learning_rate, 100))
        return found

    monkeypatch.setattr(comparison_runs, "in_a_process", diverge)
    lines: list[str] = []
    arms, tries = ("simclr()", "debiased()"), {"learning_rate": (1e30, 0.2, 0.05)}
    summary = compare(Comparison(arms, 2, short(data), tries), tmp_path / "some", jobs=1, show=lines.append)
    assert summary["tuned"] == {arm: {"learning_rate": 0.05} for arm in arms}
    assert [reached for _, reached in summary["tries"]["debiased()"]] == [None, None, 0.95]
    assert [line for line in lines if "diverged" in line] == [
        "[1/6] simclr() learning_rate=1e+30, seed 0: diverged",
        "[4/6] debiased() learning_rate=1e+30, seed 0: diverged",
        "[5/6] debiased() learning_rate=0.2, seed 0: diverged",
    ]
    page = write_report(tmp_path / "some").read_text()
    assert "Diverged: simclr() with learning_rate=1e+30, debiased() with learning_rate=1e+30, debiased() with " in page
    all_of_them = Comparison(arms, 2, short(data), {"learning_rate": (0.3, 0.2)})
    with raises(AllDiverged, who="debiased()", what="diverge", got="learning_rate=0.3, learning_rate=0.2"):
        compare(all_of_them, tmp_path / "all", jobs=1, show=nothing)
    fixed = Comparison(arms, 2, short(data, learning_rate=0.5))
    with pytest.raises(Diverged):  # what is compared must not
        compare(fixed, tmp_path / "fixed", jobs=1, show=nothing)


@pytest.mark.usefixtures("runs_here")
def test_a_tuned_comparison_on_digits(data: str, tmp_path: Path) -> None:
    """In this process, with real training: every figure is found again in the runs."""
    pytest.importorskip("accelerate", reason="training needs the extra train")
    common = ("--data", data, "--epochs", "1", "--batch-size", "32", "--option", "dim=16", "--option", "device=cpu")
    arms = ("--arm", "simclr()", "--arm", "hcl()", "--tune", "temperature=0.2,1.0", "--seeds", "2")
    done = hardneg("compare", *arms, *common, "--out", str(tmp_path), "--jobs", "1")
    assert done.exit_code == 0, done.output
    summary = json.loads((tmp_path / "comparison.json").read_text())
    tries: dict[str, list[tuple[float, float]]] = {"Uniform()": [], "Tilt(1.0)": []}
    for config in (tmp_path / "tuning").glob("runs/*/config.json"):
        options = json.loads(config.read_text())["options"]
        result = json.loads((config.parent / "result.json").read_text())
        assert (result["num_train"], result["num_test"]) == (76, 20)
        tries[options["negatives"]].append((result["knn"], options["temperature"]))
    for row, found in zip(summary["rows"], tries.values(), strict=True):
        assert sorted(temperature for _, temperature in found) == [0.2, 1.0]
        assert (max(found)[0], summary["tuned"][row["arm"]]["temperature"]) in found
    assert (len(list((tmp_path / "runs").iterdir())), summary["num_test"]) == (4, 120)
    assert "means over the last records" in done.output
    page = (tmp_path / "report.html").read_text()
    assert "no run directory with these options" not in page
    assert "Tuned on a validation split" in page


@pytest.mark.parametrize(
    ("arms", "noted"),
    [
        (("simclr()", "hcl(beta=3)"), []),
        (("simclr() @ knn()", "hcl(beta=3)"), ["B"]),
        (("hcl()", "hcl(beta=3)"), ["A", "B"]),
    ],
)
def test_where_temperature_is_tuned_any_untilted_arm_is_a_twin(arms: tuple[str, ...], noted: list[str]) -> None:
    tuned = [parse_arm(text).with_option("temperature", 0.1 * (i + 1)) for i, text in enumerate(arms)]
    notes = temperature_notes(tuned, tuned=True)
    assert [note.partition(" repels")[0] for note in notes] == noted
    assert all(note.endswith("Add one.") for note in notes), "no advice to tune what was tuned"
    assert all("--tune temperature" in note for note in temperature_notes(tuned))


def tries_for(arms: tuple[str, ...], tune: dict[str, tuple[float, ...]], number: int | None = None) -> list[list[Try]]:
    return tries_of([parse_arm(text) for text in arms], Comparison(arms, 2, {}, tune, num_tries=number))


def test_a_grid_is_joint_and_an_arm_with_fewer_options_searches_those_it_has_more_finely() -> None:
    tune = {"temperature": (0.1, 0.2, 0.5), "beta": (0.5, 2.0)}
    plain, tilted, other = tries_for(("simclr()", "hcl()", "debiased()"), tune)
    assert tilted == [{"temperature": t, "beta": b} for t in tune["temperature"] for b in tune["beta"]]
    assert plain[:3] == [{"temperature": t} for t in tune["temperature"]]
    assert plain == other, "arms with the same options get the same tries"
    assert len({one["temperature"] for one in plain}) == 6
    assert all(0.1 <= one["temperature"] <= 0.5 for one in plain)


def test_a_grid_above_the_budget_is_sampled() -> None:
    tune = {"temperature": (0.1, 0.2, 0.5), "beta": (0.5, 1.0, 2.0)}
    plain, tilted = tries_for(("simclr()", "hcl()"), tune, 4)
    assert [len(plain), len(tilted)] == [4, 4]
    assert all(one["temperature"] in tune["temperature"] and one["beta"] in tune["beta"] for one in tilted)
    assert len({tuple(one.items()) for one in tilted}) == 4
    assert (plain, tilted) == tuple(tries_for(("simclr()", "hcl()"), tune, 4)), "the same at every start"


@pytest.mark.parametrize(
    ("text", "values", "expected"),
    [
        ("hcl() @ knn()", {"beta": 2.0}, {"negatives": "Tilt(2.0)", "batches": "knn()"}),
        (
            "hscl(detach=True)",
            {"beta": 2.0, "dim": 16.0},
            {"negatives": "OtherLabel() * Tilt(2.0, detach=True)", "dim": 16},
        ),
        ("simclr(negatives='Rank(1, 64)')", {"stop": 8.0}, {"negatives": "Rank(start=1, stop=8)"}),
    ],
)
def test_options_of_a_method_are_tuned(text: str, values: Try, expected: dict[str, Any]) -> None:
    tuned = parse_arm(text).with_defaults({"temperature": 0.3}).tuned(values)
    assert expected.items() <= canonical(tuned).items()
    assert tuned.complete().temperature == 0.3
    assert all(type(tuned.options[name]) is type(value) for name, value in expected.items())


def canonical(arm: Arm) -> dict[str, Any]:
    return {name: repr(parse(value)) if name == "negatives" else value for name, value in arm.options.items()}


def test_a_method_is_tuned_jointly_and_the_report_has_every_try(data: str, started: Started, tmp_path: Path) -> None:
    tune = {"temperature": (0.25, 0.5), "beta": (1.0, 2.0)}
    summary = compare(Comparison(("simclr()", "hcl()"), 2, short(data), tune), tmp_path, jobs=1, show=nothing)
    tried = [options for _, options, path in started if "tuning" in path.parts]
    assert sorted((one.temperature, one.negatives) for one in tried[4:]) == [
        (t, f"Tilt({b})") for t in tune["temperature"] for b in tune["beta"]
    ]
    assert summary["tuned"]["hcl()"] == {"temperature": 0.25, "beta": 1.0}, "the first of the best"
    page = write_report(tmp_path).read_text()
    words = [
        " ".join(f"{name}={x:g}" for name, x in at.items()) for tries in summary["tries"].values() for at, _ in tries
    ]
    assert len(words) == 8
    assert all(f"{one}: " in page for one in words)


def test_batch_sizes_without_a_common_multiple_are_reported_with_the_items_seen(
    data: str, started: Started, tmp_path: Path
) -> None:
    arms = ("simclr(batch_size=24)", "simclr(batch_size=32)", "simclr(batch_size=40)")
    summary = compare(Comparison(arms, 2, short(data)), tmp_path, jobs=1, show=nothing)
    assert sorted({options.batch_size for _, options, _ in started}) == [24, 32, 40]
    assert {options.items_per_epoch for _, options, _ in started} == {0}
    assert "batch_size differs: 24, 32, 40." in summary["unlike"]
    assert "items seen differs: 72, 96, 120." in summary["unlike"]


def test_arms_of_different_batch_sizes_see_equally_many_items(data: str, runs_here: None, tmp_path: Path) -> None:
    comparison = Comparison(("simclr(batch_size=20)", "simclr(batch_size=40)"), 2, short(data, epochs=2))
    summary = compare(comparison, tmp_path, jobs=1, show=nothing)
    assert summary["comparison"]["common"]["items_per_epoch"] == 80, "of 96: four batches of 20, two of 40"
    results = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("runs/*/result.json"))]
    assert sorted(result["steps"] for result in results) == [4, 4, 8, 8]
    assert summary["unlike"] == ["batch_size differs: 20, 40."]
    assert "batch_size=20" in write_report(tmp_path).read_text()
    again = compare(comparison, tmp_path, jobs=1, show=nothing)
    assert again["rows"] == summary["rows"]
    wider = replace(comparison, arms=(*comparison.arms, "simclr(batch_size=32)"))
    with pytest.raises(FileError):
        compare(wider, tmp_path, jobs=1, show=nothing)


def test_items_per_epoch_of_the_caller_are_kept(data: str, started: Started, tmp_path: Path) -> None:
    arms, common = ("simclr(batch_size=20)", "simclr(batch_size=40)"), short(data) | {"items_per_epoch": 40}
    compare(Comparison(arms, 2, common), tmp_path, jobs=1, show=nothing)
    assert {options.items_per_epoch for _, options, _ in started} == {40}
    with raises(ArgumentError, what="--items-per-epoch", got="items_per_epoch=30 and batch_size=40"):
        compare(Comparison(arms, 2, common | {"items_per_epoch": 30}), tmp_path / "b", jobs=1, show=nothing)
