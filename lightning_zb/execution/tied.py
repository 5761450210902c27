"""Parameters that chunks on different devices use (a tied embedding and head on a sequential placement).

Plain autograd adds both uses of a microbatch before it adds them to what earlier microbatches left. To the bit this
needs every microbatch's parts in one place, so they are kept to the end of the step and sent to the device of the
lowest chunk, which adds them in that order and sends the sum back: each holder has the same gradient. Memory: one
gradient a microbatch and use. On a V placement both uses are on one device and none of this is needed.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zb.execution.channels import Channels
from lightning_zb.execution.split_backward import accumulate

Parts = Mapping[tuple[int, int], Tensor]
"""Gradients of one parameter by (microbatch, chunk)."""


def accumulate_parts(parameter: nn.Parameter, parts: Parts) -> None:
    """Add all parts as plain autograd would: microbatches ascending, later chunks first within one."""
    for microbatch in sorted({j for j, _ in parts}):
        total: Tensor | None = None
        for chunk in sorted((c for j, c in parts if j == microbatch), reverse=True):
            part = parts[microbatch, chunk]
            total = part if total is None else total + part
        assert total is not None
        accumulate({parameter: total})


def exchange_parts(parameter: nn.Parameter, parts: Parts, devices: tuple[int, ...], channels: Channels) -> None:
    """Give the parameter's gradient of the whole step to every device that holds it.

    Args:
        parameter: this device's copy.
        parts: what this device's chunks contributed.
        devices: the devices that hold the parameter; the first one adds.
        channels: process groups; this travels in the control group, on the CPU.
    """
    owner, others = devices[0], devices[1:]
    group = channels.control
    if channels.device != owner:
        rank = channels.ranks[owner]
        keys = sorted(parts)
        dist.send_object_list([keys], dst=rank, group=group)
        for key in keys:
            dist.send(parts[key].detach().cpu().contiguous(), dst=rank, group=group)
        gradient = torch.empty(parameter.shape, dtype=parameter.dtype)
        dist.recv(gradient, src=rank, group=group)
        parameter.grad = gradient.to(parameter.device)
        return
    everything = dict(parts)
    for device in others:
        box: list[list[tuple[int, int]]] = [[]]
        dist.recv_object_list(box, src=channels.ranks[device], group=group)
        for key in box[0]:
            part = torch.empty(parameter.shape, dtype=parameter.dtype)
            dist.recv(part, src=channels.ranks[device], group=group)
            everything[key] = part.to(parameter.device)
    accumulate_parts(parameter, everything)
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    for device in others:
        dist.send(gradient.detach().cpu().contiguous(), dst=channels.ranks[device], group=group)
