"""Moves parameters, optimizer state and buffers to where another partition or placement needs them, between two steps.

A parameter keeps its name, its place in the optimizer's groups and its values; only the device that holds it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zb.execution.channels import Channels
from lightning_zb.model.layers import LayerStack
from lightning_zb.model.ownership import Ownership, needed_parameters, release, replace_parameters, updated_buffers
from lightning_zb.model.windows import Window


@dataclass(frozen=True, slots=True)
class Holding:
    """What one process holds, by name.

    Args:
        parameters: parameters with values here.
        answers: those of them that no other process answers for.
        buffers: buffers that are updated here.
    """

    parameters: frozenset[str]
    answers: frozenset[str]
    buffers: frozenset[str]


@dataclass(frozen=True, slots=True)
class Move:
    """Send a parameter (or buffer) from one rank to another."""

    name: str
    source: int
    destination: int


def needed_holding(module: nn.Module, stack: LayerStack, windows: Iterable[Window]) -> Holding:
    """What a process needs for its chunks.

    Args:
        module: the LightningModule, its foreign parameters without memory.
        stack: its layers.
        windows: of the process's chunks.
    """
    windows = tuple(windows)
    needed = needed_parameters(module, stack, windows)
    names = frozenset(name for name, p in module.named_parameters() if id(p) in needed)
    return Holding(names, frozenset(), updated_buffers(module, stack, windows))


def plan_moves(
    names: Iterable[str], answers: Sequence[frozenset[str]], held: Sequence[frozenset[str]], needed: Sequence[frozenset[str]]
) -> list[Move]:
    """The transfers that give every rank what it needs, in one order for all.

    Args:
        names: all names, in the unsplit model's order.
        answers: for each rank the names whose values it has to give.
        held: for each rank what it holds.
        needed: for each rank what it will hold.
    """
    moves = []
    for name in names:
        source = next((rank for rank, own in enumerate(answers) if name in own), None)
        if source is not None:
            moves += [Move(name, source, rank) for rank in range(len(held)) if name in needed[rank] - held[rank]]
    return moves


def move_state(
    module: nn.Module,
    stack: LayerStack,
    ownership: Ownership,
    is_copy: Callable[[nn.Parameter], bool],
    optimizers: Sequence[Optimizer],
    windows: Sequence[Sequence[Window]],
    channels: Channels,
) -> Ownership:
    """Give every process what its new chunks need and free what they do not; called on all, between steps.

    Args:
        module: the LightningModule.
        stack: its layers.
        ownership: what this process holds.
        is_copy: whether another process answers for a parameter.
        optimizers: over all parameters.
        windows: for each rank the windows of its new chunks.
        channels: of the running pipeline.

    Returns:
        What this process holds now.
    """
    own = Holding(
        frozenset(ownership.own_names()),
        frozenset(
            name for (name, p), held in zip(ownership.parameters, ownership.held, strict=True) if held and not is_copy(p)
        ),
        ownership.buffers,
    )
    before: list[Any] = [None] * len(windows)
    dist.all_gather_object(before, own, group=channels.control)
    after = [needed_holding(module, stack, w) for w in windows]
    rank = channels.position
    parameters = dict(module.named_parameters())
    held = [h.parameters for h in before]
    moves = plan_moves(parameters, [h.answers for h in before], held, [h.parameters for h in after])
    values = _exchange(moves, lambda name: _with_state(parameters[name], optimizers), channels)
    buffers = dict(module.named_buffers())
    updated = [h.buffers for h in before]
    moved_buffers = _exchange(
        plan_moves(buffers, updated, updated, [h.buffers for h in after]), lambda name: buffers[name].cpu(), channels
    )
    _adopt(module, values, optimizers, channels.compute_device)
    _put_buffers(module, moved_buffers, channels.compute_device)
    held_now = tuple(name in held[rank] or name in values for name in parameters)
    grown = Ownership(tuple(module.named_parameters()), held_now, after[rank].buffers)
    gone = [name for name in grown.own_names() if name not in after[rank].parameters]
    _free_buffers(module, stack, after[rank].buffers)
    return release(module, stack, grown, gone, optimizers=optimizers)


def _exchange(moves: Iterable[Move], read: Callable[[str], Any], channels: Channels) -> dict[str, Any]:
    """Carry out the moves, one after another; what came here by name."""
    rank, members = channels.position, channels.members
    received = {}
    for move in moves:
        box = [read(move.name) if move.source == rank else None]
        if move.source == rank:
            dist.send_object_list(box, dst=members[move.destination], group=channels.control)
        elif move.destination == rank:
            dist.recv_object_list(box, src=members[move.source], group=channels.control)
            received[move.name] = box[0]
    return received


def _with_state(parameter: nn.Parameter, optimizers: Sequence[Optimizer]) -> tuple[Tensor, list[dict[str, Any]], set[str]]:
    """A parameter's values and its state in each optimizer, on the CPU, with the names of what is not kept there."""
    states, on_device = [], set()
    for state in (o.state.get(parameter, {}) for o in optimizers):
        on_device |= {key for key, value in state.items() if isinstance(value, Tensor) and not value.is_cpu}
        states.append({key: value.cpu() if isinstance(value, Tensor) else value for key, value in state.items()})
    return parameter.detach().cpu(), states, on_device


def _adopt(module: nn.Module, values: Mapping[str, Any], optimizers: Sequence[Optimizer], device: torch.device) -> None:
    """Put values in place of parameters without memory, wherever these stand."""
    parameters = dict(module.named_parameters())
    memo: dict[int, nn.Parameter] = {}
    for name, (value, states, on_device) in values.items():
        old = parameters[name]
        new = nn.Parameter(value.to(device), requires_grad=old.requires_grad)
        new.__dict__.update(old.__dict__)
        memo[id(old)] = new
        for optimizer, state in zip(optimizers, states, strict=True):
            if state:
                optimizer.state[new] = {k: v.to(device) if k in on_device else v for k, v in state.items()}
    replace_parameters(module, memo, optimizers)


def _put_buffers(module: nn.Module, values: Mapping[str, Tensor], device: torch.device) -> None:
    for name, value in values.items():
        path, _, leaf = name.rpartition(".")
        module.get_submodule(path)._buffers[leaf] = value.to(device)


def _free_buffers(module: nn.Module, stack: LayerStack, kept: frozenset[str]) -> None:
    """Free the buffers of layers that are not here; those outside the layers keep their values."""
    inside = {id(m) for layer in stack.modules for m in layer.modules()}
    for prefix, m in module.named_modules():
        if id(m) in inside:
            for name, b in m._buffers.items():
                if b is not None and f"{prefix}.{name}" not in kept:
                    m._buffers[name] = b.to("meta")
