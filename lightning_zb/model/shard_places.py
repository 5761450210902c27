"""Which replica keeps the optimizer state of which parameter, the same for every plan and number of devices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from lightning_zb.model.layers import LayerStack
from lightning_zb.model.ownership import outside_parameters


def shard_places(module: nn.Module, stack: LayerStack, num_replicas: int) -> dict[str, int]:
    """Divide parameters among replicas, each layer as evenly as whole parameters can be.

    Layers are divided one by one, the lighter replica first, so that any chunk of them is about even; what lies outside
    the layers is divided by itself. Only shapes count, so all processes find the same, whatever they hold.

    Args:
        module: the LightningModule.
        stack: its layers.
        num_replicas: replicas of the pipeline.

    Returns:
        For each parameter, by its first name, a replica.
    """
    layers = [list(layer.parameters()) for layer in stack.modules]
    outside = [[p for _, p in outside_parameters(module, stack)]]
    found: dict[int, int] = {}
    for trains in (True, False):  # those that do not train have no state now, and may be unfrozen
        for groups in (layers, outside):
            _divide([[p for p in group if p.requires_grad is trains] for group in groups], num_replicas, found)
    return {name: found[id(p)] for name, p in module.named_parameters()}


def _divide(groups: Iterable[Sequence[nn.Parameter]], num_replicas: int, found: dict[int, int]) -> None:
    """Largest first within a group, to the replica with the least so far."""
    loads = [0] * num_replicas
    for group in groups:
        for p in sorted(group, key=lambda p: -p.numel() * p.element_size()):
            if id(p) not in found:
                found[id(p)] = min(range(num_replicas), key=loads.__getitem__)
                loads[found[id(p)]] += p.numel() * p.element_size()
