"""Whether layers still take what was planned with."""

from __future__ import annotations

from lightning_zb.planning.plan import Plan


def find_drift(plan: Plan, pass_seconds: dict[tuple[int, str], float], tolerance: float) -> str | None:
    """The chunk that is furthest from its plan, in words; None where all are near.

    Differences count against the mean chunk, so that a tiny chunk's jitter is no drift.

    Args:
        plan: what runs.
        pass_seconds: measured, by (chunk, "F", "B", "W" or "BW").
        tolerance: share of the mean chunk's seconds.
    """
    planned, measured = [], []
    for c, (cost, device) in enumerate(zip(plan.costs.chunks(plan.partition), plan.placement.devices, strict=True)):
        is_whole = (c, "BW") in pass_seconds
        planned.append((cost.forward + cost.whole_backward if is_whole else cost.work) / plan.costs.speed(device))
        measured.append(sum(pass_seconds.get((c, part), 0.0) for part in (("F", "BW") if is_whole else ("F", "B", "W"))))
    mean = sum(planned) / len(planned)
    worst = max(range(len(planned)), key=lambda c: abs(measured[c] - planned[c]))
    if abs(measured[worst] - planned[worst]) <= tolerance * mean:
        return None
    return f"chunk {worst} takes {1e3 * measured[worst]:.1f} ms a microbatch, {1e3 * planned[worst]:.1f} ms were planned with"
