"""Writes the generated pages of docs/reference from the code: the API, the command line and the grammar.
`make reference` runs it, and tests/project/test_reference.py fails if a page is out of date.
"""

from __future__ import annotations

import importlib
import inspect
import re
import tomllib
import typing
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Annotated, Any, NamedTuple, get_args, get_origin

import typer
import yaml
from typer.models import ArgumentInfo, OptionInfo, TyperInfo

import hardneg as hn
from hardneg.batching import spec as batches
from hardneg.cli.app import app
from hardneg.cli.flags import GENERAL
from hardneg.cli.train import command_of, train_app
from hardneg.core.schedules import registered_schedules
from hardneg.training.options import RECIPES

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
ROOT = FOLDER.parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
GENERATED = "<!-- Generated from the code by `make reference`; edit the docstrings instead. -->\n"


def pages() -> dict[str, str]:
    made = {**api(), "cli.md": command_line(), "grammar.md": grammar()}
    return {name: GENERATED + "\n" + text.rstrip() + "\n" for name, text in made.items()}


# The API

ROOMS = {
    "core": "Vectors with ids, scores, objectives, schedules and diagnosis.",
    "negatives": "The distributions of negatives and their grammar.",
    "losses": "Losses as modules.",
    "search": "Draws from a distribution.",
    "state": "State between steps: queues, banks, chains, momentum encoders.",
    "batching": "Which instances share a batch.",
    "theory": "Bounds and limits of the papers, and estimates of tau_plus.",
    "mining": "Hard negatives of a corpus.",
    "auditing": "How hard and how false negatives are.",
    "judging": "False-negative rates from a budget of judgements.",
    "training": "Training, comparing and loading encoders.",
    "papers": "Each paper as one expression.",
    "integrations": "Losses and samplers for other libraries; the four classes `NegativesLoss` differ by module.",
    "testing": "The conformance suite for your own distributions.",
    "errors": "Errors and warnings.",
}
"""The pages of the API in order, with their first sentence; the public names `hn.NAME` of a folder are on its page."""

MET = {
    "core": ("core.diagnose.Diagnosis", "core.schedules.linear", "core.schedules.cosine", "core.schedules.steps",
             "core.schedules.exponential", "core.schedules.constant", "core.schedules.adaptive"),
    "negatives": ("negatives.Negatives", "negatives.keep", "negatives.register_hardening"),
    "losses": ("losses.GradCache", "losses.IndividualTemperatures", "losses.InstanceDiscrimination", "losses.CMC",
               "losses.neighbour_nce", "losses.binary_nce"),
    "state": ("state.Cache", "state.Chain", "state.Clusters", "state.MomentumEncoder", "state.Partition"),
    "batching": ("batching.Plan", "batching.ProximityGraph", "batching.Refresh", "batching.Guard"),
    "mining": ("mining.dataset.mine_dataset", "mining.Search", "mining.Mined", "mining.Explanation"),
    "auditing": ("auditing.Audit", "auditing.result.RuleFigures", "auditing.result.Suggestion",
                 "auditing.result.MinedFindings"),
    "training": ("training.recipes.run_recipe", "training.options.base.TrainOptions", "comparing.Comparison",
                 "comparing.compare", "training.augmentation.from_transform"),
    "integrations": (
        "integrations.sentence_transformers.NegativesLoss", "integrations.sentence_transformers.CachedNegativesLoss",
        "integrations.sentence_transformers.HardBatches", "integrations.sentence_transformers.FreshNegatives",
        "integrations.sentence_transformers.LossCallback", "integrations.sentence_transformers.with_ids",
        "integrations.sentence_transformers.known_positives", "integrations.lightning.HardBatches",
        "integrations.lightly.NegativesLoss", "integrations.open_clip.NegativesLoss",
        "integrations.pytorch_metric_learning.NegativesLoss", "integrations.pytorch_metric_learning.NegativesMiner",
    ),
    "errors": ("core.errors.HardnegError", "core.errors.ArgumentError", "core.errors.UnknownName",
               "core.errors.GrammarError", "core.errors.NotFinite", "core.errors.MissingExtra", "core.errors.FileError",
               "core.errors.HardnegWarning", "core.errors.MiningWarning"),
}  # fmt: skip
"""Further classes and functions that users meet, by page."""

WHOLE = ("papers", "testing")
"""Modules whose public names are all listed."""


class Entry(NamedTuple):
    """One object of a page: its name as users write it, the path of its definition, and the first line about it."""

    shown: str
    path: str
    about: str


