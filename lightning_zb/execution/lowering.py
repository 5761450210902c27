"""From a schedule to a program.

`lower` walks all devices together in the order of simulated time. Where a pass yields something another device needs,
the send is appended to the sender and the message to the one sequence of that ordered pair of devices; both sides use
the same sequence, so transfers cannot cross. Receives are then posted in the sender's order, about one pass before the
message is sent: order of consumption is not order of arrival.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator

from lightning_zb.execution.program import Compute, Instruction, Message, Program, Receive, Send, Validate
from lightning_zb.planning.placement import Placement
from lightning_zb.planning.schedule import Pass, PassKind, Schedule

F, B, W, BW = PassKind.FORWARD, PassKind.BACKWARD_INPUT, PassKind.BACKWARD_WEIGHT, PassKind.BACKWARD
Orders = tuple[tuple[Compute, ...], ...]


def unit_seconds(p: Pass) -> float:
    """Duration of a pass where nothing is known of its cost."""
    return float(len(p.kind.value))


def lower(schedule: Schedule, placement: Placement, seconds: Callable[[Pass], float] = unit_seconds) -> Program:
    """Turn a training schedule into a program.

    Args:
        schedule: compute passes only, complete for the placement (`Schedule.check`).
        placement: chunks to devices.
        seconds: expected duration of a pass; decides when receives are posted and who finishes first, never what runs.

    Returns:
        The program, checked.
    """
    return _lower(schedule, placement, seconds, forward_only=False)


def lower_forward(placement: Placement, num_microbatches: int, seconds: Callable[[Pass], float] = unit_seconds) -> Program:
    """The evaluation program: forwards only, each device working on the chunk whose input is there first.

    Args:
        placement: chunks to devices.
        num_microbatches: microbatches in flight.
        seconds: expected duration of a pass.

    Returns:
        The program, checked.
    """
    return _lower(_forward_schedule(placement, num_microbatches, seconds), placement, seconds, forward_only=True)


def _lower(schedule: Schedule, placement: Placement, seconds: Callable[[Pass], float], forward_only: bool) -> Program:
    orders = tuple(tuple(_computes(order, placement, seconds)) for order in schedule.orders)
    ends: dict[Pass, float] = {}
    finished = [0.0] * placement.num_devices
    sequences: dict[tuple[int, int], list[Message]] = {}
    starts: list[list[float]] = [[] for _ in orders]
    sent_at: dict[Message, float] = {}
    for device, compute in _walk(orders, seconds, ends):
        starts[device].append(ends[compute.run] - seconds(compute.run))
        finished[device] = ends[compute.run]
        if compute.gives is not None:
            sent_at[compute.gives] = starts[device][-1]
            destination = placement.devices[compute.gives.chunk]
            if destination != device:
                sequences.setdefault((device, destination), []).append(compute.gives)
    points = [len(order) for order in orders] if forward_only else _validation_points(orders, placement)
    producer = {c.gives: (d, i) for d, order in enumerate(orders) for i, c in enumerate(order) if c.gives is not None}
    committed = {
        (source, destination): sum(producer[m][1] < points[source] for m in messages)
        for (source, destination), messages in sequences.items()
    }
    instructions: list[tuple[Instruction, ...]] = []
    for device, order in enumerate(orders):
        receives: list[list[Receive]] = [[] for _ in order]
        for (source, destination), messages in sorted(sequences.items()):
            if destination == device:
                at = _posting_positions(
                    messages, order, starts[device], sent_at, committed[source, destination], points[device]
                )
                for message, position in zip(messages, at, strict=True):
                    receives[position].append(Receive(message, source))
        instructions.append(tuple(_assemble(device, order, receives, points[device], placement)))
    program = Program(
        placement=placement,
        num_microbatches=schedule.num_microbatches,
        forward_only=forward_only,
        instructions=tuple(instructions),
        sequences={pair: tuple(messages) for pair, messages in sequences.items()},
        committed=committed,
        finishing_order=tuple(sorted(range(len(orders)), key=lambda d: (finished[d], d))),
    )
    program.check()
    return program


def _computes(order: tuple[Pass, ...], placement: Placement, seconds: Callable[[Pass], float]) -> list[Compute]:
    """The passes of a device with what they take and give; B and W become BW where nobody else waits for that B.

    A plan with costs of BW says so itself. Where BW is known to take longer, B and W stay apart.
    """
    computes: list[Compute] = []
    index = 0
    while index < len(order):
        p = order[index]
        covers: tuple[Pass, ...] = (p,)
        following = order[index + 1] if index + 1 < len(order) else None
        own = Pass(W, p.chunk, p.microbatch)
        here = placement.devices[p.chunk]
        whole = Pass(BW, p.chunk, p.microbatch)
        is_free = p.chunk == 0 or placement.devices[p.chunk - 1] == here
        if p.kind is B and following == own and is_free and seconds(whole) <= seconds(p) + seconds(own):
            covers = (p, own)
            p = whole
        needs = gives = None
        source = here
        if p.kind is F and p.chunk > 0:
            needs, source = Message(F, p.chunk, p.microbatch), placement.devices[p.chunk - 1]
        if p.kind is F and p.chunk < placement.num_chunks - 1:
            gives = Message(F, p.chunk + 1, p.microbatch)
        if p.kind.sends_gradient and p.chunk < placement.num_chunks - 1:
            needs, source = Message(B, p.chunk, p.microbatch), placement.devices[p.chunk + 1]
        if p.kind.sends_gradient and p.chunk > 0:
            gives = Message(B, p.chunk - 1, p.microbatch)
        computes.append(Compute(p, covers, needs, source, gives))
        index += len(covers)
    return computes


def _walk(orders: Orders, seconds: Callable[[Pass], float], ends: dict[Pass, float]) -> Iterator[tuple[int, Compute]]:
    """Yield (device, compute) of all devices by simulated start, earliest first, filling `ends`.

    Raises:
        ValueError: the devices wait for each other.
    """
    position = [0] * len(orders)
    free = [0.0] * len(orders)
    given: dict[Message, float] = {}
    left = sum(map(len, orders))
    while left:
        best = None
        for device, order in enumerate(orders):
            if position[device] < len(order):
                needs = order[position[device]].needs
                if needs is None or needs in given:
                    start = free[device] if needs is None else max(free[device], given[needs])
                    if best is None or start < best[0]:
                        best = (start, device)
        if best is None:
            stuck = [f"device {d} at {order[position[d]]}" for d, order in enumerate(orders) if position[d] < len(order)]
            raise ValueError(f"the schedule deadlocks: {', '.join(stuck)} wait for each other")
        start, device = best
        compute = orders[device][position[device]]
        free[device] = ends[compute.run] = start + seconds(compute.run)
        if compute.gives is not None:
            given[compute.gives] = free[device]
        position[device] += 1
        left -= 1
        yield device, compute


def _validation_points(orders: Orders, placement: Placement) -> list[int]:
    """For each device the index of the first pass that must not run before the previous step is validated.

    It is the first backward or loss, or, if earlier, the first forward whose input its sender gives only after the
    sender's own point: without this a legal order hangs, since such an input will never come if the step restarts.
    """
    last = placement.num_chunks - 1
    points = [next(i for i, c in enumerate(order) if c.run.kind is not F or c.run.chunk == last) for order in orders]
    producer = {c.gives: (d, i) for d, order in enumerate(orders) for i, c in enumerate(order) if c.gives is not None}
    moved = True
    while moved:
        moved = False
        for device, order in enumerate(orders):
            for i in range(points[device]):
                needs = order[i].needs
                if needs is not None and producer[needs][0] != device and producer[needs][1] >= points[producer[needs][0]]:
                    points[device] = i
                    moved = True
                    break
    return points


def _posting_positions(
    messages: list[Message],
    order: tuple[Compute, ...],
    starts: list[float],
    sent_at: dict[Message, float],
    committed: int,
    point: int,
) -> list[int]:
    """Before which pass of the receiver each message of a pair is posted, never later than its consumer.

    Posting follows the sender's order. What the sender sends only after its validation point is not posted before the
    receiver's: a restart must find nothing posted that will not come.
    """
    consumer = {c.needs: i for i, c in enumerate(order) if c.needs is not None}
    positions = []
    for message in messages:
        running = max(bisect_right(starts, sent_at[message]) - 1, 0)
        positions.append(min(running, consumer[message]))
    for n in range(len(messages) - 2, -1, -1):
        positions[n] = min(positions[n], positions[n + 1])
    return [position if n < committed else max(position, point) for n, position in enumerate(positions)]


def _assemble(
    device: int, order: tuple[Compute, ...], receives: list[list[Receive]], point: int, placement: Placement
) -> Iterator[Instruction]:
    for i, compute in enumerate(order):
        if i == point:
            yield Validate()
        yield from receives[i]
        yield compute
        if compute.gives is not None and placement.devices[compute.gives.chunk] != device:
            yield Send(compute.gives, placement.devices[compute.gives.chunk])


def _forward_schedule(placement: Placement, num_microbatches: int, seconds: Callable[[Pass], float]) -> Schedule:
    """List scheduling of forwards: each device takes what can start first, later chunks before earlier ones."""
    orders: list[list[Pass]] = [[] for _ in range(placement.num_devices)]
    free = [0.0] * placement.num_devices
    ready = {Pass(F, 0, j): 0.0 for j in range(num_microbatches)}
    while ready:
        p = min(ready, key=lambda p: (max(ready[p], free[placement.devices[p.chunk]]), -p.chunk, p.microbatch))
        device = placement.devices[p.chunk]
        free[device] = max(ready.pop(p), free[device]) + seconds(p)
        orders[device].append(p)
        if p.chunk < placement.num_chunks - 1:
            ready[Pass(F, p.chunk + 1, p.microbatch)] = free[device]
    return Schedule(tuple(map(tuple, orders)))
