"""Figures of the machine, on systems that have them and on those that do not."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from hardneg.io.processes import memory_bytes, peak_bytes


def test_the_peak_is_in_bytes():
    assert 2**24 < peak_bytes() < memory_bytes()


@pytest.mark.parametrize("peak", [None, 5])
def test_without_resource_psutil_is_used_if_it_is_there(monkeypatch, peak):
    used = SimpleNamespace(peak_wset=peak)
    psutil = None if peak is None else SimpleNamespace(Process=lambda: SimpleNamespace(memory_info=lambda: used))
    monkeypatch.setitem(sys.modules, "resource", None)
    monkeypatch.setitem(sys.modules, "psutil", psutil)
    assert peak_bytes() == peak


def test_memory_of_a_system_that_does_not_say(monkeypatch):
    assert 2**28 < memory_bytes() < 2**50
    monkeypatch.delattr(os, "sysconf")
    assert memory_bytes() == 2**40
