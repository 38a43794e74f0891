"""Errors: one sentence made from fields, the same after pickling, and classes that callers can tell apart."""

import errno
import pickle
from pathlib import Path

import pytest

from hardneg.core import errors
from hardneg.core.errors import (
    ArgumentError,
    Damaged,
    DataChanged,
    DiskFull,
    FileError,
    GrammarError,
    HardnegError,
    InUse,
    MissingExtra,
    NoFile,
    NotFinite,
    NotWritten,
    UnknownName,
    argument_error,
    check_kind,
    check_range,
    missing_extra,
    optional,
)

EVERY = {
    HardnegError("mine", "a corpus"): "mine needs a corpus.",
    ArgumentError("Tilt", "beta", "beta=-1", "use 0"): "Tilt needs beta, got beta=-1; use 0.",
    UnknownName("epocs", ["epochs", "seed"], "in run.yaml", {"epochs": "It takes a number"}): (
        "'epocs' is not known. Did you mean epochs? It takes a number. Known in run.yaml: epochs, seed."
    ),
    GrammarError("parse", "brackets", "'Tilt'"): "parse needs brackets, got 'Tilt'.",
    NotFinite("score", "finite vectors", "NaN"): "score needs finite vectors, got NaN.",
    MissingExtra("audit", "datasets", fix="pip install x"): "audit needs datasets; pip install x.",
    FileError("audit", "a table", "a/b.txt", fix="name one"): "audit needs a table, got a/b.txt; name one.",
    NoFile("audit", "a table", "b.txt", "not there"): "audit needs a table, got b.txt, not there.",
    Damaged("train", "x", "c.pt", "its checksum differs", "delete it"): (
        "train: c.pt is damaged (its checksum differs); delete it."
    ),
    InUse("train", "x", "run", fix="wait"): "train: run is in use by another process; wait.",
    DataChanged("train", "the data of the run", "aa, not bb"): "train needs the data of the run, got aa, not bb.",
    NotWritten("x.json", errno.EACCES, "Permission denied"): (
        "x.json could not be written (Permission denied); any existing file is unchanged."
    ),
    DiskFull("x.json", errno.ENOSPC, "No space left", "free disk space"): (
        "x.json could not be written (No space left); any existing file is unchanged; free disk space."
    ),
}


def test_every_class_is_tried_here() -> None:
    classes = {one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, HardnegError)}
    assert classes == {type(error) for error in EVERY}


@pytest.mark.parametrize("error", EVERY, ids=lambda error: type(error).__name__)
def test_the_sentence_and_the_fields_survive_pickling(error: HardnegError) -> None:
    assert str(error) == EVERY[error]
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)
    assert (again.who, again.what, again.got, again.fix) == (error.who, error.what, error.got, error.fix)


def test_the_place_stands_before_the_sentence() -> None:
    for error, sentence in EVERY.items():
        found = pickle.loads(pickle.dumps(error)).within("seed 1").within("hcl()")
        assert str(pickle.loads(pickle.dumps(found))) == f"hcl(): seed 1: {sentence}"


def test_classes_of_python_still_catch_them() -> None:
    """What a caller wrote for the errors of Python goes on working."""
    for ours, theirs in [
        (ArgumentError, ValueError),
        (GrammarError, ArgumentError),
        (FileError, ValueError),
        (NoFile, FileNotFoundError),
        (MissingExtra, ImportError),
        (DiskFull, OSError),
    ]:
        assert issubclass(ours, theirs)
    assert not issubclass(NotWritten, ValueError)


def test_an_error_of_the_disk_has_the_fields_of_an_os_error() -> None:
    error = pickle.loads(
        pickle.dumps(DiskFull(Path("a") / "b", errno.ENOSPC, "No space left on device", "free disk space"))
    )
    assert (error.errno, error.strerror, error.filename) == (errno.ENOSPC, "No space left on device", "a/b")
    assert error.path == Path("a/b")


def test_arguments_are_named_with_their_value() -> None:
    error = argument_error("Tilt", "beta in [0, inf)", "beta", -1.0, fix="use 0.0")
    assert (error.who, error.what, error.got, error.fix) == ("Tilt", "beta in [0, inf)", "beta=-1.0", "use 0.0")
    with pytest.raises(ArgumentError) as wrong_range:
        check_range("Tilt", "beta", float("nan"), 0.0, 1.0)
    assert wrong_range.value.got == "beta=nan"
    with pytest.raises(ArgumentError) as wrong_kind:
        check_kind("Rank", "start", True, int, "a whole number")
    assert wrong_kind.value.got == "start=True"


def test_a_missing_package_names_its_extra() -> None:
    error = missing_extra("audit", "sklearn.svm", "eval")
    assert str(error) == "audit needs scikit-learn; pip install 'hardneg[eval]'."
    with pytest.raises(MissingExtra) as missing:
        optional("no_such_package_here", "audit", "text")
    assert (missing.value.what, missing.value.fix) == ("no-such-package-here", "pip install 'hardneg[text]'")
