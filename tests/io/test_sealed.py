"""Seals: every flipped bit of a stored file is found when it is read, or changes nothing."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hardneg.core.errors import Damaged, HardnegWarning
from hardneg.io.files import write_atomically
from hardneg.io.sealed import CHECKSUM, check_seal, checked, digest_of, is_whole, sealing, with_checksum

ARRAY = np.arange(6, dtype=np.float32).reshape(2, 3)


def load_npz(path: Path) -> Any:
    with np.load(path) as file:
        return file["x"]


KINDS: dict[str, tuple[Callable[[Any], object], Callable[[Path], Any]]] = {
    ".pt": (
        lambda file: torch.save({"x": torch.from_numpy(ARRAY)}, file),
        lambda path: torch.load(path, weights_only=True)["x"].numpy(),
    ),
    ".npz": (lambda file: np.savez(file, x=ARRAY), load_npz),
    ".npy": (lambda file: np.save(file, ARRAY), np.load),
}


def sealed(path: Path) -> Path:
    write_atomically(path, sealing(KINDS[path.suffix][0]))
    return path


@pytest.mark.parametrize("suffix", KINDS)
def test_readers_do_not_see_the_seal(suffix: str, tmp_path: Path) -> None:
    path = sealed(tmp_path / f"x{suffix}")
    check_seal(path, "train", "delete it")
    np.testing.assert_array_equal(KINDS[suffix][1](path), ARRAY)


@pytest.mark.parametrize("suffix", KINDS)
def test_every_flipped_bit_is_found_or_harmless(suffix: str, tmp_path: Path) -> None:
    path, read = sealed(tmp_path / f"x{suffix}"), KINDS[suffix][1]
    whole = path.read_bytes()
    end, found = len(whole) - 81, 0
    assert whole[end:].startswith(b"\nhardneg-sha256:")
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        try:
            check_seal(path, "train", "delete it")
        except Damaged as error:
            assert (error.path, error.fix) == (path, "delete it")  # noqa: PT017
            found += 1
        else:
            assert place >= end  # in the mark, not in the content
            np.testing.assert_array_equal(read(path), ARRAY)
    assert found >= end


@pytest.mark.parametrize("suffix", KINDS)
def test_a_file_that_lost_its_end_is_damaged(suffix: str, tmp_path: Path) -> None:
    """At every length, also where only the checksum is lost; a zeroed end is a lost one."""
    path = sealed(tmp_path / f"x{suffix}")
    whole = path.read_bytes()
    for length in range(len(whole)):
        for content in (whole[:length], whole[:length] + bytes(len(whole) - length)):
            path.write_bytes(content)
            with pytest.raises(Damaged):
                check_seal(path, "train", "delete it")
    with pytest.warns(HardnegWarning, match="damaged"):
        assert not is_whole(path, "train", "delete it", Path.read_bytes)


def test_a_seal_is_required_unless_others_write_such_files(tmp_path: Path) -> None:
    for content in (b"", b"short", b"x" * 500):
        (tmp_path / "theirs").write_bytes(content)
        check_seal(tmp_path / "theirs", "train", "delete it", required=False)
        with pytest.raises(Damaged):
            check_seal(tmp_path / "theirs", "train", "delete it")
    path = sealed(tmp_path / "x.npy")
    path.write_bytes(b"0" + path.read_bytes()[1:])
    with pytest.raises(Damaged):
        check_seal(path, "train", "delete it", required=False)


def test_the_digest_is_that_of_sha256(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc" + b"d" * 3_000_000)
    assert digest_of(tmp_path / "x", 3) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert digest_of(tmp_path / "x", 3_000_003) == digest_of(tmp_path / "x") != digest_of(tmp_path / "x", 2_999_999)


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"a": 1},
        {"nan": float("nan"), "inf": -float("inf")},
        {"keys": {2: 1, 10: 0}},
        {"p": Path("x"), "t": (1,)},
    ],
)
def test_records_are_checked_after_a_round_trip(record: dict[str, Any]) -> None:
    sent = with_checksum(record)
    assert with_checksum(sent) == sent
    line = json.dumps(sent, default=str).replace("NaN", "null").replace("-Infinity", "null")
    read = checked(json.loads(line), "train", Path("m.jsonl"), "delete it")
    assert CHECKSUM not in read
    assert read.keys() == record.keys()


def test_a_changed_record_is_damaged() -> None:
    sent = with_checksum({"step": 1, "loss": 0.5})
    for changed in (sent | {"loss": 0.25}, sent | {"more": 1}, sent | {CHECKSUM: None}, {CHECKSUM: sent[CHECKSUM]}):
        with pytest.raises(Damaged):
            checked(changed, "train", Path("m.jsonl"), "delete it")
    for other in ([1], "text", None, {"step": 1}):
        assert checked(other, "train", Path("m.jsonl"), "delete it") == other


def test_a_checksum_under_a_damaged_name_is_found() -> None:
    sent = with_checksum({"step": 1})
    with pytest.raises(Damaged):
        checked({"step": 1, "Checksum": sent[CHECKSUM]}, "train", Path("m.jsonl"), "delete it")


def test_a_seal_needs_no_reading_by_the_writer(tmp_path: Path) -> None:
    """Writers get a file opened for writing only, and may leave the place of writing anywhere."""

    def write(file: io.BufferedWriter) -> None:
        file.write(b"0123456789")
        file.seek(2)

    write_atomically(tmp_path / "x", sealing(write))
    assert (tmp_path / "x").read_bytes().startswith(b"0123456789\nhardneg-sha256:")
    check_seal(tmp_path / "x", "train", "delete it")
