"""Turn dataclasses of options into flags, and flags and YAML files back into options.

Each option is declared once, as a field made by ``hardneg.core.options.option``. From it follow its flag
(`parameters_of`), its name in YAML files (`checked_values`), its checks, and its place in the dataclass that the work
receives (`build`). The decorator `with_parameters` makes a command with these flags and those of every verb
(`GENERAL`); `Command` shows the common flags in ``--help`` and all of them in ``--help-all``. Small verbs use the
decorator `verb`; mine, audit, compare and train call the parts themselves, because they add their own flags.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from hardneg.cli.errors import errors_for_people, given, read_yaml
from hardneg.cli.output import Output
from hardneg.core.errors import ArgumentError, UnknownName, located
from hardneg.core.options import flag_of
from hardneg.training.options.base import TrainOptions
from hardneg.training.options.values import Scheduled, allowed, called, check_option, from_text, plain, unless_none

Options = TypeVar("Options")


def verb(options: type[Options]) -> Callable[[Callable[[Options, Output], None]], Callable[..., None]]:
    """Turn a function of an options object and an `Output` into a command.

    Args:
        options: Dataclass whose fields become the flags.

    Returns:
        A decorator. The command has the name of the decorated function, and its docstring as help text.
    """

    def command_of(work: Callable[[Options, Output], None]) -> Callable[..., None]:
        def command(output: Output, **values: Any) -> None:
            with errors_for_people():
                work(build(options, values, work.__name__), output)

        command.__doc__, command.__name__ = work.__doc__, work.__name__
        return with_parameters(parameters_of(options))(command)

    return command_of


def parameter(name: str, kind: Any, default: Any, *flags: str, **rest: Any) -> inspect.Parameter:
    """Return one flag in the form that typer reads from a signature.

    Args:
        name: Name of the Python argument.
        kind: Type of its value.
        default: Value without the flag.
        *flags: Spellings such as ``--out`` and ``-o``; derived from the name if none are given.
        **rest: Further arguments of ``typer.Option``, such as ``help`` and ``rich_help_panel``.
    """
    if kind is bool:
        rest["metavar"] = ""  # a switch takes no value
    annotation = Annotated[kind, typer.Option(*flags, **rest)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def print_version(wanted: bool) -> None:
    """Print the version and exit, for ``--version`` of the root and of every verb."""
    if wanted:
        from hardneg import __version__

        typer.echo(__version__)
        raise typer.Exit


VersionFlag = Annotated[
    bool, typer.Option("--version", "-V", help="Print the version.", is_eager=True, callback=print_version, metavar="")
]
"""Type of ``--version`` of a group of commands."""


def _print_all_options(ctx: typer.Context, wanted: bool) -> None:
    """Print the help with all options and exit, for ``--help-all``."""
    if wanted:
        ctx.meta[_ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


_ALL = "hardneg.help-all"

GENERAL = (
    parameter("json", bool, False, "--json", help="Print the result as one line of JSON."),
    parameter("quiet", bool, False, "--quiet", "-q", help="Print only warnings and errors."),
    # Without --version, which is an option of moco.
    parameter("show_version", bool, False, "-V", help="Print the version.", is_eager=True, callback=print_version),
    parameter(
        "help_all", bool, False, "--help-all", help="Show all options.", is_eager=True, callback=_print_all_options
    ),
)
"""Flags that every verb has."""


def parameters_of(options: type, panels: tuple[str, ...] = (), **defaults: Any) -> list[inspect.Parameter]:
    """Return one flag per field of an options dataclass, for ``with_parameters``.

    Args:
        options: The dataclass; fields that are dataclasses themselves contribute their fields.
        panels: Order in which the panels of the help appear; fields without a panel come first.
        **defaults: Defaults that replace those of the fields.
    """
    found = [
        (rules.get("panel"), _parameter_of(name, kind, defaults.get(name, one.default), rules))
        for name, one, kind, rules in _iter_options(options)
    ]
    order = [None, *panels]
    return [each for _, each in sorted(found, key=lambda pair: order.index(pair[0]) if panels else 0)]


def flags_of(options: type) -> dict[str, str]:
    """Return how each option is written on the command line: {"k": "-k", "near_positive": "--near-positive"}."""
    return {name: flag_of(name, rules) for name, _, _, rules in _iter_options(options)}


_names_in_other_libraries = {
    "--bs": "--batch-size",
    "--dataset": "--data",
    "--lr": "--learning-rate",
    "--max-score": '-n "AtMost(SCORE)"',
    "--min-score": '-n "Threshold(SCORE)"',
    "--model-name": "--model",
    "--model-name-or-path": "--model",
    "--n-epochs": "--epochs",
    "--num-epochs": "--epochs",
    "--num-hard-negatives": "-k",
    "--num-negatives": "-k",
    "--num-train-epochs": "--epochs",
    "--output": "--out",
    "--output-dir": "--out",
    "--per-device-train-batch-size": "--batch-size",
    "--qrels": "--judgements",
    "--range-max": '-n "Rank(START, STOP)"',
    "--range-min": '-n "Rank(START, STOP)"',
    "--relative-margin": '-n "BelowPositive(relative=MARGIN)"',
    "--tau": "--temperature",
    "--temp": "--temperature",
    "--top-k": "-k",
    "--wd": "--weight-decay",
}
"""Flags of other libraries and their names here, for suggestions in errors."""


class Command(TyperCommand):
    """Command with a short help, which suggests the right flag when an unknown one is used.

    It knows the names of other libraries (``--lr``), and for ``compare`` the options of ``train`` (``--option
    lr=VALUE``).
    """

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help with the common options (``with_parameters``), or with all after ``--help-all``."""
        common = getattr(self.callback, "common", ())
        left_out = ("show_version",) if not common else {str(one.name) for one in self.params} - {*common}
        hidden = [] if ctx.meta.get(_ALL) else [one for one in self.params if one.name in left_out]
        if not common:
            hidden += [one for one in self.params if one.name == "help_all"]
        options: list[Any] = [one for one in hidden if hasattr(one, "hidden")]
        for one in options:
            one.hidden = True
        super().format_help(ctx, formatter)
        for one in options:
            one.hidden = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; add a suggestion to click's error for an unknown flag."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # NoSuchOption of click, or of the copy of click in newer versions of typer
            if hasattr(error, "possibilities") and (ours := self._suggested(getattr(error, "option_name", ""))):
                error.possibilities = [ours]
            raise

    def _suggested(self, flag: str) -> str | None:
        flag = flag.replace("_", "-")
        ours = _names_in_other_libraries.get(flag, flag)
        known = {one for each in self.params for one in each.opts}
        if ours.split()[0] in known:
            return ours
        name = ours.removeprefix("--").replace("-", "_")
        is_of_train = "--option" in known and any(one.name == name for one in fields(TrainOptions))
        return f"--option {name}=VALUE" if is_of_train else None


