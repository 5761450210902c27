"""Runs all chunks of a partition in one process, one copy of the module for each device, with plain autograd per chunk."""

from __future__ import annotations

import contextlib
import copy
import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_zb.model.interception import Interception
from lightning_zb.model.layers import LayerStack, find_layers
from lightning_zb.model.ownership import Ownership, take_ownership
from lightning_zb.model.randomness import RandomStreams
from lightning_zb.model.runner import StepRunner
from lightning_zb.model.stubs import PrologueStubs
from lightning_zb.model.windows import windows
from lightning_zb.planning.placement import Partition, Placement, wave


@dataclass
class Device:
    module: nn.Module
    stack: LayerStack
    ownership: Ownership
    runner: StepRunner
    stubs: PrologueStubs
    gradients: dict[str, Tensor] = field(default_factory=dict)


class Pipeline:
    """The devices of a pipeline; `train` runs one step, `evaluate` one forward pass of each microbatch."""

    def __init__(
        self,
        module: nn.Module,
        counts: list[int],
        placement: Placement | None = None,
        *,
        layers: str | None = None,
        seed: int | None = None,
        side_channels: Any = lambda module: (),
        prepare: Any = lambda module: None,
    ) -> None:
        partition = Partition.from_counts(counts)
        self.placement = placement or (wave(len(counts) // 2) if len(counts) % 2 == 0 else wave(len(counts), 1))
        self.devices = []
        for device in range(self.placement.num_devices):
            twin = copy.deepcopy(module)
            prepare(twin)
            stack = find_layers(twin, layers)
            all_windows = windows(partition, len(stack))
            own = self.placement.chunks_of(device)
            ownership = take_ownership(twin, stack, [all_windows[c] for c in own])
            streams = None if seed is None else RandomStreams(seed)
            interception = Interception(stack, streams, side_channels(twin))
            stubs = PrologueStubs(twin, interception, torch.device("cpu"))
            self.devices.append(Device(twin, stack, ownership, StepRunner(twin, interception, all_windows, own), stubs))

    def train(self, microbatches: list[tuple[Any, ...]], step: int = 0, divisor: int | None = None) -> list[Tensor]:
        """Losses of the microbatches; gradients are left in each device's `gradients`, by parameter name."""
        for device in self.devices:
            device.runner.begin(microbatches, step=step, divisor=divisor or len(microbatches))
            device.gradients.clear()
        for microbatch in range(len(microbatches)):
            self._forward_backward(microbatch)
            for device in self.devices:
                for name, p in device.module.named_parameters():
                    if p.grad is not None:
                        before = device.gradients.get(name)
                        device.gradients[name] = p.grad if before is None else before + p.grad
                        p.grad = None
        last = self.devices[self.placement.devices[-1]].runner
        return [last.losses[j] for j in range(len(microbatches))]

    def evaluate(self, microbatches: list[tuple[Any, ...]], method: str, step: int = 0) -> list[Any]:
        outputs = []
        with torch.inference_mode():
            for device in self.devices:
                device.runner.begin(microbatches, step=step, method=method, divisor=None)
            for microbatch in range(len(microbatches)):
                payload = None
                for chunk, device in enumerate(self.placement.devices):
                    payload = self.devices[device].runner.forward(chunk, microbatch, payload)
                outputs.append(payload)
        return outputs

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of all devices; each parameter has one on one device only."""
        found: dict[str, Tensor] = {}
        for device in self.devices:
            assert not found.keys() & device.gradients.keys(), "a gradient on two devices"
            found.update(device.gradients)
        return found

    def _forward_backward(self, microbatch: int) -> None:
        received: list[_Gradients] = []
        sent: list[list[Tensor]] = []
        payload = None
        for chunk, device in enumerate(self.placement.devices):
            leaves, spec = tree_flatten(payload)
            fresh = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in leaves]
            received.append(_Gradients([x for x in fresh if isinstance(x, Tensor)]))
            payload = self.devices[device].runner.forward(chunk, microbatch, tree_unflatten(fresh, spec))
            sent.append([x for x in tree_flatten(payload)[0] if isinstance(x, Tensor)])
        gradients: list[Tensor | None] = [None]
        for chunk in reversed(range(len(sent))):
            if chunk == len(sent) - 1:
                sent[chunk][0].backward()
            else:
                pairs = [(x, g) for x, g in zip(sent[chunk], gradients, strict=True) if x.requires_grad and g is not None]
                if pairs:
                    torch.autograd.backward([x for x, _ in pairs], [g for _, g in pairs])
            gradients = received[chunk].values


class _Gradients:
    """Gradients of received leaves as autograd hands them over; `.grad` would copy them to the leaf's strides."""

    def __init__(self, leaves: list[Tensor]) -> None:
        self.values: list[Tensor | None] = [None] * len(leaves)
        for i, leaf in enumerate(leaves):
            if leaf.requires_grad:
                leaf.register_hook(functools.partial(self.values.__setitem__, i))


def plain_losses(
    module: nn.Module, microbatches: list[tuple[Any, ...]], context: Any = contextlib.nullcontext
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses and accumulated gradients of the unsplit module."""
    twin = copy.deepcopy(module)
    losses = []
    for args in microbatches:
        with context():
            loss = twin.training_step(*args)
        loss = loss["loss"] if isinstance(loss, dict) else loss
        losses.append(loss.detach())
        (loss / len(microbatches)).backward()
    return losses, {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}


def assert_bitwise(
    module: nn.Module,
    microbatches: list[tuple[Any, ...]],
    counts: list[int],
    placement: Placement | None = None,
    **options: Any,
) -> Pipeline:
    """Losses and gradients of the pipeline equal those of the unsplit module to the last bit."""
    losses, gradients = plain_losses(module, microbatches)
    pipeline = Pipeline(module, counts, placement, **options)
    split = pipeline.train(microbatches)
    assert all(torch.equal(a, b) for a, b in zip(losses, split, strict=True)), f"losses {losses} became {split}"
    found = pipeline.gradients()
    assert found.keys() == gradients.keys()
    different = [name for name in gradients if not torch.equal(gradients[name], found[name])]
    assert not different, f"gradients differ: {different}"
    return pipeline
