"""What was planned and what happened, as a page of Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lightning_zb.planning.budget import format_bytes
from lightning_zb.planning.costs import CostModel, LayerCost, Link
from lightning_zb.planning.plan import Plan
from lightning_zb.planning.timeline import Timeline, bubble_rate, planned_timeline
from lightning_zb.report.trace import device_waits


class Reasoned(Protocol):
    """A decision: the steps done before it, and its reason."""

    @property
    def step(self) -> int: ...

    @property
    def reason(self) -> str: ...


class Measured(Protocol):
    """A layer's cost with its spread."""

    @property
    def cost(self) -> LayerCost: ...

    @property
    def high(self) -> tuple[float, float, float]: ...

    @property
    def num_samples(self) -> int: ...

    @property
    def movable(self) -> float | None: ...

    @property
    def whole(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What a run has shown so far, beside what was planned; nothing of it need be there.

    Args:
        step: a step as it ran.
        peak_bytes: by device the activation bytes measured at their peak.
        decisions: what was decided and why.
        items: what the layers cost, with their spread.
        counters: for each device, or several together, how its optimizer steps ended.
        takes_turns: whether the devices did, in one process.
    """

    step: Timeline | None = None
    peak_bytes: Sequence[float] = ()
    decisions: Sequence[Reasoned] = ()
    items: Sequence[Measured] = ()
    counters: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    takes_turns: bool = False


NOTHING = Observed()
_COLUMNS = (
    "Of one microbatch: F forward, B gradients of inputs, W of weights, BW both as one pass; M_B is held from F to B, M_W from "
    "B to W; output is what goes on to the next item."
)
_TURNS = (
    "The devices took turns in one process, so the measured step is the work of all of them, one after another, and no test of "
    "what is predicted for devices that work at the same time."
)


def summary(plan: Plan, observed: Observed = NOTHING) -> str:
    """The summary's text: what was planned, and what happened."""
    parts = [
        f"# {plan.planner.name} on {plan.num_devices} devices, {plan.num_microbatches} microbatches",
        _figures(plan, observed.step),
        *([_TURNS] if observed.takes_turns and observed.step is not None and plan.num_devices > 1 else []),
        "## Devices",
        _devices(plan, observed.step, observed.peak_bytes),
    ]
    if observed.decisions:
        parts += ["## Decisions", "\n".join(f"- Step {d.step}: {d.reason}." for d in observed.decisions)]
    if observed.counters:
        parts += ["## Optimizer steps", _optimizer_steps(observed.counters)]
    parts += ["## Layers", _layers(plan, observed.items)]
    if plan.num_devices > 1:
        parts += ["## Links", _links(plan.costs, plan.num_devices)]
    return "\n\n".join(parts) + "\n"


def _figures(plan: Plan, measured: Timeline | None) -> str:
    columns = [("predicted", planned_timeline(plan))] + ([] if measured is None else [("measured", measured)])
    rows = [
        ["step time (ms)", *(_ms(t.step_time) for _, t in columns)],
        ["end to end (ms)", *(_ms(t.makespan) for _, t in columns)],
        ["bubble rate", *(f"{100 * bubble_rate(plan, t):.2f} %" for _, t in columns)],
    ]
    chunks = ", ".join(
        f"{c} (items {layers[0]}-{layers[-1]}) on device {device}"
        for c, (layers, device) in enumerate(zip(plan.partition.chunks, plan.placement.devices, strict=True))
    )
    return _table(["", *(name for name, _ in columns)], rows) + f"\n\nChunks (items are numbered under Layers): {chunks}."


def _devices(plan: Plan, measured: Timeline | None, peak_bytes: Sequence[float]) -> str:
    planned = planned_timeline(plan)
    header = ["device", "busy (ms)", "wait (ms)", "idle (ms)", "peak predicted", "peak measured", "limit"]
    shown = planned if measured is None else measured
    rows = []
    for device in range(plan.num_devices):
        wait = sum(end - start for start, end in device_waits(shown, device))
        rows.append(
            [
                str(device),
                _ms(shown.busy[device]),
                _ms(wait),
                _ms(shown.idle[device]),
                format_bytes(plan.predicted.peak_bytes[device]),
                format_bytes(peak_bytes[device]) if len(peak_bytes) else "-",
                "none" if plan.memory_limit is None else format_bytes(plan.memory_limit[device]),
            ]
        )
    whose = "predicted" if measured is None else "measured"
    said = f"Times are {whose}; idle is all of the step that is not busy, waits included."
    return f"{said}\n\n{_table(header, rows)}"


def _optimizer_steps(counters: Mapping[str, Mapping[str, int]]) -> str:
    names = list(next(iter(counters.values())))
    rows = [[device, *(str(counted[name]) for name in names)] for device, counted in counters.items()]
    table = _table(["device", *(name.replace("_", " ") for name in names)], rows)
    if "switches" in names:
        table += (
            "\n\nSwitches are between steps that wait for the norm of the whole model and steps that do not, never of the plan."
        )
    return table


def _layers(plan: Plan, items: Sequence[Measured]) -> str:
    header = ["item", "F (ms)", "B (ms)", "W (ms)", "BW (ms)", "M_B", "M_W", "output", "parameters"]
    rows = []
    for place, cost in enumerate(plan.costs.layers):
        seconds = [_ms(s) for s in (cost.forward, cost.backward_input, cost.backward_weight)]
        if place < len(items):
            seconds = [f"{s} ({_ms(high)})" for s, high in zip(seconds, items[place].high, strict=True)]
        sizes = (cost.activation_bytes, cost.weight_stash_bytes, cost.output_bytes, cost.parameter_bytes)
        whole = "-" if cost.backward is None else _ms(cost.backward)
        rows.append([f"{place} {cost.name}", *seconds, whole, *map(format_bytes, sizes)])
        if items:
            rows[-1].append(weights_that_move(items[place]) if place < len(items) else "-")
    table = f"{_COLUMNS}\n\n{_table([*header, *(['W moves'] if items else [])], rows)}"
    if items:
        table += (
            f"\n\nUsual values of {items[0].num_samples} microbatches, the 90th percentile in brackets. W moves: the share of "
            "the trained parameters whose gradients are computed in W; norms, biases and whole kernels stay in B."
        )
    overhead = plan.costs.overhead
    if overhead.work > 0.0:
        table += (
            f"\n\nBesides its items each pass of a chunk takes {_ms(overhead.forward)} ms (F), "
            f"{_ms(overhead.backward_input)} ms (B, BW) and {_ms(overhead.backward_weight)} ms (W)."
        )
    return table


def weights_that_move(item: Measured) -> str:
    """The share of an item's weight gradients that W computes, and what keeps the rest in B."""
    if item.movable is None:
        return "-"
    return f"{100 * item.movable:.1f} %" + (f" ({', '.join(item.whole)} whole in B)" if item.whole else "")


def _links(costs: CostModel, num_devices: int) -> str:
    if isinstance(costs.link, Link):
        return f"Every link: {_link(costs.link)}."
    header = ["from \\ to", *map(str, range(num_devices))]
    rows = [
        [str(a), *("-" if a == b else _link(costs.link_between(a, b)) for b in range(num_devices))] for a in range(num_devices)
    ]
    return _table(header, rows)


def _link(link: Link) -> str:
    speed = "no limit" if link.bandwidth == float("inf") else f"{link.bandwidth / 1e9:.2f} GB/s"
    return f"{1e6 * link.latency:.0f} µs, {speed}"


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}" if seconds < 1e-2 else f"{1e3 * seconds:.1f}"
