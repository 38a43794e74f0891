"""Prints the first Python block of a Markdown page: `make dist` runs that of the README with the wheel alone."""

from __future__ import annotations

import re
import sys
from pathlib import Path


def first_example(text: str) -> str:
    found = re.search(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert found is not None, "the page has no Python block"
    return found[1]


if __name__ == "__main__":
    sys.stdout.write(first_example(Path(sys.argv[1]).read_text(encoding="utf-8")))
