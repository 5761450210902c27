"""The programs of a plan, one for each number of microbatches that a step may have."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_zb.execution.lowering import lower, lower_forward
from lightning_zb.execution.program import Program
from lightning_zb.planning.plan import Plan
from lightning_zb.planning.schedule import Pass


@dataclass(slots=True)
class Programs:
    """Makes programs when they are first asked for, and keeps them.

    Args:
        plan: what runs.
    """

    plan: Plan
    _made: dict[tuple[int, bool], Program] = field(default_factory=dict)

    def get(self, num_microbatches: int, forward_only: bool = False) -> Program:
        """The program for a number of microbatches; the last group of an epoch may be shorter."""
        key = num_microbatches, forward_only
        if key not in self._made:
            self._made[key] = self._lowered(num_microbatches, forward_only)
        return self._made[key]

    def _lowered(self, num_microbatches: int, forward_only: bool) -> Program:
        plan = self.plan
        seconds = [
            {"F": cost.forward, "B": cost.backward_input, "W": cost.backward_weight, "BW": cost.whole_backward}
            for cost in plan.costs.chunks(plan.partition)
        ]

        def duration(p: Pass) -> float:
            return seconds[p.chunk][p.kind.value]

        if forward_only:
            return lower_forward(plan.placement, num_microbatches, duration)
        # an order without its end stays valid
        return lower(plan.schedule.first_microbatches(num_microbatches), plan.placement, duration)
