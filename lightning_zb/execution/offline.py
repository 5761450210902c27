"""All devices of a pipeline in one process, without a process group: for tests, and for one device with several chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_zb.execution.executor import Executor
from lightning_zb.execution.payload import Packet
from lightning_zb.execution.program import Message, Program
from lightning_zb.execution.protocols import ChunkRunner
from lightning_zb.execution.transport import LocalTransport


def offline_executors(runners: Sequence[ChunkRunner]) -> list[Executor]:
    """One executor for each device, joined by a mailbox.

    Args:
        runners: the chunk runner of each device; one runner may serve several devices.
    """
    mailbox: dict[Message, Packet] = {}
    return [Executor(device, runner, LocalTransport(mailbox)) for device, runner in enumerate(runners)]


def run_offline(program: Program, executors: Sequence[Executor]) -> list[Any]:
    """Execute one step of all devices, each going on as long as what it needs is there.

    Args:
        program: the instructions of all devices.
        executors: from `offline_executors`.

    Returns:
        The results of the last chunk: losses, or outputs of a forward-only program.
    """
    for executor in executors:
        executor.begin(program)
    position = [0] * len(executors)
    while any(at < len(program.instructions[d]) for d, at in enumerate(position)):
        for device, executor in enumerate(executors):
            instructions = program.instructions[device]
            while position[device] < len(instructions) and executor.ready(instructions[position[device]]):
                executor.execute(instructions[position[device]])
                position[device] += 1
    return [result for executor in executors for result in executor.finish()]