def api() -> dict[str, str]:
    """The pages of the API: an overview, and a page per folder."""
    entries = entries_of_rooms()
    overview = ["# API\n", "Names as in `import hardneg as hn`. Each page shows signatures, arguments and examples.\n"]
    made = {}
    for room, sentence in ROOMS.items():
        overview.append(f"## [{room}](api/{room}.md)\n\n{sentence}\n")
        overview.append("| name | |\n| --- | --- |")
        overview += [f"| [`{each.shown}`](api/{room}.md#{each.path}) | {cell(each.about)} |" for each in entries[room]]
        overview.append("")
        sections = [section(each) for each in entries[room]]
        made[f"api/{room}.md"] = "\n".join([f"# {room}\n", f"{sentence}\n", *sections])
    return {"api.md": "\n".join(overview), **made}


def entries_of_rooms() -> dict[str, list[Entry]]:
    """The objects of each page: public names first, then the others that users meet."""
    found: dict[str, list[Entry]] = {room: [] for room in ROOMS}
    for name in sorted(hn.__all__, key=str.lower):
        value = getattr(hn, name)
        if isinstance(value, (ModuleType, str)):
            continue
        home = value.__module__ if hasattr(value, "__module__") else "hardneg.core.types"
        found[home.split(".")[1]].append(Entry(f"hn.{name}", f"{home}.{name}", first_line(value)))
    for room in WHOLE:
        found[room] += [
            Entry(f"hardneg.{room}.{name}", f"{value.__module__}.{name}", first_line(value))
            for name, value in vars(importlib.import_module(f"hardneg.{room}")).items()
            if not name.startswith("_") and getattr(value, "__module__", "").startswith(f"hardneg.{room}")
        ]
    for room, paths in MET.items():
        for path in paths:
            home, _, name = path.rpartition(".")
            value = getattr(importlib.import_module(f"hardneg.{home}"), name)
            found[room].append(Entry(f"hardneg.{path}", f"{value.__module__}.{name}", first_line(value)))
    return found


def section(entry: Entry) -> str:
    """The directive that renders an object; tools/griffe_examples.py adds the link to its source."""
    name = entry.path.rpartition(".")[2]
    return f"::: {entry.path}\n    options:\n      heading: {entry.shown}\n      toc_label: {name}\n"


def first_line(value: Any) -> str:
    """The first paragraph of a docstring on one line; nothing for constants, whose own docstrings Python drops."""
    about = (inspect.getdoc(value) or "") if callable(value) else ""
    return " ".join(about.split("\n\n")[0].split())


# The list for language models


def llms() -> str:
    """llms.txt of the site: each page of the navigation with its address and first sentence."""
    site = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), yaml.SafeLoader)
    head = [f"# {site['site_name']}\n", f"> {PROJECT['description']}\n"]
    head.append(
        f"A skill for coding agents, with templates: {PROJECT['urls']['Repository']}/tree/main/skills/hardneg\n"
    )
    return "\n".join([*head, *_linked(site["nav"], site["site_url"])])


def _linked(entries: list[dict[str, Any]], address: str) -> Iterator[str]:
    for entry in entries:
        ((title, target),) = entry.items()
        if isinstance(target, list):
            yield f"\n## {title}\n"
            yield from _linked(target, address)
        else:
            yield f"- [{title}]({address}{target.removesuffix('.md')}.html)"


# The command line


COMMAND_LINE = """# Command line

`hardneg VERB --help` shows the common options of a verb in a terminal, `--help-all` all of them. `hardneg
--install-completion` installs completion for the shell. Progress bars are drawn on standard error, in terminals only.

## Options of every verb
"""


def command_line() -> str:
    text = [COMMAND_LINE, *(f"{table}\n" for table in tables_of({one.name: one for one in GENERAL}))]
    for words, call in verbs(app):
        text.append(f"## hardneg {words}\n")
        about, _, examples = inspect.cleandoc(call.__doc__ or "").partition("Examples:")
        if not examples:
            about, _, examples = about.partition("Example:")
        text.append(about.strip() + "\n")
        if examples.strip():
            lines = [line.strip() for line in examples.strip().splitlines()]
            text.append("```text\n" + "\n".join(line for line in lines if line) + "\n```\n")
        text.extend(f"{table}\n" for table in options_of(call))
    return "\n".join(text)


def verbs(group: typer.Typer, prefix: str = "") -> Iterator[tuple[str, Callable[..., Any]]]:
    for command in group.registered_commands:
        assert command.callback is not None
        yield prefix + (command.name or command.callback.__name__), command.callback
    for inner in group.registered_groups:
        assert isinstance(inner, TyperInfo)
        assert inner.typer_instance is not None
        yield from verbs(inner.typer_instance, f"{prefix}{inner.name} ")
    if group is train_app:
        yield from ((f"{prefix}{recipe}", command_of(recipe, options)) for recipe, options in RECIPES.items())


