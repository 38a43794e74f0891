"""Every code block of the README and of docs/ runs, in order, one namespace per file; none is skipped silently."""

from __future__ import annotations

import contextlib
import inspect
import io
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
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


def run_page(page: Path) -> ModuleType:
    """Runs the page as a module, because dataclasses look their own up."""
    module = ModuleType(f"page_{page.stem.replace('-', '_')}")
    sys.modules[module.__name__] = module
    try:
        for block in blocks_of(page):
            if block.language == "python":
                run_python(page, block, module)
            elif block.language == "console":
                run_console(page, block)
            elif block.language == "sh":
                check_shell(page, block)
            else:
                assert block.language == "text", f"{page.name}:{block.line}: nothing runs a block of {block.language!r}"
    finally:
        del sys.modules[module.__name__]
    return module


def run_python(page: Path, block: Block, module: ModuleType) -> None:
    """Runs the block; each comment ``# => text`` must be a printed line, in this order. ``...`` matches anything."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        # Blank lines before the block give tracebacks the page's line numbers.
        exec(compile("\n" * block.line + block.source, str(page), "exec"), module.__dict__)
    shown = re.findall(r"# => ?(.*)$", block.source, re.MULTILINE)
    assert shown or "print(" not in block.source, f"{page.name}:{block.line}: the page does not show what is printed"
    lines = iter(printed.getvalue().splitlines())
    for text in shown:
        pattern = r"\s+".join(".*".join(map(re.escape, word.split("..."))) for word in text.split())
        found = any(re.fullmatch(rf"\s*{pattern}\s*", line) for line in lines)
        assert found, f"{page.name}:{block.line}: {text!r} is not printed, but:\n{printed.getvalue()}"


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
            set(arguments) <= set(targets) if name == "make" else line.startswith(("pip install .", "pip install '."))
        )
        assert known, f"{page.name}:{block.line}: nothing knows {line!r}"


@pytest.mark.filterwarnings("error::DeprecationWarning:page_.*")  # of what the page itself imports and calls
@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NEEDS.get(page.stem, ()):
        library(name)
    monkeypatch.chdir(tmp_path)  # pages may write files
    for name in re.findall(r"^<!-- needs (\w+) -->$", page.read_text(encoding="utf-8"), re.MULTILINE):
        pytest.importorskip(name, reason="the page needs an extra")
    generated = page.read_text(encoding="utf-8").startswith("<!-- Generated")
    assert generated or any(block.language == "python" for block in blocks_of(page)), f"{page.name} has nothing to run"
    run_page(page)


@pytest.mark.parametrize("name", NEEDS)
def test_the_script_of_an_integration_is_short(name: str) -> None:
    blocks = [block for block in blocks_of(ROOT / "docs" / "guides" / f"{name}.md") if block.language == "python"]
    assert max(len(block.source.splitlines()) for block in blocks) <= 30


def test_the_navigation_has_every_page() -> None:
    """The builder checks that listed pages exist, not that existing pages are listed."""
    listed = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(str(page.relative_to(ROOT / "docs")) for page in SITE)


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("zensical", reason="the site needs the extra docs")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    (tmp_path / "src").symlink_to(ROOT / "src")
    build = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in PAGES[1:]:
        html = tmp_path / "build" / page.relative_to(ROOT).with_suffix(".html")
        assert "<h1" in html.read_text(encoding="utf-8")
        assert not re.search(r'(?:src|rel="stylesheet" href)="https?:', html.read_text(encoding="utf-8"))


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
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


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
    ],
)
def test_a_wrong_page_fails(tmp_path: Path, text: str, message: str) -> None:
    page = tmp_path / "wrong.md"
    page.write_text(text, encoding="utf-8")
    with pytest.raises((AssertionError, ZeroDivisionError), match=message):
        run_page(page)
