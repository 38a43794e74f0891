"""Flags from dataclasses of options, and the options from what was given: each option is declared once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

import typer

from hardneg.cli.errors import read_yaml
from hardneg.core.errors import UnknownName
from hardneg.training.options import check_option, from_text

Options = TypeVar("Options")


def parameter(name: str, kind: Any, default: Any, *flags: str, **rest: Any) -> inspect.Parameter:
    if kind is bool:
        rest["metavar"] = ""  # a switch takes no value
    annotation = Annotated[kind, typer.Option(*flags, **rest)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def parameters_of(options: type, panels: tuple[str, ...] = ()) -> list[inspect.Parameter]:
    """One parameter for each field, in the order of the panels."""
    found = [(_panel(rules), _parameter_of(name, one, kind, rules)) for name, one, kind, rules in _flat(options)]
    order = [None, *panels]
    return [each for _, each in sorted(found, key=lambda pair: order.index(pair[0]) if panels else 0)]


def flags_of(options: type) -> dict[str, str]:
    """Each option as it is written on the command line: {"k": "-k", "near_positive": "--near-positive"}."""
    named = {name: next(iter(rules.get("flags") or ()), None) for name, _, _, rules in _flat(options)}
    return {name: flag or f"--{name.replace('_', '-')}" for name, flag in named.items()}


CONFIG = parameter("config", Path | None, None, help="A YAML file with any of these options; flags win.")
CONTEXT = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)


def from_file(verb: str, path: Path | None, options: type) -> dict[str, Any]:
    """The options of a YAML file, by the names of their flags, held to the same kinds and bounds."""
    known = {name: (kind, rules) for name, _, kind, rules in _flat(options) if "argument" not in rules}
    values = {} if path is None else read_yaml(path)
    for name, value in values.items():
        if name not in known:
            raise UnknownName(name, known, f"in {path}")
        kind, rules = known[name]
        several = get_origin(kind) is tuple
        values[name] = [value] if several and isinstance(value, str) else from_text(kind, value)
        for one in values[name] if isinstance(values[name], list) else [values[name]]:
            check_option(verb, name, one, str if several else kind, rules)
    return values


def build(options: type[Options], values: dict[str, Any]) -> Options:
    """The options from the values of the flags; takes from ``values`` what it uses."""
    given: dict[str, Any] = {}
    hints = get_type_hints(options)
    for one in fields(options):  # type: ignore[arg-type]
        if "part" in one.metadata:
            inner = {each.name: one.metadata["part"].format(each.name) for each in _fields_of(one, hints[one.name])}
            given[one.name] = hints[one.name](**{name: values.pop(flag) for name, flag in inner.items()})
        else:
            value = values.pop(one.name)
            given[one.name] = tuple(value or ()) if get_origin(hints[one.name]) is tuple else value
    return options(**given)


def with_parameters(command: Callable[..., None], parameters: list[inspect.Parameter]) -> Callable[..., None]:
    """The command, as typer sees it: with these parameters in the place of ``**values``."""
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def _flat(options: type) -> Iterator[tuple[str, Field[Any], Any, dict[str, Any]]]:
    """The name of the flag, the field, its kind and its rules, parts taken apart."""
    hints = get_type_hints(options)
    for one in fields(options):
        if "part" not in one.metadata:
            yield one.name, one, hints[one.name], dict(one.metadata)
            continue
        kinds = get_type_hints(hints[one.name])
        for each in _fields_of(one, hints[one.name]):
            panel = one.metadata["panel"] or each.metadata["panel"]
            yield one.metadata["part"].format(each.name), each, kinds[each.name], {**each.metadata, "panel": panel}


def _fields_of(one: Field[Any], kind: type) -> list[Field[Any]]:
    return [each for each in fields(kind) if not one.metadata["only"] or each.name in one.metadata["only"]]


def _panel(rules: dict[str, Any]) -> str | None:
    return rules.get("panel")


def _parameter_of(name: str, one: Field[Any], kind: Any, rules: dict[str, Any]) -> inspect.Parameter:
    if rules.get("argument"):
        annotation = Annotated[kind, typer.Argument(help=rules["help"])]
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation)
    default = inspect.Parameter.empty if one.default is MISSING else one.default
    if get_origin(kind) is tuple:
        kind, default = list[str] | None, None
    shown = {"help": rules["help"], "rich_help_panel": rules["panel"]}
    if rules["low"] is not None:
        shown["min"] = rules["low"]
    return parameter(name, kind, default, *rules["flags"], **shown)
