"""CPU seconds of the tests of each folder against tests/durations.json: ``--budget`` of ``make test`` and its kin.

CPU seconds, of a test's process and of the processes that it has waited for, do not depend on what else the machine
does, as wall time would. They are divided by the speed of the machine, which is the median over all folders of what a
folder takes to what the file says. A folder that takes half as much again is then measured a second time, alone: only
what is too long in both runs fails.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator

import pytest

GROWTH, SPARE = 1.5, 5.0
"""A folder may take ``GROWTH`` times its seconds, and always ``SPARE`` seconds more, for imports and first runs."""

Seconds = dict[str, float]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--budget``."""
    parser.addoption(
        "--budget",
        choices=["check", "write", "show"],
        help="compare the CPU seconds of each folder of tests with tests/durations.json, or write or show them",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Measure each test; where the reports arrive, add them up."""
    if config.getoption("--budget", None):
        config.pluginmanager.register(Budget(config))


def speed_of(seconds: Seconds, budget: Seconds) -> float:
    """Return how many times as long as in the budget the tests take on this machine: the median over the folders.

    A folder that has grown does not move it much. Folders of a few seconds are left out, which mostly import.
    """
    ratios = [seconds[folder] / limit for folder, limit in budget.items() if limit > SPARE and folder in seconds]
    return statistics.median(ratios) if ratios else 1.0


def over_budget(seconds: Seconds, budget: Seconds) -> Seconds:
    """Return the folders that exceed their budget, with what they may take on this machine."""
    speed = speed_of(seconds, budget)
    allowed = {name: speed * max(GROWTH * budget.get(name, 0.0), budget.get(name, 0.0) + SPARE) for name in seconds}
    return {name: limit for name, limit in allowed.items() if seconds[name] > limit}


class Budget:
    """Hooks that measure the tests of this process, and add up what all processes report."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.file = config.rootpath / "tests" / "durations.json"
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.lines: list[str] = []
        self.begun = 0.0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Iterator[None]:
        self.begun = _cpu_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        try:
            return (yield)
        finally:
            item.user_properties.append(("cpu_seconds", _cpu_seconds() - self.begun))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            folder = re.match(r"src|tests/\w+", report.nodeid)
            name = folder[0] if folder else report.nodeid
            self.seconds[name] += dict(report.user_properties).get("cpu_seconds", 0.0)  # type: ignore[arg-type]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write, show or check; a folder over its budget fails a session that has not failed."""
        if hasattr(self.config, "workerinput") or session.exitstatus:
            return
        wanted = self.config.getoption("--budget")
        seconds = {name: round(value, 1) for name, value in sorted(self.seconds.items())}
        if wanted == "write":
            self.file.write_text(json.dumps(seconds, indent=2) + "\n", encoding="utf-8")
        elif wanted == "show":
            self.lines = [f"cpu seconds {json.dumps(seconds)}"]
        elif not _has_gpu():  # with one, other tests run
            self._check(session, seconds)

    def _check(self, session: pytest.Session, seconds: Seconds) -> None:
        budget: Seconds = json.loads(self.file.read_text(encoding="utf-8"))
        for name, limit in over_budget(seconds, budget).items():
            again = self._measured_alone(name)
            if again.get(name, 0.0) > limit:
                self.lines.append(
                    f"The tests of {name} took {seconds[name]:.0f} s of CPU time and, alone, {again[name]:.0f} s; "
                    f"at most {limit:.0f} s are allowed, half as much again as in tests/durations.json at the speed "
                    "of this machine. Make them cheaper, list long ones in tests/long.txt, or run `make durations`."
                )
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _measured_alone(self, name: str) -> Seconds:
        command = [sys.executable, "-m", "pytest", "--budget=show", "-p", "no:cacheprovider", name]
        command += ["-m", self.config.option.markexpr] if self.config.option.markexpr else []
        run = subprocess.run(command, cwd=self.config.rootpath, capture_output=True, text=True, check=False)
        found = re.search(r"^cpu seconds (.*)$", run.stdout, re.MULTILINE)
        return json.loads(found[1]) if found else {}

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self.lines:
            terminalreporter.write_line(line)


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _has_gpu() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_available()
