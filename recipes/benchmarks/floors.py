"""Seconds below which no plan comes, whatever its partition, placement and order, on equal devices."""

from __future__ import annotations

from functools import cache
from itertools import accumulate, pairwise
from typing import Any

from lightning_zb.planning.costs import CostModel, LayerCost

_EFFORT = 10.0  # of CP-SAT in its own deterministic time, about a second each, so that a busy machine proves no less
_RESOLUTION = 1_000_000  # steps of the mean work of a device


def floor(costs: CostModel, num_devices: int, num_microbatches: int, capacity: float = float("inf")) -> float:
    """The larger of what the busiest device works at least, and of what the slowest item makes the first device wait.

    Args:
        costs: of equal devices, with one link for all pairs.
        num_devices: P.
        num_microbatches: m.
        capacity: bytes of a device, model states included.
    """
    work = tuple(
        layer.forward + min(layer.backward_input + layer.backward_weight, layer.whole_backward) for layer in costs.layers
    )
    way = way_and_back(costs, num_devices, num_microbatches, capacity)
    return max(num_microbatches * least_largest_share(work, num_devices), way)


def way_and_back(costs: CostModel, num_devices: int, num_microbatches: int, capacity: float = float("inf")) -> float:
    """What the device of the first item needs from its first F to its last W.

    The first microbatch goes on to some item, which runs F and B of all microbatches one after another, besides the W that
    its device cannot put off for want of memory, and the last gradient comes back. The way there leads over all devices that
    the items after it cannot fill.
    """
    layers = costs.layers
    hop = min((costs.transfer_seconds(0, 1, layer.output_bytes) for layer in layers[:-1]), default=0.0)
    backward = [min(layer.backward_input, layer.whole_backward) for layer in layers]
    busy = [
        num_microbatches * (layer.forward + back)
        + _weights_before(layer, num_microbatches, capacity) * min(layer.backward_weight, layer.whole_backward - back)
        for layer, back in zip(layers, backward, strict=True)
    ]
    way = accumulate((layer.forward + back for layer, back in zip(layers, backward, strict=True)), initial=0.0)
    return layers[0].backward_weight + max(
        before + seconds + 2 * hop * max(0, num_devices - 1 - (len(layers) - 1 - place))
        for place, (before, seconds) in enumerate(zip(way, busy, strict=False))
    )


def _weights_before(layer: LayerCost, num_microbatches: int, capacity: float) -> int:
    """How many W of an item at least run before the end of its last B: its device holds what they need, and its states."""
    states = layer.parameter_bytes if layer.state_bytes is None else layer.state_bytes
    if layer.weight_stash_bytes == 0.0 or capacity == float("inf"):
        return 0
    held = int((capacity - states) / layer.weight_stash_bytes * (1.0 + 1e-9))
    return max(0, num_microbatches - max(0, held))


@cache
def least_largest_share(work: tuple[float, ...], num_devices: int) -> float:
    """The least that the busiest device gets when whole items are given to devices, as far as CP-SAT proves it.

    Args:
        work: of each item.
        num_devices: P.
    """
    from ortools.sat.python import cp_model

    least = max(sum(work) / num_devices, *work)
    unit = sum(work) / num_devices / _RESOLUTION
    model = cp_model.CpModel()
    sizes = sorted((int(w / unit) for w in work), reverse=True)  # rounded down: a bound for these is one for the true ones
    largest = model.new_int_var(max(sizes), sum(sizes), "largest")
    where = [[model.new_bool_var(f"{i} on {d}") for d in range(num_devices)] for i in range(len(sizes))]
    for i, on in enumerate(where):
        model.add_exactly_one(on)
        for same in on[i + 1 :]:  # devices are alike: the first items go to the first ones
            model.add(same == 0)
    for i, (a, b) in enumerate(pairwise(sizes)):
        if a == b:
            model.add(_place(where[i]) <= _place(where[i + 1]))
    for d in range(num_devices):
        model.add(sum(size * on[d] for size, on in zip(sizes, where, strict=True)) <= largest)
    model.minimize(largest)
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time, solver.parameters.num_workers = _EFFORT, 1
    status = solver.solve(model)
    return max(least, solver.best_objective_bound * unit) if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else least


def _place(on: list[Any]) -> Any:
    return sum(d * chosen for d, chosen in enumerate(on))
