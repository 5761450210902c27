"""How many pipelines of how many devices: data-parallel and pipeline sizes at an equal global batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from lightning_zb.planning.costs import CostModel, Link, Reduction
from lightning_zb.planning.plan import Plan
from lightning_zb.planning.timeline import simulate


@dataclass(frozen=True, slots=True)
class World:
    """One way to use all devices.

    Args:
        num_replicas: D, pipelines that train side by side.
        num_devices: P, devices of each.
        plan: of one pipeline; it runs 1/D of the microbatches, and its costs charge the reduction of gradients over replicas.
        reduction: seconds that the reduction adds to the step, where no pass of another chunk hides it.
        refusal: why there is no plan; empty where there is one.
    """

    num_replicas: int
    num_devices: int
    plan: Plan | None
    reduction: float = 0.0
    refusal: str = ""

    @property
    def seconds(self) -> float:
        """A step with its reduction; infinite without a plan."""
        return float("inf") if self.plan is None else self.plan.predicted.step_time


def worlds(
    costs: CostModel,
    world_size: int,
    num_microbatches: int,
    make: Callable[[CostModel, int, int], Plan],
    reduction_link: Link | None = None,
) -> tuple[World, ...]:
    """Every split of the devices into equal pipelines, the fastest first.

    The global batch is the same for all: D pipelines run num_microbatches / D microbatches each.

    Args:
        costs: of the model; one link for all pairs and devices of one speed, since each split uses its own pairs. The replicas
            of their reduction do not count, its link does.
        world_size: all devices.
        num_microbatches: of the global batch.
        make: plans one pipeline, given costs, devices and microbatches; a ValueError refuses.
        reduction_link: between replicas; None: that of the costs' reduction, or as between the devices of a pipeline.

    Raises:
        ValueError: the costs have links or speeds by device, or no split has a plan; says why for each.
    """
    if world_size < 1:
        raise ValueError(f"world size {world_size} has no devices; write 1 or more")
    if not isinstance(costs.link, Link) or costs.device_speed is not None:
        raise ValueError("a choice of pipeline sizes needs one link for all pairs and devices of one speed")
    link = reduction_link or (costs.link if costs.reduction is None else costs.reduction.link)
    found = []
    for num_devices in (p for p in range(1, world_size + 1) if world_size % p == 0):
        num_replicas = world_size // num_devices
        if num_microbatches % num_replicas:
            refusal = f"{num_microbatches} microbatches cannot be shared by {num_replicas} pipelines"
            found.append(World(num_replicas, num_devices, None, refusal=refusal))
            continue
        try:
            reduction = Reduction(num_replicas, link) if num_replicas > 1 else None
            plan = make(replace(costs, reduction=reduction), num_devices, num_microbatches // num_replicas)
        except ValueError as error:
            found.append(World(num_replicas, num_devices, None, refusal=str(error)))
            continue
        alone = simulate(plan.schedule, plan.placement, costs.chunks(plan.partition), replace(costs, reduction=None))
        found.append(World(num_replicas, num_devices, plan, plan.predicted.step_time - alone.step_time))
    if all(world.plan is None for world in found):
        reasons = "; ".join(f"{w.num_replicas} x {w.num_devices}: {w.refusal}" for w in found)
        raise ValueError(f"no split of {world_size} devices into pipelines has a plan ({reasons})")
    return tuple(sorted(found, key=lambda world: (world.seconds, world.num_devices)))
