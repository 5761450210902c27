"""Memory budgets: from what users write to the activation bytes of each device, and back for the error message.

A number counts activations only: 1.0 is M_B of all layers for one microbatch on every device, whatever the partition. A
string such as `"40GiB"` is the whole device: model states and workspace go off first. A list holds one of these for
each device. None sets no limit here; what a device has free is known to whoever runs on it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from lightning_zb.planning.costs import CostModel
from lightning_zb.planning.placement import Partition, Placement

DeviceBudget = float | str
MemoryBudget = DeviceBudget | Sequence[DeviceBudget] | None

_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?)\s*(" + "|".join(_UNITS) + r")\s*")


class InfeasibleBudget(ValueError):
    """No order fits the budget.

    Args:
        message: one sentence that names the smallest budget.
        smallest: the smallest budget that would do, in the form in which the budget was given.
        smallest_bytes: the activation bytes that each device needs at least.
    """

    def __init__(self, message: str, smallest: MemoryBudget, smallest_bytes: tuple[float, ...]) -> None:
        super().__init__(message)
        self.smallest = smallest
        self.smallest_bytes = smallest_bytes


def check_budget(budget: MemoryBudget, num_devices: int | None = None) -> None:
    """Refuse what is no budget, before anything is planned with it.

    Args:
        budget: as users write it.
        num_devices: devices of the pipeline; None where they are not known yet.

    Raises:
        ValueError: it cannot be read, is not positive, or a list has not one entry for each device.
    """
    if num_devices is None:
        num_devices = len(budget) if isinstance(budget, Sequence) and not isinstance(budget, str) else 1
    for entry in per_device(budget, num_devices):
        if isinstance(entry, str):
            parse_bytes(entry)
        elif entry is not None:
            _check_multiple(entry)


def per_device(budget: MemoryBudget, num_devices: int) -> list[DeviceBudget | None]:
    """The budget of each device.

    Raises:
        ValueError: a list has not one entry for each device.
    """
    if budget is None or isinstance(budget, (int, float, str)):
        return [budget] * num_devices
    if len(budget) != num_devices:
        raise ValueError(f"memory_budget {list(budget)} has {len(budget)} entries for {num_devices} devices")
    return list(budget)


def activation_limits(budget: MemoryBudget, costs: CostModel, partition: Partition, placement: Placement) -> tuple[float, ...]:
    """The activation bytes that each device may hold; infinite where there is no limit, negative where its states do not fit.

    Raises:
        ValueError: the budget cannot be read, or a list has not one entry for each device.
    """
    beside = constant_bytes(costs, partition, placement), transient_bytes(costs, partition, placement)
    return limits_beside(budget, costs, *beside)


def limits_beside(
    budget: MemoryBudget, costs: CostModel, constant: Sequence[float], transient: Sequence[float]
) -> tuple[float, ...]:
    """As `activation_limits`, given what each device holds besides, all the time and for a moment."""
    entries = per_device(budget, len(constant))
    return tuple(_limit(entry, costs, constant[d]) - transient[d] for d, entry in enumerate(entries))


def constant_bytes(costs: CostModel, partition: Partition, placement: Placement) -> tuple[float, ...]:
    """For each device what it holds besides activations: model states, and the largest workspace of one pass."""
    states = [0.0] * placement.num_devices
    for chunk, device in zip(costs.chunks(partition), placement.devices, strict=True):
        states[device] += chunk.state_bytes
    return tuple(s + w for s, w in zip(states, workspace_bytes(costs, partition, placement), strict=True))


def workspace_bytes(costs: CostModel, partition: Partition, placement: Placement) -> tuple[float, ...]:
    """For each device the largest workspace of one pass."""
    return most_by_device([costs.workspace_bytes(layers) for layers in partition.chunks], placement)


def transient_bytes(costs: CostModel, partition: Partition, placement: Placement) -> tuple[float, ...]:
    """For each device the most that one B holds for a moment beyond what counts between passes."""
    return most_by_device([chunk.transient_bytes for chunk in costs.chunks(partition)], placement)


def most_by_device(sizes: Sequence[float], placement: Placement) -> tuple[float, ...]:
    """The largest of each device's chunks, given a size of each chunk."""
    return tuple(max(sizes[c] for c in chunks) for chunks in placement.chunks_by_device())


