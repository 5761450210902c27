"""From recorded steps to the costs of layers, as planning reads them."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zb.execution.live_bytes import storage_key
from lightning_zb.execution.pass_samples import Samples, usual
from lightning_zb.execution.profiler import PassTimes
from lightning_zb.model.layer_recorder import LayerRecorder
from lightning_zb.model.layers import LayerStack
from lightning_zb.planning.costs import CostModel, LayerCost, LayerRole, Link, PassOverhead
from lightning_zb.planning.placement import Partition

PARTS = ("F", "B", "W")


@dataclass(frozen=True, slots=True)
class ItemProfile:
    """What one item (prologue, layer, epilogue) was measured to cost.

    Args:
        index: its place in the partition.
        cost: usual seconds of microbatches and steps, medians of bytes.
        high: the 90th percentile of the seconds of F, B and W.
        num_samples: microbatches behind them.
        movable: share of the trained parameters, by elements, whose gradients are W's and not B's; None where nothing
            trains. Norms, biases and whole kernels (custom autograd Functions) stay in B.
        whole: operators with a parameter that stay whole in B, by name.
    """

    index: int
    cost: LayerCost
    high: tuple[float, float, float]
    num_samples: int
    movable: float | None = None
    whole: tuple[str, ...] = ()


def item_roles(stack: LayerStack) -> list[tuple[str, LayerRole]]:
    """Name and role of every item of a partition."""
    layers = [(name, LayerRole.LAYER) for name in stack.names]
    return [("prologue", LayerRole.PROLOGUE), *layers, ("epilogue", LayerRole.EPILOGUE)]


def pass_overhead(steps: Iterable[Sequence[PassTimes]]) -> dict[str, list[float]]:
    """Seconds by which F and B of one device's chunks were longer than their items together, handing over included.

    The first chunk tells nothing of F: there, the code before the layers is an item. W is left out, since what it does besides
    its products, adding gradients up, grows with the parameters.

    Args:
        steps: the passes of the steps that timed layers.
    """
    found: dict[str, list[float]] = {"F": [], "B": []}
    for run in chain.from_iterable(steps):
        for part, seconds in run.parts.items():
            if part in found and run.run.chunk > 0:
                own = sum(spent for (kind, _), spent in run.items.items() if kind == part)
                found[part].append(max(0.0, seconds - own))
    return found


def usual_overhead(devices: Iterable[Mapping[str, Sequence[float]]]) -> PassOverhead:
    """What a pass usually takes besides its items, from what `pass_overhead` found on every device."""
    every = list(devices)
    forward, backward = (_median([s for found in every for s in found[part]]) for part in ("F", "B"))
    return PassOverhead(forward, backward)


def profile_items(
    stack: LayerStack,
    partition: Partition,
    chunks: Iterable[int],
    steps: Iterable[Sequence[PassTimes]],
    seconds: Samples,
    counted: LayerRecorder,
    sizes: Mapping[int, tuple[float, float]],
    movable: Mapping[int, float],
    overhead: PassOverhead,
) -> list[ItemProfile]:
    """The costs of the items of one device's chunks.

    What a pass takes beyond its items and the usual overhead is spread over them in proportion, and so is what BW saves, so
    that chunks of the same items add up to what their passes took.

    Args:
        stack: the layers.
        partition: items to chunks.
        chunks: the device's.
        steps: the passes of the steps that timed layers, which say how a pass divides.
        seconds: of passes at full speed, which say how long it takes.
        counted: the recorder of the step that counted bytes.
        sizes: for each item the bytes of its parameters and of its model states.
        movable: for each item that trains, see `ItemProfile`.
        overhead: of every pass, which the costs of items leave out.
    """
    roles = item_roles(stack)
    samples: dict[tuple[int, str], list[float]] = {}
    for run in chain.from_iterable(steps):
        for part in run.parts:
            for item in partition.chunks[run.run.chunk]:
                again = overhead.forward if part == "F" and item == 0 else 0.0  # the code before the layers, run by every F
                samples.setdefault((item, part), []).append(max(0.0, run.items.get((part, item), 0.0) - again))
    usual_output = statistics.median(counted.output_bytes.values()) if counted.output_bytes else 0.0
    found = []
    for chunk in chunks:
        items = partition.chunks[chunk]
        known = {part: sum(_median(samples.get((item, part))) for item in items) for part in PARTS}
        known["BW"] = known["B"] + known["W"]
        totals = {
            kind: _beside(usual(seconds.get((chunk, kind)) or [0.0]), s, known[kind]) for kind, s in overhead.by_kind.items()
        }
        divided = {part: _divided(items, part, totals[part], samples) for part in PARTS}
        chunk_bytes = sum(sizes.get(i, (0.0, 0.0))[0] for i in items)
        shorter = totals["BW"] / (totals["B"] + totals["W"]) if totals["B"] + totals["W"] > 0.0 else 0.0
        for place, item in enumerate(items):
            name, role = roles[item]
            forward, backward_input, backward_weight = (divided[part][place][0] for part in PARTS)
            parameter_bytes, state_bytes = sizes.get(item, (0.0, 0.0))
            cost = LayerCost(
                name,
                forward,
                backward_input,
                backward_weight,
                activation_bytes=_median(counted.saved_bytes.get(item)),
                weight_stash_bytes=_median(counted.stashed_bytes.get(item)),
                parameter_bytes=parameter_bytes,
                output_bytes=0.0 if role is LayerRole.EPILOGUE else float(counted.output_bytes.get(item, usual_output)),
                role=role,
                state_bytes=state_bytes,
                workspace_bytes=_workspace(counted, chunk, parameter_bytes, chunk_bytes),
                transient_bytes=float(counted.transient_bytes.get(item, 0)),
                backward=shorter * (backward_input + backward_weight) if totals["BW"] > 0.0 else None,
            )
            high = tuple(divided[part][place][1] for part in PARTS)
            whole = tuple(sorted(counted.whole.get(item, ())))
            found.append(ItemProfile(item, cost, high, len(seconds[chunk, "F"]), movable.get(item), whole))  # type: ignore[arg-type]
    return found


def _beside(spent: float, overhead: float, known: float) -> float:
    """Seconds of a pass that its items take.

    The overhead is what passes usually have, and a pass of short layers at full speed may take less than that: its items still
    take half of their share of it.

    Args:
        spent: by the pass at full speed.
        overhead: that passes usually have.
        known: seconds of the items where layers were timed, which slows passes down.
    """
    share = known / (known + overhead) if known + overhead > 0.0 else 1.0
    return max(spent - overhead, 0.5 * share * spent)


def _divided(
    items: Sequence[int], part: str, total: float, samples: Mapping[tuple[int, str], list[float]]
) -> list[tuple[float, float]]:
    """For each item its usual and its high seconds; the usual ones add up to the pass's."""
    own = [samples.get((item, part)) or [0.0] for item in items]
    known = sum(statistics.median(values) for values in own)
    if known <= 0.0:
        return [(total / len(items), total / len(items)) for _ in items]
    return [(statistics.median(values) * total / known, _high(values) * total / known) for values in own]


