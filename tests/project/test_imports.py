"""What an import costs: nothing heavy for ``import hardneg`` and ``hardneg --help``, no extra for any public name."""

from __future__ import annotations

import subprocess
import sys

import pytest

import hardneg as hn

EXTRAS = {
    "accelerate",
    "faiss",
    "kornia",
    "lightly",
    "lightning",
    "matplotlib",
    "numba",
    "open_clip",
    "pytorch_lightning",
    "pytorch_metric_learning",
    "sentence_transformers",
    "sklearn",
    "timm",
    "torch_geometric",
    "torchvision",
    "transformers",
    "triton",
}


def modules_after(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter has after running this code; it must not fail."""
    report = f"{code}\nimport sys\nprint('\\nmodules:', *{{name.partition('.')[0] for name in sys.modules}})"
    run = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.rpartition("modules:")[2].split())


def test_import_is_light() -> None:
    modules = modules_after("import hardneg")
    assert "hardneg" in modules
    assert modules & (EXTRAS | {"torch", "numpy", "typer", "rich"}) == set()


def test_listing_the_names_is_light() -> None:
    modules = modules_after("import hardneg; assert 'two_views' in dir(hardneg); assert hardneg.__version__")
    assert modules & (EXTRAS | {"torch", "numpy"}) == set()


def test_every_public_name_pulls_in_torch_and_no_extra() -> None:
    """torch brings triton along by itself where it finds it, so what torch imports alone is subtracted."""
    modules = modules_after("import hardneg\nfor name in dir(hardneg): getattr(hardneg, name)")
    assert "torch" in modules
    assert modules & (EXTRAS - modules_after("import torch, torch.nn")) == set()


def test_every_module_is_importable_without_an_extra() -> None:
    """Extras are imported inside the functions that need them: hiding them all breaks no import."""
    code = f"""
import importlib, pkgutil, sys
for name in {sorted(EXTRAS - {"triton"})!r}:
    sys.modules[name] = None  # import raises ModuleNotFoundError
import hardneg
for module in pkgutil.walk_packages(hardneg.__path__, "hardneg."):
    if "kernels" not in module.name and "integrations" not in module.name and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""
    assert "torch" in modules_after(code)


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], *([verb, "--help"] for verb in ("explain", "mine", "audit", "judge", "compare"))],
)
def test_help_answers_without_torch(arguments: list[str]) -> None:
    code = f"""
import sys
from hardneg.cli.app import main
sys.argv = ["hardneg", *{arguments!r}]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
"""
    modules = modules_after(code)
    assert "typer" in modules
    assert modules & (EXTRAS | {"torch", "numpy"}) == set()


def test_installed_command_answers() -> None:
    run = subprocess.run([sys.executable, "-m", "hardneg", "--help"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "chooses the negatives" in run.stdout


def test_heavy_import_is_caught() -> None:
    assert "torch" in modules_after("import hardneg; hardneg.two_views")


def test_public_names() -> None:
    """Pinned: a name is added here on purpose, and everything else is found in its package."""
    names = """
        AtMost BelowPositive ClippedTilt From Gaussian Hardening Known OtherCluster OtherLabel Rank Ring SameCluster
        Threshold Tilt Uniform
        parse registered_negatives draw NEVER Keys Scores two_views cross_views score from_matrix
        info_nce jsd sigmoid surrogate reduce diagnose ContrastiveLoss EMC2 SogCLR Queue Bank
        build_graph walk ProximityBatchSampler mine audit judge load_encoder train
        mutual_information global_loss gradient_error
        auditing batching core judging losses mining negatives papers schedules state theory __version__
    """
    assert sorted(dir(hn)) == sorted(names.split())


def test_every_name_of_the_grammar_is_public() -> None:
    for name, cls in hn.registered_negatives().items():
        if cls.__module__.startswith("hardneg."):
            assert getattr(hn, name) is cls


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'three_views'"):
        hn.three_views  # noqa: B018
