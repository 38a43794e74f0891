"""What was really trained: the encoder and its first weights, the views, the weight decay and the data, whatever "auto"
or a default stood for.

Data is recorded by content, so that a run never resumes with other images under the same name.
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

TrainedRecord = dict[str, Any]


def fingerprint(data: Items) -> str:
    """The digest of the items, labels and ids with their numbers; names of files, classes and data sets do not count.

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
    """The bytes of a tensor in the order of its indices, as a buffer."""
    flat = part.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy()


def data_record(splits: Splits, benchmark: str | None = None) -> TrainedRecord:
    """What a run records of its data: of each split, and of a benchmark's files, the numbers and the fingerprint."""
    there = {name: data for name, data in zip(Splits._fields, splits, strict=True) if data is not None}
    found: TrainedRecord = {name: {**data.record(), "fingerprint": fingerprint(data)} for name, data in there.items()}
    if benchmark is not None:
        path = Path(benchmark.partition(":")[2])
        files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        whole = hashlib.sha256("".join(digest_of(file) for file in files).encode())
        found["benchmark"] = {"items": len(files), "noun": "file", "fingerprint": whole.hexdigest()}
    return found


def count_in(record: TrainedRecord) -> int:
    """The number of items in the record of a split; that of images calls them images."""
    return int(record["images"] if "images" in record else record.get("items", 0))


def noun_in(record: TrainedRecord) -> str:
    """What the items of the record of a split are called, one of them."""
    return str(record.get("noun", "image"))


def check_same_data(who: str, path: Path, before: TrainedRecord, now: TrainedRecord) -> None:
    """Raises ``DataChanged``, with both fingerprints, unless the records are of the same data."""
    then, here = ({split: one.get("fingerprint") for split, one in record.items()} for record in (before, now))
    changed = [split for split in (*Splits._fields, "benchmark") if then.get(split) != here.get(split)]
    if not changed:
        return
    begun, got = (" and ".join(_shown(split, record.get(split)) for split in changed) for record in (before, now))
    raise DataChanged(
        who,
        f"the data that {path} was begun with, {begun}",
        got,
        fix="put back the data, use another --out, or --allow-other-data if it is meant to change",
    )


def is_data_record(record: Any) -> bool:
    """Whether a record that was read has what ``data_record`` writes."""
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
    """The class, the number of parameters and the digest of the weights as they are now."""
    kind = type(encoder)
    return {
        "name": getattr(encoder, "name", None),
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "parameters": sum(weights.numel() for weights in encoder.parameters()),
        "initial_weights": digest_of_weights(encoder),
    }


def digest_of_weights(module: nn.Module) -> str:
    """Of the names, shapes and bytes of all parameters and buffers."""
    found = hashlib.blake2b(digest_size=16)
    for name, weights in (*module.named_parameters(), *module.named_buffers()):
        found.update(f"{name} {tuple(weights.shape)} {weights.dtype} ".encode())
        found.update(content_of(weights))
    return found.hexdigest()


def check_same_encoder(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises unless a run resumes with the encoder that it was started with.

    Its first weights may differ, as those of another version of torch do: a checkpoint replaces them.
    """
    if (before["class"], before["parameters"]) != (now["class"], now["parameters"]):
        begun, here = (f"{one['class']} of {one['parameters']} parameters" for one in (before, now))
        raise ArgumentError("train", f"the encoder that the run was begun with, {begun}", here, "resume with the same")


def is_record(trained: Any) -> bool:
    """Whether this is a record of what was trained, or None, as before training begins."""
    try:
        encoder, data = trained["encoder"], trained["data"]
        known = isinstance(encoder["class"], str) and isinstance(encoder["parameters"], int)
    except (TypeError, KeyError):
        return trained is None
    return known and is_data_record(data) and all(isinstance(one, dict) for one in data.values())
