"""`hardneg compare`: arguments of the verb; ``hardneg.comparing`` does the work, ``tables.py`` prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from hardneg.cli.errors import errors_for_people, given, read_yaml
from hardneg.cli.flags import CONTEXT, build, checked_values, parameter, parameters_of, with_parameters
from hardneg.cli.options import ALWAYS, CompareOptions
from hardneg.cli.output import Output
from hardneg.core.errors import ArgumentError, FileError, located
from hardneg.training.options import RECIPES


@with_parameters(
    [
        CONTEXT,
        *parameters_of(CompareOptions),
        parameter(
            "config", Path | None, None, help="YAML file with a list of arms and any option of compare or train."
        ),
    ]
)
def compare(ctx: typer.Context, config: Path | None, output: Output, **values: Any) -> None:
    """Compare negatives on your data with equal budget, seeds and initial weights; print a table and write a report.

    An interrupted comparison resumes when you run the same command again; finished runs are kept.

    Examples:
      hardneg compare --arm "simclr(temperature=0.25)" --arm "hcl(beta=1)"

      hardneg compare --arm "simclr()" --arm "simclr() @ proximity()" --seeds 5

      hardneg compare --arm "simclr()" --arm "hcl()" --tune temperature=0.2,0.5

      hardneg compare --arm "supcon()" --arm "hscl()" --option encoder=resnet18

      hardneg compare --config comparison.yaml --jobs 2
    """
    with errors_for_people("Nothing is lost: run the same command again to resume."):
        from hardneg.cli.tables import compare_and_show
        from hardneg.comparing.request import Comparison, read_options, read_tune

        values |= {name: value for name, value in _from_file(config).items() if name not in given(ctx)}
        options = build(CompareOptions, values, "compare")  # leaves the options of train that the file sets in `values`
        others = read_options(options.options)
        if duplicates := sorted(others.keys() & given(ctx)):
            flag = "--" + duplicates[0].replace("_", "-")
            raise ArgumentError("compare", f"either {flag} or --option {duplicates[0]}=...", "both")
        common = {name: getattr(options.shared, name) for name in ALWAYS} | values | others
        if options.shared.evaluate_with is not None:
            common["evaluate_with"] = options.shared.evaluate_with
        if len(options.tune) > 1:
            fix = "tune one option per comparison"
            raise ArgumentError("compare", "--tune once", " and ".join(options.tune), fix)
        if not options.resume and (Path(options.out) / "request.json").exists():
            fix = "leave --no-resume out to continue it, or use another --out"
            raise FileError("compare", "a directory without a comparison", options.out, "which has one", fix)
        tune = read_tune(options.tune[0]) if options.tune else None
        wanted = Comparison(options.arms, options.seeds, common, tune, options.metric)
        compare_and_show(wanted, options.out, options.jobs, options.allow_other_data, output)


def _from_file(path: Path | None) -> dict[str, Any]:
    """Read options of compare and train from a YAML file.

    Args:
        path: The file, or None for no options. ``tune`` may be a mapping from an option to a list of values, besides
            the form of the flag, ``name=value,value``.

    Raises:
        FileError: The file cannot be read as lines of ``name: value``.
        UnknownName: A name belongs neither to compare nor to any recipe.
    """
    if path is None:
        return {}
    values = read_yaml(path)
    match values.get("tune"):
        case dict() as tune if all(isinstance(tries, list) for tries in tune.values()):
            values["tune"] = [f"{name}={','.join(map(str, tries))}" for name, tries in tune.items()]
    with located(str(path)):
        return checked_values("compare", values, CompareOptions, *RECIPES.values())
