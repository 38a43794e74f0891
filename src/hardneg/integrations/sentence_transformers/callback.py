"""A callback for the trainers of sentence-transformers and transformers: schedules, diagnostics and state of a loss.

It needs neither library: trainers call its methods by their names.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hardneg.core.errors import Damaged, DataChanged, NoFile
from hardneg.io.files import read_json, write_atomically, write_json
from hardneg.io.sealed import check_seal, sealing

LOGGED = ("hardness", "uniform_hardness", "false_negatives", "effective_number", "effective_temperature", "clamped")
_fix = "resume from a checkpoint that has it, or begin again in another output folder"
_named = "for a checkpoint of another folder set resume_from_checkpoint in the training arguments, too"
_elsewhere = f"{_fix}; {_named}"
_not_own = ("model", "guide")
_block = 4096  # rows of a data set that are digested at once
AnyLoss = nn.Module | Mapping[str, nn.Module]


class LossCallback:
    """Advances the schedules of a loss, adds diagnostics of its negatives to the logs, and keeps its state.

    The state (queue, chains, schedules) goes to ``checkpoint-N/hardneg/``, one file per rank; resuming without it, or
    with a ``datasets.Dataset`` that has other values in its columns, raises. ``loss`` may be wrapped (MatryoshkaLoss),
    or one for each data set.
    """

    def __init__(self, loss: AnyLoss | None = None) -> None:
        self.losses = {"": loss} if isinstance(loss, nn.Module) else dict(loss or {})
        self.data: list[dict[str, str]] | None = None
        """A digest of each column of each training set; None if their rows are not those of tables."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_"):  # an event that is of no interest here
            return lambda *args, **more: None
        raise AttributeError(name)

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.data = _digests(getattr(more.get("train_dataloader"), "dataset", None))
        if state.global_step:
            folder = checkpoint_of(args, state)
            _check_history(type(self).__name__, folder.parent, state)
            self.load(folder, args)
        self._set_progress(state)  # for an evaluation before the first step

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._set_progress(state)
        if state.logging_steps and (state.global_step + 1) % state.logging_steps == 0:
            for module in self._with("watch"):
                module.watch = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **more: Any) -> None:
        """Also in the history, which was written before the callbacks were called."""
        found = self.diagnostics()
        if logs is not None and found:
            logs.update(found)
            state.log_history[-1].update(found)

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.save(_folder(Path(args.output_dir), state), args)

    def diagnostics(self) -> dict[str, float]:
        """Those of the batches that were watched since the last call."""
        found: dict[str, float] = {}
        for name, loss in self.losses.items():
            for diagnosis in filter(None, (module.diagnosis() for module in _with(loss, "diagnosis"))):
                numbers, prefix = diagnosis.summary(), f"negatives/{name}/" if name else "negatives/"
                found |= {prefix + key: round(numbers[key], 6) for key in LOGGED if not math.isnan(numbers[key])}
        return found

    def save(self, folder: Path, args: Any) -> None:
        """``record.json`` is written last: without it the folder is not whole."""
        rank = args.process_index
        states = {name: own_state(loss) for name, loss in self.losses.items()}
        write_atomically(folder / f"loss-{rank}.pt", sealing(lambda file: torch.save(states, file)), _fix)
        if rank == 0:
            found = {"world_size": args.world_size, "data": self.data, **self.record(folder)}
            write_json(folder / "record.json", found, _fix)

    def load(self, folder: Path, args: Any) -> None:
        who, kept, own = type(self).__name__, folder / "record.json", folder / f"loss-{args.process_index}.pt"
        for path in (kept, own):
            if not path.is_file():
                raise NoFile(who, "the state that the interrupted run saved", path, fix=_elsewhere)
        record = read_json(kept, _fix, who=who)
        if record["world_size"] != args.world_size:
            what, got = f"{record['world_size']} processes, as the interrupted run had", str(args.world_size)
            raise DataChanged(who, what, got, "resume with as many")
        if record["data"] != self.data:
            got = _difference(record["data"], self.data)
            raise DataChanged(who, "the training set of the interrupted run", got, "resume with it, or begin again")
        states = _read_states(own, who)
        if set(states) != set(self.losses):
            raise DataChanged(who, f"losses named {sorted(states)}", str(sorted(self.losses)))
        for name, loss in self.losses.items():
            load_own_state(loss, states[name])
        self.restore(folder, record)

    def record(self, folder: Path) -> dict[str, Any]:
        """What else is kept: written to the folder, or returned."""
        return {}

    def restore(self, folder: Path, record: dict[str, Any]) -> None:
        """Takes up what ``record`` kept."""

    def _set_progress(self, state: Any) -> None:
        for module in self._with("set_progress"):
            module.set_progress(state.global_step, state.max_steps)

    def _with(self, name: str) -> Iterator[Any]:
        return (module for loss in self.losses.values() for module in _with(loss, name))