def infeasible(
    budget: MemoryBudget, needed: tuple[float, ...], what: str, costs: CostModel, partition: Partition, placement: Placement
) -> InfeasibleBudget:
    """The error for a budget that is too small.

    Args:
        budget: what was asked for.
        needed: the activation bytes that each device needs at least.
        what: subject of the message: what does not fit.
        costs: as for `activation_limits`; so are the next two.
        partition: layers to chunks.
        placement: chunks to devices.
    """
    constant = constant_bytes(costs, partition, placement)
    transient = transient_bytes(costs, partition, placement)
    needed = tuple(need + moment for need, moment in zip(needed, transient, strict=True))
    entries = per_device(budget, placement.num_devices)
    smallest = [_smallest(entry, need, costs, constant[d]) for d, (entry, need) in enumerate(zip(entries, needed, strict=True))]
    single = isinstance(budget, (int, float, str))
    worst = max(range(len(needed)), key=lambda d: needed[d] + (constant[d] if isinstance(entries[d], str) else 0.0))
    form: MemoryBudget = smallest[worst] if single else smallest
    return InfeasibleBudget(f"{what} does not fit memory_budget={budget!r}; the smallest that fits is {form!r}", form, needed)


def least_bytes(chunks: Iterable[tuple[float, float]]) -> float:
    """The least activation bytes with which a device can run its chunks in any order.

    All F of a microbatch on a device come before its first B there, so their M_B add up; a B then turns M_B into M_W,
    which is freed at once. Running microbatches one after the other needs no more.

    Args:
        chunks: M_B and M_W of each of its chunks, in model order.
    """
    held = peak = 0.0
    for activation, stash in chunks:
        peak = max(peak, held + stash)
        held += activation
    return max(peak, held)


def fits(needed: Sequence[float], limits: Sequence[float]) -> bool:
    """Whether every device stays within its limit, up to rounding of sums of bytes."""
    return all(need <= limit + 1e-9 * abs(limit) for need, limit in zip(needed, limits, strict=True))


def parse_bytes(text: str) -> float:
    """Bytes of a size such as `40GiB`, `512MiB` or `1.5GB`.

    Raises:
        ValueError: it is not a size.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(
            f"memory budget {text!r} is not a size; write for example '40GiB' or '512MiB' for the whole device "
            f"(units: {', '.join(_UNITS)}), or a number: 1.0 is the activations of the whole model for one microbatch"
        )
    return float(match[1]) * _UNITS[match[2]]


def byte_unit(num_bytes: float) -> tuple[float, str]:
    """The largest unit of which a size has one or more: its bytes and its name."""
    return next(((float(_UNITS[name]), name) for name in ("TiB", "GiB", "MiB", "KiB") if num_bytes >= _UNITS[name]), (1.0, "B"))


def format_bytes(num_bytes: float) -> str:
    """A size for people, as `parse_bytes` reads it, up to a blank."""
    size, name = byte_unit(num_bytes)
    return f"{num_bytes / size:.{2 if name in ('GiB', 'TiB') else 1}f} {name}"


def _limit(entry: DeviceBudget | None, costs: CostModel, constant: float) -> float:
    if entry is None:
        return math.inf
    if isinstance(entry, str):
        return parse_bytes(entry) - constant
    _check_multiple(entry)
    return entry * costs.activation_bytes


def _check_multiple(entry: float) -> None:
    if not entry > 0:
        raise ValueError(
            f"memory_budget {entry!r} must be positive; 1.0 is the activations of the whole model for one microbatch"
        )


def _smallest(entry: DeviceBudget | None, needed: float, costs: CostModel, constant: float) -> DeviceBudget:
    if not isinstance(entry, str):
        if costs.activation_bytes == 0 < needed:
            raise ValueError(
                f"memory_budget={entry!r} counts in activation_bytes, which are 0 for every layer while weight_stash_bytes "
                "are not; give the layers activation_bytes"
            )
        if needed == 0:
            return 0.0
        return math.ceil(needed / costs.activation_bytes * 1e4 - 1e-6) / 1e4
    mebibytes = math.ceil((needed + constant) / 2**20)
    return f"{mebibytes}MiB"
