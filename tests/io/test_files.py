"""Files are written whole or not at all, and JSON is read as it was written."""

import errno
import json
import multiprocessing
import os
import pickle
import stat
import time
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from hardneg.core.errors import Damaged, DiskFull, FileError, InUse, NotWritten
from hardneg.io.files import disk_failure, locked, output_folder, parse_json, read_json, write_atomically, write_json
from support.errors import raises


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "x"
    write_atomically(path, lambda file: file.write(b"one"))
    write_atomically(path, lambda file: file.write(b"two"))
    assert path.read_bytes() == b"two"
    assert [one.name for one in path.parent.iterdir()] == ["x"]


def failing(error: BaseException) -> Any:
    def write(file: BinaryIO) -> None:
        file.write(b"half")
        raise error

    return write


@pytest.mark.parametrize(
    ("number", "kind", "fix"),
    [
        (errno.ENOSPC, DiskFull, "free disk space, then x"),
        (errno.EDQUOT, DiskFull, "free disk space, then x"),
        (errno.EFBIG, DiskFull, "free disk space, then x"),
        (errno.EIO, NotWritten, None),
    ],
)
def test_a_failed_write_leaves_what_was_there(number: int, kind: type, fix: str | None, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with pytest.raises(NotWritten) as error:
        write_atomically(path, failing(OSError(number, os.strerror(number))), "free disk space, then x")
    found = pickle.loads(pickle.dumps(error.value))
    assert (type(found), found.errno, found.path, found.filename) == (kind, number, path, str(path))
    assert (found.got, found.fix) == (os.strerror(number), fix)
    assert path.read_bytes() == b"old"
    assert [one.name for one in tmp_path.iterdir()] == ["x"]


def test_an_error_of_torch_that_hides_the_disk_is_distinguished(tmp_path: Path) -> None:
    def write(file: BinaryIO) -> None:
        try:
            raise OSError(errno.ENOSPC, "full")
        except OSError:
            raise RuntimeError("unexpected pos 64 vs 0")  # noqa: B904  (torch.save gives it as the context only)

    with pytest.raises(DiskFull):
        write_atomically(tmp_path / "x", write)
    with pytest.raises(RuntimeError, match="ours"):
        write_atomically(tmp_path / "x", failing(RuntimeError("ours")))
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "x", failing(KeyboardInterrupt()))
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_an_error_of_the_disk(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(NotWritten) as error:
        write_atomically(tmp_path / "file" / "x", lambda file: None)
    assert error.value.errno in (errno.ENOTDIR, errno.EEXIST)
    assert (tmp_path / "file").read_text() == "mine"


def test_two_processes_of_one_number_write_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "out"

    def write(file: BinaryIO) -> None:  # another container does the same meanwhile
        write_atomically(path, lambda other: other.write(b"second"))
        file.write(b"first")

    write_atomically(path, write)
    assert path.read_bytes() == b"first"
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


def test_links_are_replaced_and_never_followed(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "out"
    victim.write_text("mine")
    path.symlink_to(victim)
    write_atomically(path, lambda file: file.write(b"new"))
    assert victim.read_text() == "mine"
    assert path.read_text() == "new"
    assert not path.is_symlink()


def test_an_error_that_is_one_already_stays_as_it_is(tmp_path: Path) -> None:
    inner = DiskFull(tmp_path / "inner", errno.ENOSPC, "full", "free disk space")
    assert disk_failure(tmp_path / "outer", inner, "x") is inner


def test_an_output_folder_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert output_folder(tmp_path / "new") == tmp_path / "new"
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with raises(FileError, who="--out", got="which is a file or lies below one") as error:
            output_folder(path)
        assert error.value.path == path


VALUES: dict[str, Any] = {
    "text": "Größe\x00\u2028",
    "numbers": [1, -0.0, 1e-300, 10**30],
    "nested": {"b": None, "a": [True, {}]},
    "tuple": (1, 2),
    "path": Path("a/b"),
    "nan": float("nan"),
    "keys": {2: "two", 10: "ten"},
}
READ: dict[str, Any] = VALUES | {"tuple": [1, 2], "path": "a/b", "nan": None, "keys": {"2": "two", "10": "ten"}}


def test_json_is_read_back_and_carries_a_checksum(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, VALUES)
    assert "checksum" in json.loads(path.read_text())
    assert read_json(path, "delete it") == READ
    write_json(path, json.loads(path.read_text()))  # one that has a checksum gets no second one
    assert read_json(path, "delete it") == READ
    write_json(path, [1, 2])
    with raises(Damaged, who="hardneg", what="JSON", got="it is not a JSON object"):
        read_json(path, "delete it")


def test_json_without_a_checksum_passes(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"a": 1}')
    assert read_json(tmp_path / "x.json", "delete it") == {"a": 1}


def test_every_flipped_bit_of_json_is_found_or_harmless(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"epochs": 20, "rate": 0.25, "name": "hcl(beta=1)", "none": None, "list": [1, [2]]})
    wanted, whole, found = read_json(path, ""), path.read_bytes(), 0
    for bit in range(8 * len(whole)):
        path.write_bytes(flipped(whole, bit))
        try:
            read = read_json(path, "delete it")
        except Damaged as error:
            assert error.path == path  # noqa: PT017
            found += 1
        else:  # a blank that is another blank
            assert read == wanted
    assert found > 0.8 * 8 * len(whole)


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.mark.parametrize(
    "text",
    ["", "{", "NaN", '{"a": NaN}', '{"a": Infinity}', '{"a": 1e400}', "[" * 100_000, "1" * 5000, "[]", "3"],
)
def test_what_is_no_json_object_is_damage(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(Damaged) as error:
        read_json(tmp_path / "x.json", "delete it", who="train")
    assert (error.value.who, error.value.fix) == ("train", "delete it")
    assert len(str(error.value)) < 500


def test_bytes_and_folders_are_no_json(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b'{"a": "\xff\xfe"}')
    (tmp_path / "folder").mkdir()
    for name in ("x.json", "folder"):
        with pytest.raises(Damaged):
            read_json(tmp_path / name, "delete it")


def test_numbers_that_json_does_not_have_are_refused() -> None:
    assert parse_json('{"a": [1.5, -2]}') == {"a": [1.5, -2]}
    for text in ("[-Infinity]", "[1e999]", "[NaN]"):
        with pytest.raises(ValueError, match="JSON"):
            parse_json(text)


def test_whole_numbers_beyond_a_float_are_damage(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for digits in (400, 5000):
        path.write_text('{"options": {"dim": 1' + "0" * digits + "}}")
        with pytest.raises(Damaged):
            read_json(path, "delete it")
    assert parse_json(str(10**300)) == 10**300


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a power failure could leave a name without the content."""
    file, synced = tmp_path / "file", []

    def fsync(number: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(number).st_mode)
        synced.append((is_folder, os.fstat(number).st_size if not is_folder else 0, file.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    write_atomically(file, lambda opened: opened.write(b"content"))
    assert synced == [(False, 7, False), (True, 0, True)]


def test_a_lock_file_that_cannot_be_deleted_while_it_is_open_stays(tmp_path, monkeypatch):
    """As on Windows."""

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EACCES, "in use", str(path))

    with monkeypatch.context() as patch, locked(tmp_path / "x.lock", "mine", remove=True):
        patch.setattr(Path, "unlink", refuse)
        (tmp_path / "out").write_text("done")
    with locked(tmp_path / "x.lock", "mine", remove=True):
        pass
    assert [one.name for one in tmp_path.iterdir()] == ["out"]


def holding(path: Path, ready: Any) -> None:
    with locked(path, "mine"):
        ready.set()
        time.sleep(60)


def test_a_lock_refuses_another_process_and_ends_with_its_own_one(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    other = context.Process(target=holding, args=(tmp_path / "x.lock", ready))
    other.start()
    assert ready.wait(60)
    with pytest.raises(InUse) as error, locked(tmp_path / "x.lock", "mine", patience=0.1, fix="wait"):
        pass
    assert (error.value.who, error.value.path, error.value.fix) == ("mine", tmp_path, "wait")
    other.kill()
    other.join()
    with locked(tmp_path / "x.lock", "mine", patience=10.0):
        pass


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to(path.parent / "victim")])
def test_a_lock_is_a_file_of_its_own(make: Any, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    make(tmp_path / "x.lock")
    with pytest.raises(FileError) as error, locked(tmp_path / "x.lock", "mine", remove=True):
        pass
    assert error.value.path == tmp_path / "x.lock"
    assert (tmp_path / "victim").read_text() == "mine"


def test_a_disk_without_locks_locks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    number = errno.ENOLCK
    with locked(tmp_path / "x.lock", "mine"):
        pass
    number = errno.EIO
    with pytest.raises(OSError, match=os.strerror(number)), locked(tmp_path / "x.lock", "mine"):
        pass