_short_flags = {"negatives": "-n", "out": "-o", "jobs": "-j"}

CONFIG = parameter("config", Path | None, None, help="YAML file with any of these options; flags take precedence.")
CONTEXT = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)


def with_config_file(
    ctx: typer.Context, who: str, config: Path | None, values: dict[str, Any], *options: type
) -> dict[str, Any]:
    """Return the values of the flags, completed by a YAML file for flags not given on the command line.

    Args:
        ctx: Context of the command, which records the flags that were given.
        who: Verb to name in errors.
        config: Path of the YAML file, or None.
        values: Value of each flag, by option name.
        *options: Dataclasses whose options the file may set.
    """
    return values | {name: v for name, v in from_file(who, config, *options).items() if name not in given(ctx)}


def from_file(who: str, path: Path | None, *options: type) -> dict[str, Any]:
    """Read options from a YAML file, with the types and bounds of the flags checked.

    Args:
        who: Verb to name in errors.
        path: The file, or None for no options.
        *options: Dataclasses whose options the file may set.

    Returns:
        Values by option name.

    Raises:
        FileError: The file cannot be read as lines of ``name: value``.
        UnknownName: A name belongs to none of the options.
        ArgumentError: A value has the wrong type or is out of bounds.
    """
    if path is None:
        return {}
    with located(str(path)):
        return checked_values(who, read_yaml(path), *options)


def checked_values(who: str, values: dict[str, Any], *options: type) -> dict[str, Any]:
    """Convert values of a file to what the flags would give.

    Args:
        who: Verb to name in errors.
        values: Values by option name, with the types of YAML.
        *options: Dataclasses whose options are known.

    Raises:
        UnknownName: A name belongs to none of the options; the error suggests the nearest one and its type.
        ArgumentError: A value has the wrong type or is out of bounds.
    """
    known = {name: part for kind in options for name, *part in _iter_options(kind) if "argument" not in part[-1]}
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            raise UnknownName(name, known, usage={one: _usage(*known[one]) for one in known})
        _, kind, rules = known[name]
        if get_origin(kind) is tuple:
            found[name] = _texts(who, name, value)
        else:
            found[name] = from_text(kind, value)
            check_option(who, name, found[name], kind, rules)
    return found


def _texts(who: str, name: str, value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(one, str) for one in texts):
        raise ArgumentError(who, f"{name} to be a list of texts", f"{name}={value!r}")
    return texts


def build(options: type[Options], values: dict[str, Any], who: str = "hardneg") -> Options:
    """Construct the options object from the values of the flags.

    Args:
        options: Dataclass to construct.
        values: Values by option name. Used values are removed, so what remains belongs to another dataclass.
        who: Verb to name in errors.

    Raises:
        ArgumentError: A value has the wrong type or is out of bounds.
    """
    chosen: dict[str, Any] = {}
    for name, _, kind, rules in _iter_options(options):
        value = from_text(kind, values.pop(name))
        if get_origin(kind) is tuple:
            value = tuple(value or ())
        elif "argument" not in rules:
            check_option(who, name, value, kind, rules)
        chosen[name] = value
    hints, given_options = get_type_hints(options), {}
    for one in fields(options):  # type: ignore[arg-type]
        if "part" in one.metadata:
            inner = {each.name: one.metadata["part"].format(each.name) for each in _fields_of(one, hints[one.name])}
            given_options[one.name] = hints[one.name](**{name: chosen[flag] for name, flag in inner.items()})
        else:
            given_options[one.name] = chosen[one.name]
    return options(**given_options)


