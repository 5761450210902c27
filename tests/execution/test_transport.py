"""Transfers between two real processes, apart from any schedule, and what needs no process."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

from lightning_zb.execution.channels import communicating_pairs, open_channels
from lightning_zb.execution.lowering import lower
from lightning_zb.execution.payload import pack, unflatten
from lightning_zb.execution.program import Message
from lightning_zb.execution.transport import DistributedTransport, LocalTransport, PeerRestarted
from lightning_zb.planning.placement import Placement, cyclic, wave
from lightning_zb.planning.schedule import PassKind, Schedule
from tests.execution.processes import run_processes

ALL_FORWARD = Schedule.parse(
    [
        ["F0.0", "F0.1", "F0.2", "BW0.0", "BW0.1", "BW0.2"],
        ["F1.0", "F1.1", "F1.2", "BW1.0", "BW1.1", "BW1.2"],
        ["F2.0", "F2.1", "F2.2", "BW2.0", "BW2.1", "BW2.2"],
    ]
)
PLACEMENT = cyclic(3)


def message(microbatch: int) -> Message:
    return Message(PassKind.FORWARD, 1, microbatch)


def on_all_devices(rank: int, end: Callable[[int, DistributedTransport], Any]) -> Any:
    transport = DistributedTransport(open_channels(PLACEMENT, [[0, 1, 2]], torch.device("cpu"), timedelta(seconds=10)))
    transport.begin(lower(ALL_FORWARD, PLACEMENT), ["short", "long", "short"])
    result = end(rank, transport)
    transport.close()
    return result


def out_of_order(rank: int, transport: DistributedTransport) -> Any:
    """Taken in another order than sent, in shapes that differ between signatures."""
    if rank == 2:
        return None
    if rank == 0:
        for j in range(3):
            transport.send(message(j), 1, pack({"x": torch.full((2 + j % 2, 3), float(j)), "n": j}))
        return transport.statistics.messages, transport.statistics.sent_bytes
    for j in range(3):
        transport.post(message(j), 0)
    packets = {j: transport.take(message(j), 0) for j in (1, 2, 0)}
    return {j: unflatten(p.layout, p.tensors) for j, p in packets.items()}


def restarted(rank: int, transport: DistributedTransport) -> Any:
    """One message is sent, then the step starts again: its second run finds nothing of the first."""
    if rank == 0:
        transport.send(message(0), 1, pack(torch.zeros(2, 3)))
        transport.restart()
        for j in range(3):
            transport.send(message(j), 1, pack(torch.full((2 + j % 2, 3), float(j))))
        return None
    if rank == 2:
        transport.restart()  # everybody does
        return None
    noticed = False
    for j in range(2):
        transport.post(message(j), 0)
    try:
        transport.take(message(1), 0)
    except PeerRestarted:
        noticed = True
    transport.restart()
    for j in range(3):
        transport.post(message(j), 0)
    return noticed, [transport.take(message(j), 0).tensors[0] for j in range(3)]


@pytest.mark.distributed
def test_messages_are_taken_by_name():
    (count, sent_bytes), received, _ = run_processes(on_all_devices, 3, out_of_order)
    assert (count, sent_bytes) == (3, 4 * 3 * (2 + 3 + 2) + 3 * 8)
    for j in range(3):
        assert received[j]["n"] == j
        assert torch.equal(received[j]["x"], torch.full((2 + j % 2, 3), float(j)))


@pytest.mark.distributed
def test_a_restart_leaves_nothing_under_way():
    """Message 1 has a layout nobody has seen, so an empty header stands for it; message 2 goes out as zeros."""
    assert lower(ALL_FORWARD, PLACEMENT).committed[0, 1] == 3
    _, (noticed, tensors), _ = run_processes(on_all_devices, 3, restarted)
    assert noticed
    for j, tensor in enumerate(tensors):
        assert torch.equal(tensor, torch.full((2 + j % 2, 3), float(j)))


def test_pairs_that_communicate():
    assert communicating_pairs(wave(3)) == [(0, 1), (1, 0), (1, 2), (2, 1)]
    assert communicating_pairs(cyclic(3, 2)) == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    assert communicating_pairs(Placement((0, 0), 1)) == []


def test_local_transport_counts_and_waits():
    mailbox: dict[Message, Any] = {}
    first, second = LocalTransport(mailbox), LocalTransport(mailbox)
    assert not second.ready(message(0))
    packet = pack(torch.ones(4))
    first.send(message(0), 1, packet)
    assert second.ready(message(0))
    assert second.take(message(0), 0) is packet
    assert (first.statistics.messages, first.statistics.sent_bytes) == (1, 16)
