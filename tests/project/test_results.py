"""The page of results is what the studies and their JSON files say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from hardneg.comparing.arms import parse_arm

ROOT = Path(__file__).parents[2]
STUDIES = ROOT / "experiments" / "studies"


@pytest.fixture(scope="module")
def results() -> ModuleType:
    spec = importlib.util.spec_from_file_location("results", ROOT / "tools" / "results.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(results: ModuleType) -> None:
    assert results.PAGE.read_text(encoding="utf-8") == results.page(), "out of date: run `make results`"


def test_every_study_has_its_request_and_its_arms_can_be_read() -> None:
    studies = yaml.safe_load((STUDIES / "studies.yaml").read_text())
    names = {study["name"] for study in studies if "claims" in study}
    assert names == {path.stem for path in STUDIES.glob("*.yaml")} - {"studies"}
    for name in names:
        for arm in yaml.safe_load((STUDIES / f"{name}.yaml").read_text())["arms"]:
            assert parse_arm(arm).complete().batch_size > 0
