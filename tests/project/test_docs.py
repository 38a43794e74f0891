"""Every code block of the README and of docs/ runs, in order, one namespace per file; none is skipped silently.

A block of the language ``output`` is what the Python block before it prints; ``--write-outputs`` writes it.
"""

from __future__ import annotations

import ast
import inspect
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from itertools import zip_longest
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

import hardneg as hn
import hardneg.batching.planners  # registers a schedule, once: before the fixture below looks
from hardneg import schedules
from hardneg.cli.app import app
from hardneg.negatives import base, hardening
from hardneg.testing import check_negatives as assert_conforms
from support.libraries import library

ROOT = Path(__file__).parents[2]
SITE = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", *SITE, *sorted((ROOT / "skills").rglob("*.md"))]
REPOSITORY = "https://github.com/hardneg/hardneg"
NEEDS = {  # packages that a page shows and that need not be installed
    "lightning": ("lightning",),
    "transformers": ("transformers", "datasets", "hardneg.integrations.sentence_transformers.batches"),
    "sentence-transformers": ("sentence_transformers",),
    "metric-learning": ("pytorch_metric_learning",),
    "lightly-and-open-clip": ("lightly.loss", "open_clip"),
    "graphs": ("torch_geometric",),
}
REGISTRIES: tuple[dict[str, Any], ...] = (base._registry, schedules._registry, hardening._named)


class Block(NamedTuple):
    language: str
    line: int
    source: str


@pytest.fixture(autouse=True)
def clean_registries() -> Iterator[None]:
    before = [dict(registry) for registry in REGISTRIES]
    yield
    for registry, saved in zip(REGISTRIES, before, strict=True):
        registry.clear()
        registry.update(saved)


def blocks_of(page: Path) -> list[Block]:
    found: list[Block] = []
    opened: tuple[str, int] | None = None
    lines: list[str] = []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        fence = re.match(r"^\s*(```+|~~~+)(.*)$", line)
        if fence is None:
            lines.append(line)
        elif opened is None:
            opened, lines = (fence[2].strip(), number), []
        else:
            found.append(Block(*opened, "\n".join(lines)))
            opened = None
    assert opened is None, f"{page.name}:{opened[1]}: this block is not closed"
    return found


def run_page(page: Path, write: bool = False) -> ModuleType:
    """Runs the page as a module, because dataclasses look their own up."""
    module = ModuleType(f"page_{page.stem.replace('-', '_')}")
    sys.modules[module.__name__] = module
    blocks = blocks_of(page)
    printed: list[tuple[Block, str]] = []
    try:
        for block, following in zip_longest(blocks, blocks[1:]):
            if block.language == "python":
                found = run_python(page, block, module)
                if following is not None and following.language == "output":
                    printed.append((following, found))
                else:
                    check_comments(page, block, found)
            elif block.language == "console":
                run_console(page, block)
            elif block.language == "sh":
                check_shell(page, block)
            else:
                known = block.language in ("text", "output", "math")
                assert known, f"{page.name}:{block.line}: nothing runs a block of {block.language!r}"
    finally:
        del sys.modules[module.__name__]
    assert len(printed) == [block.language for block in blocks].count("output"), f"{page.name}: an output of no block"
    if write:
        write_outputs(page, printed)
    for block, found in printed:
        assert same_output(block.source, found) or write, f"{page.name}:{block.line}: this is printed:\n{found}"
    return module


def run_python(page: Path, block: Block, module: ModuleType) -> str:
    """Runs a block and returns what it prints, without the spaces at the ends of lines."""
    with redirect_stdout(io.StringIO()) as stream:
        # Blank lines before the block give tracebacks the page's line numbers.
        exec(compile("\n" * block.line + block.source, str(page), "exec"), module.__dict__)
    return "\n".join(line.rstrip() for line in stream.getvalue().strip("\n").splitlines())


def check_comments(page: Path, block: Block, printed: str) -> None:
    """Checks that each comment ``# => text`` is a printed line, in this order; ``...`` matches anything."""
    shown = re.findall(r"# => ?(.*)$", block.source, re.MULTILINE)
    shows = bool(shown) or "print(" not in block.source or "skills" in page.parts  # libraries print too
    assert shows, f"{page.name}:{block.line}: the page does not show what is printed:\n{printed}"
    lines = iter(printed.splitlines())
    for text in shown:
        pattern = r"\s+".join(".*".join(map(re.escape, word.split("..."))) for word in text.split())
        found = any(re.fullmatch(rf"\s*{pattern}\s*", line) for line in lines)
        assert found, f"{page.name}:{block.line}: {text!r} is not printed, but:\n{printed}"


NUMBER = r"(?<![\w.])-?\d+(?:\.\d+)?(?![\w.]*\w)"