def own_state(loss: nn.Module) -> dict[str, Any]:
    """The state of a loss without that of the models in it, which the trainer saves."""
    return {name: value for name, value in loss.state_dict().items() if _is_own(name)}


def load_own_state(loss: nn.Module, state: dict[str, Any]) -> None:
    try:
        missing, unknown = loss.load_state_dict(state, strict=False)
    except RuntimeError as error:  # such as a queue of another capacity
        fix = "resume with the sizes of the interrupted run"
        raise DataChanged(type(loss).__name__, "the state of the same loss", _sentence(error), fix) from None
    missing = [name for name in missing if _is_own(name)]
    if missing or unknown:
        got = f"a state with {unknown[:3]} and without {missing[:3]}"
        raise DataChanged(type(loss).__name__, "the state of the same loss", got, "resume with the loss of the run")


def _digests(dataset: Any) -> list[dict[str, str]] | None:
    """A digest of each column that is not binary, in each part of a data set; None unless all are tables."""
    parts = getattr(dataset, "datasets", [dataset])  # of a ConcatDataset
    if not all(hasattr(part, "with_format") and hasattr(part, "__len__") for part in parts):
        return None
    return [_digests_of_columns(part.with_format("arrow")) for part in parts]  # without transforms


def _digests_of_columns(table: Any) -> dict[str, str]:
    found = {name: hashlib.blake2b(digest_size=8) for name in table.column_names}
    for low in range(0, len(table), _block):
        rows = table[low : low + _block]
        for name, column in zip(rows.column_names, rows.columns, strict=True):
            if not any(kind in str(column.type) for kind in ("binary", "struct")):  # images and sound may be huge
                found[name].update(repr(column.to_pylist()).encode())
    return {name: digest.hexdigest() for name, digest in found.items()}


def _difference(before: list[dict[str, str]] | None, now: list[dict[str, str]] | None) -> str:
    if before is None or now is None or len(before) != len(now):
        counts = ["one that is not a table" if each is None else f"{len(each)} parts" for each in (before, now)]
        return f"{counts[1]} instead of {counts[0]}"
    pairs = zip(before, now, strict=True)
    names = {name for one, two in pairs for name in one | two if one.get(name) != two.get(name)}
    return f"other values in {', '.join(sorted(names)) or 'its columns'}"


def _sentence(error: Exception) -> str:
    return " ".join(str(error).split()).partition(": ")[2] or str(error)


def _read_states(path: Path, who: str) -> dict[str, Any]:
    check_seal(path, who, _fix)
    try:
        states = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever the bytes of a damaged file lead it to
        raise Damaged(who, "the state of a loss", path, got="torch cannot read it", fix=_fix) from error
    if not isinstance(states, dict):
        raise Damaged(who, "the state of a loss", path, got="it holds something else", fix=_fix)
    return states


def checkpoint_of(args: Any, state: Any) -> Path:
    """The folder of this package in the checkpoint that training resumes from."""
    given = getattr(args, "resume_from_checkpoint", None)
    if isinstance(given, str) and (Path(given) / "hardneg").is_dir():
        return Path(given) / "hardneg"
    return _folder(Path(args.output_dir), state)


def _check_history(who: str, checkpoint: Path, state: Any) -> None:
    """Raises where the trainer resumes from another checkpoint: it does not name its folder, but has its logs."""
    path = checkpoint / "trainer_state.json"
    if not path.is_file():
        return
    saved = json.loads(path.read_text(encoding="utf-8"))
    kept, here = ([one["global_step"], one["log_history"]] for one in (saved, vars(state)))
    if json.dumps(kept) != json.dumps(here):  # as text, in which NaN is equal to NaN
        got = f"{checkpoint}, a checkpoint with other logs"
        raise DataChanged(who, "the checkpoint from which the trainer resumes", got, _named)


def _folder(output: Path, state: Any) -> Path:
    return output / f"checkpoint-{state.global_step}" / "hardneg"


def _with(loss: nn.Module, name: str) -> Iterator[Any]:
    """The loss, or else its parts, that have an attribute of this name; not the models in it, which have many parts."""
    if hasattr(loss, name):
        yield loss
        return
    for child_name, child in loss.named_children():
        if child_name not in _not_own:
            yield from _with(child, name)


def _is_own(name: str) -> bool:
    return not any(part in _not_own for part in name.split(".")[:-1])
