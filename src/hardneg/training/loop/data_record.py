"""The record of what was trained: encoder and initial weights, views, weight decay and data, with defaults resolved.

Data is recorded by content, so that a run never resumes with different images under the same name. The loop writes the
record when a run starts; resume, ``compare`` and the report read it back.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hardneg.core.errors import ArgumentError, DataChanged
from hardneg.io.sealed import digest_of
from hardneg.training.data.items import Items, Repeated, Splits
from hardneg.training.encoders import compares_projections

TrainedRecord = dict[str, Any]


def fingerprint(data: Items) -> str:
    """Return a digest of the items, labels and ids; names of files, classes and data sets do not count.

    >>> from hardneg.training.data.images import load
    >>> fingerprint(load("digits", "test")) == fingerprint(load("digits", "test"))
    True
    """
    found = hashlib.blake2b(digest_size=16)
    for name, part in data.content():
        shape = None if part is None else (len(part),) if isinstance(part, list) else tuple(part.shape)
        found.update(f"{name} {shape} ".encode())
        if isinstance(part, Tensor):
            found.update(content_of(part))
        elif isinstance(part, Repeated):
            for block in part.blocks():
                found.update(content_of(block))
        elif part is not None:
            found.update(json.dumps(part).encode())
    return found.hexdigest()


def content_of(part: Tensor) -> Any:
    """Return the bytes of a tensor in index order, as a buffer."""
    flat = part.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy()


def data_record(splits: Splits, benchmark: str | None = None) -> TrainedRecord:
    """Return the record of the data of a run: size and fingerprint of each split and of a benchmark's files.

    Args:
        splits: The splits of the run.
        benchmark: ``sts:PATH`` or ``beir:PATH``, if the run is evaluated with one.

    Returns:
        A dictionary by split name ("train", "test", "probe"), with "benchmark" if there is one.
    """
    there = {name: data for name, data in zip(Splits._fields, splits, strict=True) if data is not None}
    found: TrainedRecord = {name: {**data.record(), "fingerprint": fingerprint(data)} for name, data in there.items()}
    if benchmark is not None:
        path = Path(benchmark.partition(":")[2])
        files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        whole = hashlib.sha256("".join(digest_of(file) for file in files).encode())
        found["benchmark"] = {"items": len(files), "noun": "file", "fingerprint": whole.hexdigest()}
    return found


def count_in(record: TrainedRecord) -> int:
    """Return the number of items in the record of a split, stored as "images" for images and "items" otherwise."""
    return int(record["images"] if "images" in record else record.get("items", 0))


def noun_in(record: TrainedRecord) -> str:
    """Return the singular name of the items in the record of a split, such as "image"."""
    return str(record.get("noun", "image"))


def check_same_data(who: str, path: Path, before: TrainedRecord, now: TrainedRecord) -> None:
    """Raise unless two records describe the same data.

    Args:
        who: Caller, for the error.
        path: Run directory or job whose record is compared.
        before: The stored record.
        now: The record of the data given now.

    Raises:
        DataChanged: If a fingerprint differs; the message has both.
    """
    then, here = ({split: one.get("fingerprint") for split, one in record.items()} for record in (before, now))
    changed = [split for split in (*Splits._fields, "benchmark") if then.get(split) != here.get(split)]
    if not changed:
        return
    begun, got = (" and ".join(_shown(split, record.get(split)) for split in changed) for record in (before, now))
    raise DataChanged(
        who,
        f"the data that {path} was started with, {begun}",
        got,
        fix="restore the data, use another --out, or pass --allow-other-data if the change is intended",
    )


def is_data_record(record: Any) -> bool:
    """Return whether a value read from a file has the structure that ``data_record`` writes."""
    try:
        splits = [record[split] for split in ("train", "test")]
        counts = [one["images"] if "images" in one else one["items"] for one in splits]
        return all(isinstance(one["fingerprint"], str) for one in splits) and all(isinstance(n, int) for n in counts)
    except (TypeError, KeyError):
        return False


def _shown(split: str, record: TrainedRecord | None) -> str:
    if record is None:
        return f"no {split} split"
    return f"{count_in(record)} {split} {noun_in(record)}s with fingerprint {record['fingerprint']}"


def encoder_record(encoder: nn.Module) -> dict[str, Any]:
    """Return an encoder's name, class, size, digest of weights, and whether the loss compares its projections."""
    kind = type(encoder)
    return {
        "name": getattr(encoder, "name", None),
        "projects": compares_projections(encoder),
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "parameters": sum(weights.numel() for weights in encoder.parameters()),
        "initial_weights": digest_of_weights(encoder),
    }


def digest_of_weights(module: nn.Module) -> str:
    """Return a digest of the names, shapes, types and bytes of all parameters and buffers."""
    found = hashlib.blake2b(digest_size=16)
    for name, weights in (*module.named_parameters(), *module.named_buffers()):
        found.update(f"{name} {tuple(weights.shape)} {weights.dtype} ".encode())
        found.update(content_of(weights))
    return found.hexdigest()


def check_same_encoder(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise unless a run resumes with the encoder with which it was started.

    The initial weights may differ, as they do with another version of torch: the checkpoint replaces them.

    Args:
        before: Record of the encoder when the run was started.
        now: Record of the encoder given now.

    Raises:
        ArgumentError: If the class or the number of parameters differs.
    """
    if (before["class"], before["parameters"]) != (now["class"], now["parameters"]):
        begun, here = (f"{one['class']} with {one['parameters']} parameters" for one in (before, now))
        fix = "resume with the same encoder"
        raise ArgumentError("train", f"the encoder that the run was started with, {begun}", here, fix)


def is_record(trained: Any) -> bool:
    """Return whether a value is the record of a training, or None, as before training begins."""
    try:
        encoder, data = trained["encoder"], trained["data"]
        known = isinstance(encoder["class"], str) and isinstance(encoder["parameters"], int)
    except (TypeError, KeyError):
        return trained is None
    return known and is_data_record(data) and all(isinstance(one, dict) for one in data.values())