def same_output(shown: str, found: str) -> bool:
    """Whether the words are the same, and the numbers up to two units of their last digit, as machines differ."""
    if [part.split() for part in re.split(NUMBER, shown)] != [part.split() for part in re.split(NUMBER, found)]:
        return False
    return all(
        abs(float(one) - float(other)) <= 2.01 * 10.0 ** -len(one.partition(".")[2])
        for one, other in zip(re.findall(NUMBER, shown), re.findall(NUMBER, found), strict=True)
    )


def write_outputs(page: Path, printed: list[tuple[Block, str]]) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    for block, found in reversed(printed):
        lines[block.line : block.line + len(block.source.splitlines())] = found.splitlines()
    page.write_text("\n".join([*lines, ""]), encoding="utf-8")


def run_console(page: Path, block: Block) -> None:
    """Runs each ``$ hardneg ...`` line; other lines must be in the output of the command before them."""
    printed = None
    for line in filter(str.strip, block.source.splitlines()):
        if line.startswith("$ "):
            name, *arguments = shlex.split(line[2:])
            assert name == "hardneg", f"{page.name}:{block.line}: nothing runs {line!r}"
            result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
            assert result.exit_code == 0, f"{page.name}:{block.line}: {line} failed: {result.output}"
            printed = " ".join(result.output.split())
        else:
            assert printed is not None, f"{page.name}:{block.line}: output before a command"
            assert " ".join(line.split()) in printed, f"{page.name}:{block.line}: {line!r} is not printed"


def check_shell(page: Path, block: Block) -> None:
    """Nothing is installed here: targets of make must exist, and ``pip install`` must be of this project."""
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for line in filter(str.strip, block.source.splitlines()):
        name, *arguments = shlex.split(line)
        known = (
            set(arguments) <= set(targets)
            if name == "make"
            else re.match(r"pip install '?(\.|hardneg)(?:\[[\w,]+\])?'?$", line) or line == f"git clone {REPOSITORY}"
        )
        assert known, f"{page.name}:{block.line}: nothing knows {line!r}"


@pytest.mark.filterwarnings("error::DeprecationWarning:page_.*")  # of what the page itself imports and calls
@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> None:
    for name in NEEDS.get(page.stem, ()):
        library(name)
    monkeypatch.chdir(tmp_path)  # pages may write files
    for name in re.findall(r"^<!-- needs (\w+) -->$", page.read_text(encoding="utf-8"), re.MULTILINE):
        pytest.importorskip(name, reason="the page needs an extra")
    generated = page.read_text(encoding="utf-8").startswith("<!-- Generated")
    assert generated or any(block.language == "python" for block in blocks_of(page)), f"{page.name} has nothing to run"
    run_page(page, write=pytestconfig.getoption("--write-outputs"))


@pytest.mark.parametrize("name", NEEDS)
def test_the_script_of_an_integration_is_short(name: str) -> None:
    blocks = [block for block in blocks_of(ROOT / "docs" / "guides" / f"{name}.md") if block.language == "python"]
    assert max(len(block.source.splitlines()) for block in blocks) <= 30


