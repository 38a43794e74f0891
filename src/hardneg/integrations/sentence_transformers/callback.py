"""Callback for the trainers of sentence-transformers and transformers: schedules, diagnostics and state of a loss.

It imports neither library, because trainers call its methods by name. batches.py extends it.

Layout of ``checkpoint-N/hardneg/``: ``loss-RANK.pt`` holds the state of the loss on each rank, and ``record.json``,
written last, the number of processes, the digests of the training set and what subclasses add.
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

from hardneg.core.diagnose import LOG_PREFIX
from hardneg.core.errors import Damaged, DataChanged, NoFile
from hardneg.io.files import read_json, write_atomically, write_json
from hardneg.io.sealed import check_seal, sealing

LOGGED = ("hardness", "uniform_hardness", "false_negatives", "effective_number", "effective_temperature", "clamped")
_fix = "resume from a checkpoint that has it, or start a new run in another output folder"
_named = "for a checkpoint in another folder, also set resume_from_checkpoint in the training arguments"
_elsewhere = f"{_fix}; {_named}"
_not_own = ("model", "guide")  # submodules of a loss that the trainer saves itself
_block = 4096  # rows of a data set digested at a time
AnyLoss = nn.Module | Mapping[str, nn.Module]


class LossCallback:
    """Advances the schedules of a loss, logs diagnostics of its negatives, and saves its state.

    The state (queue, chains, schedules) is saved in ``checkpoint-N/hardneg/``, one file per rank. Resuming raises if it
    is missing, or if the columns of a ``datasets.Dataset`` have changed.

    Args:
        loss: The loss, possibly inside another one such as MatryoshkaLoss, or a dict of losses by data set.
    """

    def __init__(self, loss: AnyLoss | None = None) -> None:
        self.losses = {"": loss} if isinstance(loss, nn.Module) else dict(loss or {})
        self.data: list[dict[str, str]] | None = None
        """Digest of each column of each training set; None if they are not tables."""

    def __getattr__(self, name: str) -> Any:
        """Ignore events that are not handled here."""
        if name.startswith("on_"):
            return lambda *args, **more: None
        raise AttributeError(name)

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Digest the training set and, if training resumes, restore the state of the checkpoint.

        Raises:
            NoFile: The checkpoint has no state of the loss.
            DataChanged: The processes, the training set or the losses differ from those of the interrupted run.
        """
        self.data = _digests(getattr(more.get("train_dataloader"), "dataset", None))
        if state.global_step:
            folder = checkpoint_of(args, state)
            _check_history(type(self).__name__, folder.parent, state)
            self.load(folder, args)
        self._set_progress(state)  # for an evaluation before the first step

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Advance the schedules; watch the batch if this step is logged."""
        self._set_progress(state)
        if state.logging_steps and (state.global_step + 1) % state.logging_steps == 0:
            for module in self._with("watch"):
                module.watch = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **more: Any) -> None:
        """Add the diagnostics to the logs, and to the history, which is written before callbacks are called."""
        found = self.diagnostics()
        if logs is not None and found:
            logs.update(found)
            state.log_history[-1].update(found)

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Save the state of the loss in the new checkpoint."""
        self.save(_folder(Path(args.output_dir), state), args)

    def diagnostics(self) -> dict[str, float]:
        """Return diagnostics of the batches watched since the last call, by name such as ``hardneg/hardness``."""
        found: dict[str, float] = {}
        for name, loss in self.losses.items():
            for diagnosis in filter(None, (module.diagnosis() for module in _with(loss, "diagnosis"))):
                numbers, prefix = diagnosis.summary(), f"{LOG_PREFIX}{name}/" if name else LOG_PREFIX
                found |= {prefix + key: round(numbers[key], 6) for key in LOGGED if not math.isnan(numbers[key])}
        return found

    def save(self, folder: Path, args: Any) -> None:
        """Write the state of the losses of this rank; rank 0 also writes ``record.json``.

        Args:
            folder: Folder inside the checkpoint.
            args: Training arguments, for the rank and the number of processes.
        """
        rank = args.process_index
        states = {name: own_state(loss) for name, loss in self.losses.items()}
        write_atomically(folder / f"loss-{rank}.pt", sealing(lambda file: torch.save(states, file)), _fix)
        if rank == 0:
            found = {"world_size": args.world_size, "data": self.data, **self.record(folder)}
            write_json(folder / "record.json", found, _fix)

    def load(self, folder: Path, args: Any) -> None:
        """Restore what ``save`` wrote.

        Raises:
            NoFile: A file is missing.
            Damaged: A file cannot be read.
            DataChanged: The processes, the training set or the losses differ from those of the interrupted run.
        """
        who, kept, own = type(self).__name__, folder / "record.json", folder / f"loss-{args.process_index}.pt"
        for path in (kept, own):
            if not path.is_file():
                raise NoFile(who, "the state of the interrupted run", path, fix=_elsewhere)
        record = read_json(kept, _fix, who=who)
        if record["world_size"] != args.world_size:
            what, got = f"{record['world_size']} processes, as the interrupted run had", str(args.world_size)
            raise DataChanged(who, what, got, "resume with the same number of processes")
        if record["data"] != self.data:
            got = _difference(record["data"], self.data)
            raise DataChanged(who, "the training set of the interrupted run", got, "resume with it, or start a new run")
        states = _read_states(own, who)
        if set(states) != set(self.losses):
            raise DataChanged(who, f"losses named {sorted(states)}", str(sorted(self.losses)))
        for name, loss in self.losses.items():
            load_own_state(loss, states[name])
        self.restore(folder, record)

    def record(self, folder: Path) -> dict[str, Any]:
        """Save further state of a subclass: write it to the folder, or return it for ``record.json``."""
        return {}

    def restore(self, folder: Path, record: dict[str, Any]) -> None:
        """Restore what ``record`` of a subclass saved."""

    def _set_progress(self, state: Any) -> None:
        for module in self._with("set_progress"):
            module.set_progress(state.global_step, state.max_steps)

    def _with(self, name: str) -> Iterator[Any]:
        return (module for loss in self.losses.values() for module in _with(loss, name))


