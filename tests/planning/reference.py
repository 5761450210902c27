"""An independent judge of schedules in plain Python: shares no code with the performance model."""

from __future__ import annotations

from hypothesis import strategies as st

from lightning_zb.planning.costs import CostModel, LayerCost, Link, PassOverhead


def run(schedule, placement, chunk_costs, costs, earliest=None):
    """Start and end of every pass by repeated relaxation; also proves completeness and the absence of cycles.

    Passes in `earliest` start no sooner than it says.
    """
    earliest = earliest or {}
    n, m = placement.num_chunks, schedule.num_microbatches
    seconds, waits_for = {}, {}
    for device, order in enumerate(schedule.orders):
        before = None
        for p in order:
            kind, c, j = p.kind.value, p.chunk, p.microbatch
            assert placement.devices[c] == device
            cost, speed = chunk_costs[c], costs.speed(device)
            parts = {"F": cost.forward, "B": cost.backward_input, "W": cost.backward_weight, "BW": cost.backward}
            if cost.backward is None:
                parts["BW"] = cost.backward_input + cost.backward_weight
            seconds[p] = parts[kind] / speed
            waits_for[p] = [(before, 0.0)] if before is not None else []
            before = p
            if kind == "F" and c > 0:
                waits_for[p].append((("F", c - 1, j), _lag(costs, placement, c - 1, c, chunk_costs[c - 1].output_bytes)))
            if "B" in kind:
                waits_for[p].append((("F", c, j), 0.0))
                if c < n - 1:
                    waits_for[p].append((("B", c + 1, j), _lag(costs, placement, c + 1, c, chunk_costs[c].output_bytes)))
            if kind == "W":
                waits_for[p].append((("B", c, j), 0.0))
    by_part = {(part, p.chunk, p.microbatch): p for p in seconds for part in p.kind.value}
    assert len(by_part) == 3 * n * m == sum(len(p.kind.value) for p in seconds)
    end = {}
    while len(end) < len(seconds):
        ready = [p for p in seconds if p not in end and all(by_part.get(q, q) in end for q, _ in waits_for[p])]
        assert ready, "the schedule deadlocks"
        for p in ready:
            ready_at = max((end[by_part.get(q, q)] + lag for q, lag in waits_for[p]), default=0.0)
            end[p] = max(ready_at, earliest.get(p, 0.0)) + seconds[p]
    return {p: (end[p] - seconds[p], end[p]) for p in end}


def period(schedule, placement, chunk_costs, costs, validation, num_steps=16):
    """Seconds per step of the later half of so many consecutive steps, each device going on as soon as it is done.

    With validation a device's first loss or backward waits until every device's word that it has finished the step before
    has reached it.
    """
    last_chunk, devices = placement.num_chunks - 1, range(placement.num_devices)
    free, told, halfway = [0.0] * len(devices), [0.0] * len(devices), 0.0
    for step in range(num_steps):
        earliest = {order[0]: free[d] for d, order in enumerate(schedule.orders)}
        for d, order in enumerate(schedule.orders):
            gated = next(p for p in order if p.kind.value != "F" or p.chunk == last_chunk)
            if validation:
                earliest[gated] = max(earliest.get(gated, 0.0), told[d])
        times = run(schedule, placement, chunk_costs, costs, earliest)
        free = [times[order[-1]][1] for order in schedule.orders]
        told = [max(free[e] + (0.0 if e == d else _link(costs, e, d).latency) for e in devices) for d in devices]
        if step == num_steps // 2 - 1:
            halfway = free
    return max(b - a for a, b in zip(halfway, free, strict=True)) / (num_steps - num_steps // 2)


def _link(costs, a, b):
    return costs.link if isinstance(costs.link, Link) else costs.link[a][b]


def _lag(costs, placement, source, target, size):
    a, b = placement.devices[source], placement.devices[target]
    if a == b:
        return 0.0
    return _link(costs, a, b).latency + size / _link(costs, a, b).bandwidth


def peaks(schedule, placement, chunk_costs):
    """The most activation bytes each device holds: M_B from F to B, M_W from B to W."""
    result = []
    for order in schedule.orders:
        held, top = {}, 0.0
        for p in order:
            key = (p.chunk, p.microbatch)
            if p.kind.value == "F":
                held[key] = chunk_costs[p.chunk].activation_bytes
            elif p.kind.value == "B":
                held[key] = chunk_costs[p.chunk].weight_stash_bytes
            else:
                del held[key]
            top = max(top, sum(held.values()))
        result.append(top)
    return tuple(result)


def ascending(schedule):
    """Whether each chunk runs F, B and W in ascending microbatch order."""
    last = {}
    for p in schedule.passes():
        for part in p.kind.value:
            if last.get((part, p.chunk), -1) != p.microbatch - 1:
                return False
            last[part, p.chunk] = p.microbatch
    return True


_seconds = st.sampled_from([0.0, 0.5, 1.0, 1.0, 1.3, 2.0, 3.7])
_bytes = st.sampled_from([0.5, 1.0, 1.0, 2.0, 3.0])


@st.composite
def cost_models(draw, num_layers: int, num_devices: int, stash_above_activation: bool = True):
    """Unequal layers, zero costs, unequal speeds, whole backwards shorter or longer than B and W.

    One link or a matrix of them, each up to twice an F.
    """
    layers = []
    whole = draw(st.sampled_from([None, None, 0.5, 0.9, 1.1]))
    for i in range(num_layers):
        activation = draw(_bytes)
        stash = draw(st.sampled_from([0.0, 0.4, 1.0] + [1.5] * stash_above_activation)) * activation
        forward, *split = (draw(_seconds) for _ in range(3))
        backward = None if whole is None else draw(st.sampled_from([None, whole * sum(split)]))
        layers.append(LayerCost(f"layer{i}", forward, *split, activation, stash, output_bytes=draw(_bytes), backward=backward))
    links = st.builds(Link, st.sampled_from([0.0, 0.1, 1.0]), st.sampled_from([1.0, 10.0, float("inf")]))
    row = st.tuples(*[links] * num_devices)
    link = draw(st.one_of(links, st.tuples(*[row] * num_devices)))
    speeds = draw(st.sampled_from([None, tuple(1.0 + d % 2 for d in range(num_devices))]))
    overhead = draw(st.sampled_from([PassOverhead(), PassOverhead(), PassOverhead(0.3, 0.2, 0.1)]))
    return CostModel(tuple(layers), link, speeds, overhead=overhead)


@st.composite
def placements(draw, max_devices: int = 4, max_chunks: int = 8):
    """Any map of chunks to devices that uses every device."""
    num_devices = draw(st.integers(1, max_devices))
    extra = draw(st.lists(st.integers(0, num_devices - 1), max_size=max_chunks - num_devices))
    return draw(st.permutations([*range(num_devices), *extra]))