def _workspace(counted: LayerRecorder, chunk: int, parameter_bytes: float, chunk_bytes: float) -> dict[str, float]:
    """A layer's part of what its chunk's passes hold only while they run, as measured or as far as it is known.

    W's, a gradient of each parameter above all, is divided as the parameters are.
    """
    if counted.workspace is None:
        return {"W": parameter_bytes}
    whole = counted.workspace.of_chunk(chunk)
    share = parameter_bytes / chunk_bytes if chunk_bytes else 1.0
    return {part: size * share if part == "W" else size for part, size in whole.items()}


def _median(values: Sequence[float] | None) -> float:
    return float(statistics.median(values)) if values else 0.0


def _high(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.9 * len(values)))]


def item_sizes(
    stack: LayerStack,
    held: Iterable[nn.Parameter],
    users: Mapping[int, int],
    optimizers: Sequence[Optimizer],
    copied: bool = False,
    parts: Mapping[nn.Parameter, int] | None = None,
) -> dict[int, tuple[float, float]]:
    """For each item with parameters here their bytes, and those of all that is held for them besides activations.

    These are parameters, gradients, optimizer state, the copies that an optimistic step may roll back to, and gradients
    of tied parameters that wait for the end of the step.

    Args:
        stack: the layers.
        held: the parameters whose values are here.
        users: for each storage of a parameter outside the layers an item that uses it; the prologue where it is not known.
        optimizers: hold the states.
        copied: whether optimizer steps keep a copy of parameters and states.
        parts: for each tied parameter how many gradients wait.
    """
    found: dict[int, tuple[float, float]] = {}
    for p, item in _items_of(stack, held, users):
        own = _bytes(p)
        states = sum(_bytes(s) for o in optimizers for s in o.state.get(p, {}).values() if isinstance(s, Tensor))
        total = own + states
        if p.requires_grad:
            total += own * (1 + (parts or {}).get(p, 0)) + (own + states if copied else 0.0)
        before = found.get(item, (0.0, 0.0))
        found[item] = before[0] + own, before[1] + total
    return found