def own_state(loss: nn.Module) -> dict[str, Any]:
    """Return the state of a loss without the models in it, which the trainer saves."""
    return {name: value for name, value in loss.state_dict().items() if _is_own(name)}


def load_own_state(loss: nn.Module, state: dict[str, Any]) -> None:
    """Load what `own_state` returned.

    Raises:
        DataChanged: The state belongs to a loss with other buffers, or with buffers of other sizes.
    """
    try:
        missing, unknown = loss.load_state_dict(state, strict=False)
    except RuntimeError as error:  # for instance a queue of another capacity
        fix = "resume with the options of the interrupted run"
        raise DataChanged(type(loss).__name__, "the state of the same loss", _sentence(error), fix) from None
    missing = [name for name in missing if _is_own(name)]
    if missing or unknown:
        got = f"a state with {unknown[:3]} and without {missing[:3]}"
        raise DataChanged(type(loss).__name__, "the state of the same loss", got, "resume with the loss of the run")


def _digests(dataset: Any) -> list[dict[str, str]] | None:
    """Digest each non-binary column of each part of a data set; None unless all parts are tables."""
    parts = getattr(dataset, "datasets", [dataset])  # the parts of a ConcatDataset
    if not all(hasattr(part, "with_format") and hasattr(part, "__len__") for part in parts):
        return None
    return [_digests_of_columns(part.with_format("arrow")) for part in parts]  # without transforms


def _digests_of_columns(table: Any) -> dict[str, str]:
    """Digest the values of each column, block by block."""
    found = {name: hashlib.blake2b(digest_size=8) for name in table.column_names}
    for low in range(0, len(table), _block):
        rows = table[low : low + _block]
        for name, column in zip(rows.column_names, rows.columns, strict=True):
            if not any(
                kind in str(column.type) for kind in ("binary", "struct")
            ):  # skips images and sound, which may be huge
                found[name].update(repr(column.to_pylist()).encode())
    return {name: digest.hexdigest() for name, digest in found.items()}


def _difference(before: list[dict[str, str]] | None, now: list[dict[str, str]] | None) -> str:
    """Describe how the digests of two training sets differ."""
    if before is None or now is None or len(before) != len(now):
        counts = ["one that is not a table" if each is None else f"{len(each)} parts" for each in (before, now)]
        return f"{counts[1]} instead of {counts[0]}"
    pairs = zip(before, now, strict=True)
    names = {name for one, two in pairs for name in one | two if one.get(name) != two.get(name)}
    return f"other values in {', '.join(sorted(names)) or 'its columns'}"


def _sentence(error: Exception) -> str:
    """Return the message of torch on one line, without "Error(s) in loading state_dict for ...:"."""
    return " ".join(str(error).split()).partition(": ")[2] or str(error)


def _read_states(path: Path, who: str) -> dict[str, Any]:
    """Read the states of losses; raise Damaged if the seal or the contents are wrong."""
    check_seal(path, who, _fix)
    try:
        states = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds of exceptions for damaged files
        raise Damaged(who, "the state of a loss", path, got="torch cannot read it", fix=_fix) from error
    if not isinstance(states, dict):
        raise Damaged(who, "the state of a loss", path, got="it holds something else", fix=_fix)
    return states


def checkpoint_of(args: Any, state: Any) -> Path:
    """Return the ``hardneg`` folder of the checkpoint from which training resumes."""
    given = getattr(args, "resume_from_checkpoint", None)
    if isinstance(given, str) and (Path(given) / "hardneg").is_dir():
        return Path(given) / "hardneg"
    return _folder(Path(args.output_dir), state)


def _check_history(who: str, checkpoint: Path, state: Any) -> None:
    """Raise DataChanged if the logs differ: the trainer resumes from a checkpoint whose folder is unknown here."""
    path = checkpoint / "trainer_state.json"
    if not path.is_file():
        return
    saved = json.loads(path.read_text(encoding="utf-8"))
    kept, here = ([one["global_step"], one["log_history"]] for one in (saved, vars(state)))
    if json.dumps(kept) != json.dumps(here):  # as text, since NaN differs from NaN
        got = f"{checkpoint}, a checkpoint with other logs"
        raise DataChanged(who, "the checkpoint from which the trainer resumes", got, _named)


def _folder(output: Path, state: Any) -> Path:
    """Return the ``hardneg`` folder of the checkpoint of the current step."""
    return output / f"checkpoint-{state.global_step}" / "hardneg"


def _with(loss: nn.Module, name: str) -> Iterator[Any]:
    """Yield the outermost modules of a loss that have an attribute; models inside the loss are not searched."""
    if hasattr(loss, name):
        yield loss
        return
    for child_name, child in loss.named_children():
        if child_name not in _not_own:
            yield from _with(child, name)


def _is_own(name: str) -> bool:
    """Return True for an entry of the state that does not belong to a model inside the loss."""
    return not any(part in _not_own for part in name.split(".")[:-1])
