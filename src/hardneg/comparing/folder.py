"""The folder of a comparison: it holds one, which resumes with the same options, data and threads."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hardneg.comparing.request import Comparison
from hardneg.core.errors import Damaged, FileError, warn_once
from hardneg.io.files import read_json, run_again, write_json
from hardneg.training.data.fingerprint import check_same_data, is_data_record


def open_folder(out: Path, comparison: Comparison, data: dict[str, Any], threads: int, allow_other_data: bool) -> int:
    """The threads of every run: the number with which the comparison was begun, also where ``--jobs`` differ now.

    Raises for a folder whose comparison has other options, or was begun with other data. Arms and seeds may be added.
    """
    path = out / "request.json"
    wanted = json.loads(json.dumps({"common": comparison.common, "tune": comparison.tune, "metric": comparison.metric}))
    before = _read(path) if path.exists() else {}
    if before and before | wanted != before:
        raise FileError("compare", "the options that the comparison was begun with", path, fix="use another --out")
    if before.get("data") and not allow_other_data:
        check_same_data("compare", out, before["data"], data)
    begun_with = before.get("threads")
    if begun_with not in (None, threads) and "OMP_NUM_THREADS" in os.environ:
        warn_once(
            "compare.threads",
            f"OMP_NUM_THREADS={threads} has no effect: this comparison was begun with {begun_with} for each run, on "
            "which its figures depend. Use another --out to start a new one.",
        )
    write_json(path, wanted | {"threads": begun_with or threads, "data": data}, run_again)
    return int(begun_with or threads)


def _read(path: Path) -> dict[str, Any]:
    advice = "delete it if the comparison is the same, or use another --out"
    found: dict[str, Any] = read_json(path, advice, who="compare")
    threads, data = found.get("threads"), found.get("data")
    if not isinstance(threads, int | None) or not (data is None or is_data_record(data)):
        raise Damaged("compare", "what it was begun with", path, got="its threads or data are not", fix=advice)
    return found
