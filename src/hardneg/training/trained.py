"""What was really trained: the encoder and its first weights, the views, and the data, whatever "auto" stood for."""

from __future__ import annotations

import hashlib
from typing import Any

from torch import nn

from hardneg.core.errors import ArgumentError
from hardneg.training.data.fingerprint import content_of, is_data_record


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
    """Whether this is a record of what was trained, or None, as in a run of an older version."""
    try:
        encoder, data = trained["encoder"], trained["data"]
        known = isinstance(encoder["class"], str) and isinstance(encoder["parameters"], int)
    except (TypeError, KeyError):
        return trained is None
    return known and is_data_record(data) and all(isinstance(one, dict) for one in data.values())