def options_of(call: Callable[..., Any]) -> list[str]:
    """The tables of a verb, without the options that every verb has."""
    general = {one.name for one in GENERAL}
    own = {name: one for name, one in inspect.signature(call).parameters.items() if name not in general}
    return tables_of(own)


def tables_of(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    """One table for each panel of the help."""
    panels: dict[str, list[str]] = defaultdict(list)
    for name, parameter in parameters.items():
        if get_origin(parameter.annotation) is not Annotated:
            continue  # the context of typer
        kind, info = get_args(parameter.annotation)
        assert isinstance(info, (ArgumentInfo, OptionInfo))
        panel = str(info.rich_help_panel or "Options")
        if isinstance(info, ArgumentInfo):
            panel, shown = "Arguments", f"`{name.upper()}`"
        else:
            shown = ", ".join(f"`{flag}`" for flag in flags_of(name, info))
        cells = (shown, kind_of(kind, info), default_of(parameter.default), cell(info.help))
        panels[panel].append(f"| {' | '.join(cells)} |")
    head = "| {} | value | default | |\n| --- | --- | --- | --- |\n"
    return [head.format(panel) + "\n".join(rows) for panel, rows in panels.items()]


def flags_of(name: str, info: OptionInfo) -> list[str]:
    """Within Annotated, typer keeps the first flag instead of the default."""
    first = [info.default] if isinstance(info.default, str) else []
    return [*first, *(info.param_decls or ())] or [f"--{name.replace('_', '-')}"]


def kind_of(kind: Any, info: ArgumentInfo | OptionInfo) -> str:
    if info.metavar:
        return cell(info.metavar.strip("[]").replace("|", ", "))
    if get_origin(kind) in (typing.Union, UnionType):
        kind = next(one for one in get_args(kind) if one is not NoneType)
    if get_origin(kind) is list:
        return kind_of(get_args(kind)[0], info) + ", repeated"
    names = {str: "string", int: "integer", float: "number", bool: "flag", Path: "path"}
    return names[kind]


def default_of(default: Any) -> str:
    if default is inspect.Parameter.empty:
        return "required"
    return "" if default is None or default is False or default == [] else f"`{cell(str(default))}`"


def cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


# The grammar


GRAMMAR = """# Grammar

A choice of negatives is an expression, the same in Python, in a configuration file and on the command line: factors
joined by `*`, read from left to right. A number may be a schedule. `hardneg explain EXPRESSION` describes an
expression.
"""
SCHEDULES = """## Schedules

A schedule stands wherever a number does: `Tilt(linear(0.0, 1.0))`.
"""
BATCHES = """## Batches

Who shares a batch: `--batches` of `hardneg train`, and after `@` in an arm of `hardneg compare`.
"""


def grammar() -> str:
    negatives = [entry(*one) for one in sorted(ours(hn.registered_negatives()).items())]
    schedules = [entry(*one) for one in sorted(ours(registered_schedules()).items())]
    planners = [entry(name, getattr(batches, name)) for name in batches._names]
    return "\n".join([GRAMMAR, "## Distributions\n", *negatives, SCHEDULES, *schedules, BATCHES, *planners])


def ours(registry: dict[str, type]) -> dict[str, type]:
    """Without the classes that tests have registered in this process."""
    return {name: cls for name, cls in registry.items() if cls.__module__.startswith("hardneg.")}


def entry(name: str, call: Callable[..., Any]) -> str:
    plain = [one.replace(annotation=inspect.Parameter.empty) for one in inspect.signature(call).parameters.values()]
    about = inspect.cleandoc(call.__doc__ or "").partition(">>>")[0].strip().removesuffix("Example:").strip()
    about = re.sub(r"^Args:\n((?: .*\n?|\n)+)", lambda found: arguments(found[1]), about, flags=re.M)
    examples = ", ".join(f"`{one}`" for one in getattr(call, "examples", ()))
    return f"### `{name}{inspect.Signature(plain)}`\n\n{about}\n" + (f"\nExamples: {examples}\n" if examples else "")


def arguments(section: str) -> str:
    """The indented lines of an ``Args:`` section as a Markdown list, one item for each argument."""
    joined = re.sub(r"\n {5,}", " ", section)
    return re.sub(r"^ {4}(\w+): ", r"- `\1`: ", joined, flags=re.M)


def main() -> None:
    (FOLDER / "api").mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    (FOLDER.parent / "llms.txt").write_text(llms(), encoding="utf-8")


if __name__ == "__main__":
    main()
