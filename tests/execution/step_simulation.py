"""Steps that follow each other without a barrier, in simulated time: when each pass of each device starts."""

from __future__ import annotations

from lightning_zb.execution.program import Compute, Program, Validate
from lightning_zb.planning.schedule import Pass

Late = tuple[tuple[int, int, float], ...]


def simulate_steps(program: Program, unit: float, num_steps: int, late: Late = ()) -> dict[tuple[int, Pass], float]:
    """Start of every pass by (step, pass); a device validates a step once all devices have finished it.

    Args:
        program: executed in every step.
        unit: seconds of F, of B and of W.
        num_steps: how many.
        late: (device, step, seconds) by which a device begins a step late.
    """
    devices = range(program.num_devices)
    kept = [[i for i in program.instructions[d] if isinstance(i, (Compute, Validate))] for d in devices]
    queues = [[(step, i) for step in range(num_steps) for i in kept[d]] for d in devices]
    now, position, begun = [0.0] * len(devices), [0] * len(devices), [-1] * len(devices)
    given: dict[tuple[int, object], float] = {}
    ends: dict[tuple[int, int], float] = {}
    starts: dict[tuple[int, Pass], float] = {}
    moved = True
    while moved:
        moved = False
        for d in devices:
            while position[d] < len(queues[d]):
                step, instruction = queues[d][position[d]]
                if step > begun[d]:
                    begun[d] = step
                    ends[d, step - 1] = now[d]
                    now[d] += sum(seconds for device, at, seconds in late if (device, at) == (d, step))
                if isinstance(instruction, Validate):
                    if any((other, step - 1) not in ends for other in devices):
                        break
                    now[d] = max(now[d], *(ends[other, step - 1] for other in devices))
                else:
                    needs = (step, instruction.needs)
                    if instruction.needs is not None and needs not in given:
                        break
                    now[d] = starts[step, instruction.run] = max(now[d], given.get(needs, 0.0))
                    now[d] += unit * len(instruction.run.kind.value)
                    if instruction.gives is not None:
                        given[step, instruction.gives] = now[d]
                position[d] += 1
                moved = True
    assert all(position[d] == len(queues[d]) for d in devices)
    return starts