def with_parameters(
    parameters: Sequence[inspect.Parameter], common: tuple[str, ...] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that turns a function of ``output`` and ``**values`` into a command for typer.

    Args:
        parameters: Flags and arguments of the command; those of ``GENERAL`` are added.
        common: Names of the parameters that ``--help`` shows, of which ``--help-all`` shows all; () shows all in both.

    Returns:
        A decorator. The function receives the flags ``--quiet`` and ``--json`` as an `Output`.
    """
    signature = [*parameters, *GENERAL]

    def command_of(work: Callable[..., None]) -> Callable[..., None]:
        def command(quiet: bool, json: bool, show_version: bool, help_all: bool, **values: Any) -> None:
            work(output=Output(quiet, json), **values)

        command.__doc__, command.__name__ = work.__doc__, work.__name__
        command.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in signature}
        command.common = (*common, "json", "quiet", "help_all") if common else ()  # type: ignore[attr-defined]
        return command

    return command_of


def _iter_options(options: type) -> Iterator[tuple[str, Field[Any], Any, dict[str, Any]]]:
    """Yield (option name, field, type, rules) of every option; nested dataclasses are flattened."""
    hints = get_type_hints(options)
    for one in fields(options):
        if "part" not in one.metadata:
            yield one.name, one, plain(hints[one.name]), dict(one.metadata)
            continue
        kinds = get_type_hints(hints[one.name])
        for each in _fields_of(one, hints[one.name]):
            panel = one.metadata["panel"] or each.metadata.get("panel")
            name, kind = one.metadata["part"].format(each.name), plain(kinds[each.name])
            help_text = one.metadata["helps"].get(each.name, each.metadata.get("help"))
            yield name, each, kind, {**each.metadata, "panel": panel, "help": help_text}


def _fields_of(one: Field[Any], kind: type) -> list[Field[Any]]:
    """Return the fields of a nested dataclass that are exposed as flags."""
    return [each for each in fields(kind) if not one.metadata["only"] or each.name in one.metadata["only"]]


def _parameter_of(name: str, kind: Any, default: Any, rules: dict[str, Any]) -> inspect.Parameter:
    """Return the flag or argument of one field; typer needs lists for tuples and texts for schedules."""
    default = inspect.Parameter.empty if default is MISSING else default
    if get_origin(kind) is tuple:
        kind, default = (list[str], default) if default is inspect.Parameter.empty else (list[str] | None, None)
    if "argument" in rules:
        annotation = Annotated[kind, typer.Argument(help=rules["help"])]
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
    rules = {**rules, "flags": rules["flags"] or _short_flag(name)}
    if unless_none(kind) == Scheduled:
        kind, default = (str | None, None) if default is None else (str, str(default))
    flags = rules["flags"] or ((f"--{name.replace('_', '-')}",) if kind is bool and default is False else ())
    choices: dict[str, Any] = {"autocompletion": _completion_of(rules["among"])} if rules["among"] else {}
    return parameter(name, kind, default, *flags, help=_help(rules), rich_help_panel=rules["panel"], **choices)


def _completion_of(choices: Sequence[str]) -> Callable[[str], list[str]]:
    """Return the function that completes a value in a shell."""

    def complete(incomplete: str) -> list[str]:
        return [one for one in choices if one.startswith(incomplete)]

    return complete


def _short_flag(name: str) -> tuple[str, ...]:
    """Return the spellings of an option that has the same short flag in every verb; () for others."""
    return (f"--{name}", _short_flags[name]) if name in _short_flags else ()


def _help(rules: dict[str, Any]) -> str:
    """Append choices and bounds to the help text.

    typer would show them in the type column, which leaves too little space for the help.
    """
    if rules["among"]:
        return f"{rules['help']} One of {', '.join(rules['among'])}."
    if rules["low"] is None:
        return str(rules["help"])
    words = allowed(rules["low"], rules["high"]).removeprefix("of ")
    return f"{rules['help']} {words[0].upper()}{words[1:]}."


def _usage(one: Field[Any], kind: Any, rules: dict[str, Any]) -> str:
    """Describe the values of an option for errors: "It is a whole number of at least 1, by default 50"."""
    what = f"one of {', '.join(rules['among'])}" if rules["among"] else called(kind)
    bounds = f" {allowed(rules['low'], rules['high'])}" if rules["low"] is not None else ""
    default = "" if one.default in (MISSING, None, ()) else f", by default {one.default}"
    return f"It is {what}{bounds}{default}"