def movable_shares(
    stack: LayerStack, held: Iterable[nn.Parameter], users: Mapping[int, int], deferred: Collection[int]
) -> dict[int, float]:
    """For each item that trains the share of its parameters, by elements, whose gradients are computed in W.

    Args:
        stack: the layers.
        held: the parameters whose values are here.
        users: as in `item_sizes`.
        deferred: storages of parameters whose gradients are computed in W.
    """
    trained: dict[int, int] = {}
    moved: dict[int, int] = {}
    for p, item in _items_of(stack, held, users):
        if p.requires_grad:
            trained[item] = trained.get(item, 0) + p.numel()
            moved[item] = moved.get(item, 0) + (p.numel() if storage_key(p) in deferred else 0)
    return {item: moved[item] / max(1, count) for item, count in trained.items()}


def _items_of(stack: LayerStack, held: Iterable[nn.Parameter], users: Mapping[int, int]) -> Iterator[tuple[nn.Parameter, int]]:
    """Parameters with the item they count to."""
    of_layers = {
        id(p): position + 1 for position, layer in reversed(list(enumerate(stack.modules))) for p in layer.parameters()
    }
    for p in held:
        yield p, of_layers.get(id(p), users.get(storage_key(p), 0))


def _bytes(tensor: Tensor) -> float:
    return float(tensor.numel() * tensor.element_size())


def at_unit_speed(item: ItemProfile, speed: float) -> ItemProfile:
    """What an item would cost on a device of speed 1.

    Args:
        item: as measured.
        speed: of the device it was measured on.
    """
    if speed == 1.0:
        return item
    names = ("forward", "backward_input", "backward_weight", "backward")
    seconds = {n: getattr(item.cost, n) for n in names}
    cost = replace(item.cost, **{n: s * speed for n, s in seconds.items() if s is not None})
    return replace(item, cost=cost, high=tuple(h * speed for h in item.high))  # type: ignore[arg-type]


def at_cost(item: ItemProfile, cost: LayerCost) -> ItemProfile:
    """An item whose costs are now others, its spread as large a share of them as before.

    Args:
        item: as measured.
        cost: what it costs now.
    """
    pairs = zip(
        item.high,
        (item.cost.forward, item.cost.backward_input, item.cost.backward_weight),
        (cost.forward, cost.backward_input, cost.backward_weight),
        strict=True,
    )
    high = tuple(seconds * now / before if before else seconds for seconds, before, now in pairs)
    return replace(item, cost=cost, high=high)  # type: ignore[arg-type]


def cost_model(
    items: Iterable[ItemProfile],
    link: Link | tuple[tuple[Link, ...], ...],
    device_speed: tuple[float, ...] | None = None,
    overhead: PassOverhead = PassOverhead(),  # noqa: B008 (frozen)
) -> CostModel:
    """The cost model of all devices' items, which are given for a device of speed 1, and the overhead of passes.

    Raises:
        ValueError: an item was measured nowhere.
    """
    by_index = {item.index: item.cost for item in items}
    missing = set(range(max(by_index) + 1)) - set(by_index)
    if missing:
        raise ValueError(f"items {sorted(missing)} of the model were measured on no device")
    return CostModel(tuple(by_index[index] for index in sorted(by_index)), link, device_speed, overhead=overhead)