def test_the_navigation_has_every_page() -> None:
    """The builder checks that listed pages exist, not that existing pages are listed."""
    listed = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(str(page.relative_to(ROOT / "docs")) for page in SITE)


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    for name in ("zensical", "latex2mathml"):
        pytest.importorskip(name, reason="the site needs the extra docs")
    for folder in ("docs", "src", "tools"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("mkdocs.yml", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    build = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in SITE:
        html = tmp_path / "build" / page.relative_to(ROOT).with_suffix(".html")
        assert "<h1" in html.read_text(encoding="utf-8")
        text = html.read_text(encoding="utf-8")
        assert not re.search(r'(?:src|rel="stylesheet" href)="https?:', text)
        assert 'data-md-color-scheme="slate"' in text, "light and dark"
        assert f'href="{REPOSITORY}"' in text
        assert 'data-md-component="source"' not in text, "which would ask GitHub"
        assert "md-footer__link" in text, "the pages before and after"
    idea = (tmp_path / "build" / "docs" / "explanation" / "the-one-idea.html").read_text(encoding="utf-8")
    assert idea.count("<math ") == (ROOT / "docs/explanation/the-one-idea.md").read_text(encoding="utf-8").count(
        "```math"
    )
    found = json.loads((tmp_path / "build" / "docs" / "search.json").read_text(encoding="utf-8"))
    assert "effective temperature" in json.dumps(found).lower()


@pytest.mark.parametrize("page", ["architecture.md", "reference/glossary.md"])
def test_pages_about_the_code_name_places_that_exist(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    places = re.findall(r"`([a-z_]+(?:/[a-z_]+)*(?:/|\.py))`", text)
    assert len(places) > 30
    for place in places:
        assert (ROOT / "src" / "hardneg" / place).exists() or (ROOT / place).exists(), place
    if page == "architecture.md":
        packages = {path.name for path in (ROOT / "src" / "hardneg").iterdir() if (path / "__init__.py").exists()}
        assert packages <= {place.rstrip("/") for place in places}


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_links_of_the_readme_are_absolute_and_lead_to_files_of_the_repository() -> None:
    """The package index shows the README without the repository around it."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)]+)\)", text)
    raw = REPOSITORY.replace("github.com", "raw.githubusercontent.com")
    assert len(targets) > 10
    for target in targets:
        kind, _, path = target.partition("#")[0].removeprefix(f"{REPOSITORY}/").partition("/main/")
        if target.startswith(raw):
            kind, path = "raw", target.removeprefix(f"{raw}/main/")
        assert kind in ("blob", "tree", "raw"), target
        assert (ROOT / path).exists(), target
        assert (kind == "tree") == (ROOT / path).is_dir(), target


def test_the_readme_is_short() -> None:
    words = re.sub(r"```.*?```|\]\([^)]*\)", " ", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    assert 400 <= len(words.split()) <= 700


def test_all_hand_written_pages_together_are_short() -> None:
    """Everything between blanks counts, also code and the bars of tables. Generated pages do not."""
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "README.md", *SITE)]
    assert sum(len(page.split()) for page in pages if not page.startswith("<!-- Generated")) <= 37_500


FIRST = [page for page in PAGES if page.name == "README.md" or page.parent.name == "tutorials"]


@pytest.mark.parametrize("page", FIRST, ids=[page.name for page in FIRST])
def test_first_pages_print_what_they_compute(page: Path) -> None:
    blocks = blocks_of(page)
    assert any(block.language == "output" for block in blocks)
    for block, following in zip_longest(blocks, blocks[1:]):
        prints = block.language == "python" and re.search(r"^ *print\(", block.source, re.MULTILINE)
        assert bool(prints) == (following is not None and following.language == "output"), f"{page.name}:{block.line}"
        for statement in ast.walk(ast.parse(block.source)) if block.language == "python" else ():
            assert not isinstance(statement, ast.Assert), f"{page.name}:{block.line}: print it"
            computed = isinstance(statement, ast.Expr) and not isinstance(statement.value, ast.Call | ast.Constant)
            assert not computed, f"{page.name}:{block.line}: print it"
    for line in (line for block in blocks if block.language == "console" for line in block.source.split("\n$ ")):
        assert len(line.splitlines()) > 1, f"{page.name}: show what {line!r} prints"


def test_extended_distribution_conforms(tmp_path: Path) -> None:
    """The first block of docs/extend.md is a whole file: alone and untouched it passes the suite."""
    first = next(block for block in blocks_of(ROOT / "docs" / "extend.md") if block.language == "python")
    before = set(hn.registered_negatives())
    alone = tmp_path / "alone.md"
    alone.write_text(f"```python\n{first.source}\n```\n", encoding="utf-8")
    run_page(alone)
    [name] = set(hn.registered_negatives()) - before
    assert_conforms(hn.registered_negatives()[name], compile=False)  # compiled when the page itself runs


def test_every_paper_has_its_row() -> None:
    text = (ROOT / "docs" / "explanation" / "papers.md").read_text(encoding="utf-8")
    names = [
        name
        for name, value in vars(hn.papers).items()
        if inspect.isfunction(value) and value.__module__ == hn.papers.__name__ and not name.startswith("_")
    ]
    assert len(names) >= 14
    for name in names:
        assert re.search(rf"^\| `{name}\(", text, re.MULTILINE), f"docs/explanation/papers.md has no row for {name}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```python\nassert 1 == 2, 'one is two'\n```", "one is two"),
        ("```python\n1 / 0\n```", "division by zero"),
        ("```python\nprint(1)\n```", "does not show what is printed"),
        ("```python\nprint(1)  # => 2\n```", "'2' is not printed"),
        ("```python\nprint(1, 2)  # => 2\n# => 1\n```", "is not printed"),
        ("```console\n$ hardneg explain 'Tlit(1.0)'\n```", "failed"),
        ("```console\n$ hardneg explain 'Tilt(1.0)'\nno such words\n```", "is not printed"),
        ("```console\n$ rm file\n```", "nothing runs"),
        ("```sh\nmake no-such-target\n```", "nothing knows"),
        ("```py\n1 / 0\n```", "nothing runs a block of 'py'"),
        ("```python\n1 / 0\n", "not closed"),
        ("```python\nprint(1.54)\n```\n```output\n1.50\n```", "this is printed"),
        ("```python\nx = 1\n```\ntext\n```text\n```\n```output\n1\n```", "an output of no block"),
    ],
)
def test_a_wrong_page_fails(tmp_path: Path, text: str, message: str) -> None:
    page = tmp_path / "wrong.md"
    page.write_text(text, encoding="utf-8")
    with pytest.raises((AssertionError, ZeroDivisionError), match=message):
        run_page(page)
