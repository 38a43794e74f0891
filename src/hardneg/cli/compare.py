"""`hardneg compare`: the arguments of the verb; what it does is in hardneg.comparing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from hardneg.cli.errors import errors_for_people, given, read_yaml
from hardneg.core.errors import ArgumentError, UnknownName
from hardneg.training.options import RECIPES, from_text


def compare(
    ctx: typer.Context,
    arm: Annotated[
        list[str] | None, typer.Option(help="A paper or recipe, and after @ who shares the batch; repeat it.")
    ] = None,
    data: Annotated[str, typer.Option(help="As in train.")] = "digits",
    out: Annotated[Path, typer.Option(help="Directory of the comparison; an existing one is resumed.")] = Path(
        "runs/compare"
    ),
    seeds: Annotated[int, typer.Option(help="Runs of each arm; the same seeds for all.", min=2)] = 3,
    epochs: Annotated[int, typer.Option(help="Of every run.", min=1)] = 50,
    batch_size: Annotated[int, typer.Option(help="Of every run.", min=2)] = 256,
    metric: Annotated[str, typer.Option(help="What decides.", metavar="[knn|1nn|linear]")] = "knn",
    tune: Annotated[
        str | None, typer.Option(help="Such as temperature=0.1,0.2,0.5: the same tries for every arm.")
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            help="Most runs side by side, where memory allows; one for each core or two for each GPU if not given.",
            min=1,
            show_default=False,
        ),
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="Any other option of train, as name=value, for arms that do not write it.")
    ] = None,
    allow_other_data: Annotated[
        bool, typer.Option("--allow-other-data", help="Go on in a folder that was begun with other data.")
    ] = False,
    config: Annotated[
        Path | None, typer.Option(help="A YAML file: arms as a list, and any option of compare or train.")
    ] = None,
) -> None:
    """Compare negatives on your data: same budget, seeds and initial weights; a table, sentences and a report.

    A killed comparison resumes when the same command is given again; finished runs are kept.

    Examples:

      hardneg compare --arm "simclr(temperature=0.5)" --arm "simclr(temperature=0.25)" --arm "hcl(beta=1)" --seeds 5

      hardneg compare --data cifar10 --arm "simclr()" --arm "simclr() @ proximity(num_candidates=500)"

      hardneg compare --arm "simclr()" --arm "hcl()" --tune temperature=0.1,0.2,0.3,0.5

      hardneg compare --arm "supcon()" --arm "hscl(beta=1)" --option encoder=resnet18 --option precision=bf16

      hardneg compare --config comparison.yaml --jobs 2
    """
    with errors_for_people("Nothing is lost: give the same command again to resume."):
        from hardneg.cli.tables import compare_and_show
        from hardneg.comparing.request import Comparison, read_options

        flags: dict[str, Any] = {"data": data, "out": out, "seeds": seeds, "epochs": epochs, "batch_size": batch_size}
        flags |= {"metric": metric, "tune": tune, "arm": arm or [], "jobs": jobs}
        others = read_options(option or [])
        if twice := sorted(others.keys() & given(ctx)):
            flag = "--" + twice[0].replace("_", "-")
            raise ArgumentError("compare", f"{flag} or --option {twice[0]}=..., not both", "two values")
        if config is not None:
            flags, others = _with_file(config, flags, others, given(ctx))
        common = {name: flags[name] for name in ("data", "epochs", "batch_size")} | others
        wanted = Comparison(tuple(flags["arm"]), flags["seeds"], common, _tune(flags["tune"]), flags["metric"])
        compare_and_show(wanted, Path(flags["out"]), flags["jobs"], allow_other_data)


def _with_file(
    path: Path, flags: dict[str, Any], others: dict[str, Any], on_the_line: set[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both with what the file says; what was given on the command line wins."""
    values = read_yaml(path)
    if "arms" in values:
        values["arm"] = values.pop("arms")
    kinds = {name: kind for recipe in RECIPES.values() for name, kind in get_type_hints(recipe).items()}
    unknown = [name for name in values if name not in flags and name not in kinds]
    if unknown:
        raise UnknownName(unknown[0], sorted({*flags, *kinds}), f"in {path}")
    for name, (what, right) in _kinds.items():
        if name in values and not right(values[name]):
            raise ArgumentError("--config", what, f"{name}={values[name]!r} in {path}")
    read = {name: from_text(kinds.get(name), value) for name, value in values.items() if name not in on_the_line}
    flags = flags | {name: value for name, value in read.items() if name in flags}
    return flags, {name: value for name, value in read.items() if name not in flags} | others


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_tune(value: Any) -> bool:
    """As on the command line, or one option with a list of values; None is no tuning."""
    if isinstance(value, dict):
        return len(value) == 1 and all(isinstance(one, list) and one for one in value.values())
    return value is None or _is_text(value)


def _is_directory(value: Any) -> bool:
    return _is_text(value) and value != ""


def _is_list_of_arms(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_jobs(value: Any) -> bool:
    return value is None or (_is_whole(value) and value > 0)


_kinds: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "arm": ("a list of arms, each as text", _is_list_of_arms),
    "seeds": ("a whole number", _is_whole),
    "jobs": ("a whole number of at least 1", _is_jobs),
    "out": ("the path of a directory", _is_directory),
    "metric": ("text", _is_text),
    "tune": ("an option and its values, like {temperature: [0.1, 0.2]}", _is_tune),
}
"""What the options of compare itself need in a file; those of train say it themselves."""


def _tune(value: str | dict[str, list[Any]] | None) -> tuple[str, tuple[float, ...]] | None:
    from hardneg.comparing.request import read_tune

    if isinstance(value, dict):
        ((name, values),) = value.items()
        value = f"{name}={','.join(map(str, values))}"
    return read_tune(value) if value else None
