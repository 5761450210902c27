"""What a plan promises, as text: its figures, and its devices one by one."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_zb.cli.problem import strongest_bound, value_of
from lightning_zb.cli.text import byte_unit, duration, share, table, time_unit
from lightning_zb.planning.bounds import Objective
from lightning_zb.planning.performance import device_performance
from lightning_zb.planning.plan import Plan
from lightning_zb.planning.timeline import planned_timeline
from lightning_zb.planning.worlds import World


def headline(plan: Plan) -> str:
    """One line: what was planned."""
    chunks = plan.partition.num_chunks
    name = plan.planner.name
    return f"{name}: {plan.num_devices} devices, {chunks} chunks, {plan.num_microbatches} microbatches"


def figures(plan: Plan, objective: Objective = Objective.STEP_TIME) -> str:
    """The plan's times, bubble, bound and origin, one a line."""
    predicted = plan.predicted
    bound = strongest_bound(plan, objective)
    value = value_of(plan, objective)
    rows = [
        ("step_time", f"{duration(predicted.step_time)}  (longest device, first pass to last; bubble "
         f"{share(predicted.bubble_rate)}, idle {share(predicted.idle_fraction)})"),
        ("period", f"{duration(predicted.period)}  (per step, many in a row, with post-validation)"),
        ("makespan", f"{duration(predicted.makespan)}  (one step alone, end to end)"),
        ("lower bound", f"{duration(bound.seconds)} of {objective.value}  ({bound.name} bound, device {bound.device}; gap "
         f"{gap(value, bound.seconds)})"),
        ("planned in", f"{plan.planner.seconds:.2f} s  ({plan.planner.status.value}: {plan.planner.status.message})"),
    ]  # fmt: skip
    if plan.planner.reason:
        rows.append(("why", plan.planner.reason))
    return "\n".join(f"{name:<12} {text}" for name, text in rows)


def gap(value: float, bound: float) -> str:
    """How far above the bound a value is."""
    return f"{round(100 * (value - bound) / bound, 2) + 0.0:.2f} %" if bound > 0 else "-"  # + 0.0: no minus before a zero


def devices(plan: Plan) -> str:
    """Times and bytes of each device; see `device_performance`."""
    found = device_performance(plan)
    second, time_name = time_unit(d.runtime for d in found)
    byte, byte_name = byte_unit(size for d in found for size in (d.activation_bytes, d.constant_bytes))
    header = ["device", "chunks", f"span ({time_name})", "busy", "bubble", "overlap", f"peak ({byte_name})", "limit",
              "gradients", "states"]  # fmt: skip
    timeline = planned_timeline(plan)
    reduced = timeline.reductions
    if reduced:
        header[6:6] = ["reduction", "after work"]
    rows = []
    for d, device in enumerate(found):
        limit = None if plan.memory_limit is None or plan.memory_limit[d] == float("inf") else plan.memory_limit[d]
        times = (device.runtime, device.computation, device.runtime - device.computation, device.overlap)
        rows.append(
            [
                str(d),
                ",".join(map(str, plan.placement.chunks_of(d))),
                *(f"{t / second:.2f}" for t in times),
                f"{device.activation_bytes / byte:.3f}",
                "none" if limit is None else f"{limit / byte:.3f}",
                f"{device.gradient_bytes / byte:.3f}",
                f"{device.constant_bytes / byte:.3f}",
            ]
        )
        if reduced:
            exposed = timeline.device_ends[d] - max(timeline.ends[d])
            rows[-1][6:6] = [f"{t / second:.2f}" for t in (sum(end - start for _, start, end in reduced[d]), exposed)]
    legend = (
        "bubble: waits within the span; overlap: an input is under way while the device works; peak: activations; "
        "gradients: as large as the parameters; states: all that is constant, workspace of the largest pass included"
    )
    if reduced:
        assert plan.costs.reduction is not None
        legend += (
            f"; reduction: gradients added over {plan.costs.reduction.num_replicas} replicas beside the passes; after work: "
            "what of it is left when they are done, part of the span"
        )
    return f"{table(header, rows, left=(0, 1))}\n{legend}"


def worlds_table(found: Sequence[World]) -> str:
    """Ways to split all devices into pipelines, the fastest first; those without a plan say why."""
    second, name = time_unit(w.seconds for w in found if w.plan is not None)
    rows = []
    for world in found:
        split = f"{world.num_replicas} x {world.num_devices}"
        if world.plan is None:
            rows.append([split, "-", "-", "-", world.refusal])
            continue
        step, reduction = world.seconds - world.reduction, world.reduction
        rows.append([split, f"{step / second:.2f}", f"{reduction / second:.2f}", f"{world.seconds / second:.2f}", ""])
    return table(["pipelines x devices", f"step_time ({name})", "gradients", "together", ""], rows, left=(0, 4))
