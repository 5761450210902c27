"""Process groups of a pipeline: every one is given up after the timeout that was asked for, on every backend."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_zb.execution import channels
from lightning_zb.planning.placement import Placement


@pytest.mark.parametrize(("device", "backends"), [("cpu", {"gloo"}), ("cuda", {"gloo", "nccl"})])
def test_every_group_has_the_timeout(device, backends, monkeypatch):
    opened = []
    monkeypatch.setattr(dist, "new_group", lambda ranks, **options: opened.append(options))
    monkeypatch.setattr(dist, "get_backend", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(channels, "_warm_up", lambda _: None)
    timeout = timedelta(seconds=7)
    channels.open_channels(Placement((0, 1, 2, 1), 3), [(0, 1, 2)], torch.device(device), timeout)
    assert {options["timeout"] for options in opened} == {timeout}
    assert {options["backend"] for options in opened} == backends
