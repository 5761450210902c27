"""Random heterogeneous pipelines, from a seed: what a co-optimizer has to cope with beyond well-behaved models."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from enum import Enum, unique

from lightning_zb.planning.budget import MemoryBudget
from lightning_zb.planning.costs import CostModel, LayerCost, LayerRole, Link

MIB = 2.0**20


@unique
class Trait(Enum):
    """What makes a case hard."""

    SPREAD = "spread"  # layers within 30 % of each other
    KINDS = "kinds"  # two or three kinds of layers, up to 8x apart
    HEAD = "head"  # a head worth 10 to 80 layers
    SLOW_DEVICE = "slow-device"  # one device at 0.4 to 0.8 of the speed of the others
    TIGHT_DEVICE = "tight-device"  # one device with 0.6 to 0.9 of the memory of the others
    SLOW_LINKS = "slow-links"  # a transfer takes 0.3 to 2 forwards of an average device


@dataclass(frozen=True, slots=True)
class RandomCase:
    """A problem for the planner.

    Args:
        name: its traits and seed.
        costs: layers, links and device speeds.
        num_devices: P.
        num_microbatches: m.
        memory: the budget, as `make_plan` takes it.
    """

    name: str
    costs: CostModel
    num_devices: int
    num_microbatches: int
    memory: MemoryBudget


def random_case(
    seed: int, *traits: Trait, num_devices: int = 4, num_layers: int = 24, num_microbatches: int = 16, memory: float = 1.0
) -> RandomCase:
    """Draw a case.

    Args:
        seed: the same one gives the same case.
        traits: what makes it hard; none: one to four of them, drawn too.
        num_devices: P.
        num_layers: stacked layers; an embedding and a head come on top.
        num_microbatches: m.
        memory: budget of each device (1.0: the activations of the whole model for one microbatch).
    """
    draw = random.Random(seed)
    if not traits:
        traits = tuple(sorted(draw.sample(list(Trait), draw.randint(1, 4)), key=list(Trait).index))
    factors = _layer_factors(draw, num_layers, traits)
    layers = tuple(_layer(draw, f"layers.{i}", factor) for i, factor in enumerate(factors))
    mean = sum(layer.work for layer in layers) / num_layers
    embedding = _layer(draw, "embedding", 0.1)
    embedding = replace(embedding, forward=0.02 * mean, backward_input=0.0, backward_weight=0.1 * mean, role=LayerRole.PROLOGUE)
    head_work = (draw.uniform(10, 80) if Trait.HEAD in traits else draw.uniform(0.5, 2)) * mean
    head = _layer(draw, "head", 2.0)
    head = replace(
        head,
        forward=0.34 * head_work,
        backward_input=0.36 * head_work,
        backward_weight=0.3 * head_work,
        role=LayerRole.EPILOGUE,
    )
    stage_forward = (sum(layer.forward for layer in layers) + head.forward) / num_devices
    delay = draw.uniform(0.3, 2) if Trait.SLOW_LINKS in traits else draw.uniform(0, 0.05)
    output = max(layer.output_bytes for layer in layers)
    latency = 0.5 * delay * stage_forward
    link = Link(latency, output / latency if latency else float("inf"))
    speeds = [1.0] * num_devices
    if Trait.SLOW_DEVICE in traits:
        speeds[draw.randrange(num_devices)] = draw.uniform(0.4, 0.8)
    budgets = [memory] * num_devices
    if Trait.TIGHT_DEVICE in traits:
        budgets[draw.randrange(num_devices)] *= draw.uniform(0.6, 0.9)
    name = "+".join(trait.value for trait in traits) + f"/{seed}"
    costs = CostModel((embedding, *layers, head), link, tuple(speeds) if Trait.SLOW_DEVICE in traits else None)
    return RandomCase(name, costs, num_devices, num_microbatches, budgets)


def _layer_factors(draw: random.Random, num_layers: int, traits: tuple[Trait, ...]) -> list[float]:
    """How much each layer costs beside an average one."""
    factors = [1.0] * num_layers
    if Trait.KINDS in traits:
        kinds = [1.0, draw.uniform(2, 8)] + ([draw.uniform(1, 4)] if draw.random() < 0.5 else [])
        cycle = [draw.choice(kinds) for _ in range(draw.randint(2, 6))]
        factors = [cycle[i % len(cycle)] for i in range(num_layers)]
    if Trait.SPREAD in traits:
        factors = [factor * draw.uniform(0.7, 1.3) for factor in factors]
    return factors


def _layer(draw: random.Random, name: str, factor: float) -> LayerCost:
    """A layer with B at 1 to 2 F and W at 0.3 to 1 F, as mixers, feed-forward blocks and experts have."""
    forward = 1e-3 * factor
    activation = draw.uniform(0.5, 1.5) * 32 * MIB
    return LayerCost(
        name=name,
        forward=forward,
        backward_input=draw.uniform(1, 2) * forward,
        backward_weight=draw.uniform(0.3, 1) * forward,
        activation_bytes=activation,
        weight_stash_bytes=draw.uniform(0.4, 1) * activation,
        parameter_bytes=64 * MIB,
        output_bytes=8 * MIB,
    )
