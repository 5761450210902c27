"""Programs: transfers mirrored per pair, deadlock-free, receives in time and never past the posting horizon."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_zb.execution.lowering import lower, lower_forward
from lightning_zb.execution.program import Compute, Message, Receive, Send, Validate
from lightning_zb.planning.placement import Placement, cyclic, wave
from lightning_zb.planning.planner import make_plan
from lightning_zb.planning.schedule import Pass, PassKind, Schedule
from tests.execution.pipeline_models import greedy, whole
from tests.planning.test_builders import FIXED, LIMITED, problems

F, B, W, BW = PassKind.FORWARD, PassKind.BACKWARD_INPUT, PassKind.BACKWARD_WEIGHT, PassKind.BACKWARD


@st.composite
def placements(draw):
    num_devices = draw(st.integers(1, 4))
    extra = draw(st.lists(st.integers(0, num_devices - 1), max_size=5))
    return Placement(tuple(draw(st.permutations([*range(num_devices), *extra]))), num_devices)


@settings(max_examples=40, deadline=None)
@given(placement=placements(), num_microbatches=st.integers(1, 6), split=st.booleans())
def test_every_transfer_has_two_ends_in_one_order(placement, num_microbatches, split):
    schedule = greedy(placement, num_microbatches)
    program = lower(schedule if split else whole(schedule), placement)
    for device, instructions in enumerate(program.instructions):
        order = [p for i in instructions if isinstance(i, Compute) for p in i.covers]
        assert order == list((schedule if split else whole(schedule)).orders[device])
        assert sum(isinstance(i, Validate) for i in instructions) == 1
        point = instructions.index(Validate())
        assert all(
            i.run.kind is F and i.run.chunk < placement.num_chunks - 1 for i in instructions[:point] if isinstance(i, Compute)
        )
        posted = set()
        for index, instruction in enumerate(instructions):
            if isinstance(instruction, Receive):
                posted.add(instruction.message)
                number = program.sequences[instruction.source, device].index(instruction.message)
                assert index > point or number < program.committed[instruction.source, device]
            if isinstance(instruction, Compute) and instruction.needs and instruction.source != device:
                assert instruction.needs in posted
    sends = [(d, i.destination, i.message) for d, ins in enumerate(program.instructions) for i in ins if isinstance(i, Send)]
    receives = [(i.source, d, i.message) for d, ins in enumerate(program.instructions) for i in ins if isinstance(i, Receive)]
    assert Counter(sends) == Counter(receives)
    crossings = sum(a != b for a, b in zip(placement.devices, placement.devices[1:], strict=False))
    assert len(sends) == 2 * crossings * num_microbatches


def run_to_its_end(program):
    """Every device follows its own list: the transfers of a pair meet in order, a pass waits until its input is there.

    Returns:
        The instructions each device still has before it when nothing moves any more.
    """
    position = [0] * len(program.instructions)
    sent, posted, here = {}, {}, [set() for _ in position]
    moved = True
    while moved:
        moved = False
        for device, instructions in enumerate(program.instructions):
            while position[device] < len(instructions):
                now = instructions[position[device]]
                if isinstance(now, Send):
                    sent.setdefault((device, now.destination), []).append(now.message)
                elif isinstance(now, Receive):
                    posted.setdefault((now.source, device), []).append(now.message)
                elif isinstance(now, Compute):
                    for source in range(len(position)):
                        pair = source, device
                        for ours, theirs in zip(posted.get(pair, []), sent.get(pair, []), strict=False):
                            assert ours == theirs
                            here[device].add(ours)
                    if now.needs is not None and now.needs not in here[device]:
                        break
                    if now.gives is not None and program.placement.devices[now.gives.chunk] == device:
                        here[device].add(now.gives)
                position[device] += 1
                moved = True
    return [instructions[p:] for p, instructions in zip(position, program.instructions, strict=True)]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), name=st.sampled_from(FIXED + LIMITED))
def test_programs_of_plans_run_to_their_end(data, name):
    """Whatever the planner makes of random costs, links and devices: no transfer waits for one that never comes."""
    plan = make_plan(*data.draw(problems(name)), name)
    program = lower(plan.schedule, plan.placement)
    assert run_to_its_end(program) == [()] * plan.num_devices


def test_a_program_that_does_not_end_is_told():
    program = lower(greedy(cyclic(2), 2), cyclic(2))
    first = tuple(i for i in program.instructions[0] if not isinstance(i, Send))
    assert any(run_to_its_end(replace(program, instructions=(first, program.instructions[1]))))


@settings(max_examples=30, deadline=None)
@given(placement=placements(), num_microbatches=st.integers(1, 6))
def test_forward_program_runs_each_forward_once(placement, num_microbatches):
    program = lower_forward(placement, num_microbatches)
    for device, instructions in enumerate(program.instructions):
        runs = {i.run for i in instructions if isinstance(i, Compute)}
        assert runs == {Pass(F, c, j) for c in placement.chunks_of(device) for j in range(num_microbatches)}
        assert not any(isinstance(i, Validate) for i in instructions)


def test_backward_fuses_only_where_nobody_else_waits():
    placement = wave(2)  # chunks 0..3 on devices 0, 1, 1, 0
    schedule = Schedule.parse(
        [["F0.0", "F3.0", "B3.0", "W3.0", "B0.0", "W0.0"], ["F1.0", "F2.0", "B2.0", "W2.0", "B1.0", "W1.0"]]
    )
    program = lower(schedule, placement)
    computes = [[str(i) for i in ins if isinstance(i, Compute)] for ins in program.instructions]
    assert computes == [["F0.0", "F3.0", "B3.0", "W3.0", "BW0.0"], ["F1.0", "F2.0", "BW2.0", "B1.0", "W1.0"]]
    assert program.count(1) == {F: 2, B: 2, W: 2}
    assert program.fused == (frozenset({(0, 0)}), frozenset({(2, 0)}))
    assert [{c: str(p) for c, p in last.items()} for last in program.last_weights] == [
        {3: "W3.0", 0: "BW0.0"},
        {2: "BW2.0", 1: "W1.0"},
    ]
    text = program.text(0).splitlines()
    assert text.index("send B2.0 to 1") == text.index("B3.0") + 1


def test_an_input_sent_after_the_senders_point_moves_the_receivers_point():
    """Device 0 runs a loss before F0.1; device 1, whose own first backward comes later, must validate before F1.1."""
    placement = Placement((0, 1, 0), 2)
    schedule = Schedule.parse(
        [
            ["F0.0", "F2.0", "B2.0", "F0.1", "F2.1", "B2.1", "B0.0", "B0.1", "W2.0", "W2.1", "W0.0", "W0.1"],
            ["F1.0", "F1.1", "B1.0", "B1.1", "W1.0", "W1.1"],
        ]
    )
    program = lower(schedule, placement)
    before = [str(i) for i in program.instructions[1][: program.instructions[1].index(Validate())] if isinstance(i, Compute)]
    assert before == ["F1.0"]
    assert program.committed == {(0, 1): 1, (1, 0): 1}


def test_finishing_order_follows_the_costs():
    schedule = greedy(cyclic(2), 1)
    assert lower(schedule, cyclic(2)).finishing_order == (1, 0)
    slow_last = lower(schedule, cyclic(2), lambda p: 10.0 if (p.kind, p.chunk) == (W, 1) else 1.0)
    assert slow_last.finishing_order == (0, 1)


def test_messages_are_taken_out_of_the_senders_order():
    """In a V an activation for the lower leg is often sent ahead of a gradient that is needed first."""
    program = lower(greedy(wave(4), 8), wave(4))
    early = 0
    for device, instructions in enumerate(program.instructions):
        taken = [i.needs for i in instructions if isinstance(i, Compute) and i.needs and i.source != device]
        for (_, destination), messages in program.sequences.items():
            if destination == device:
                early += sum(a != b for a, b in zip([m for m in taken if m in messages], messages, strict=True))
    assert early > 0
    assert max(program.receive_window(*pair) for pair in program.sequences) <= 4


def test_a_wrong_order_of_receives_is_refused():
    program = lower(greedy(cyclic(2), 3), cyclic(2))
    instructions = list(program.instructions[1])
    first, second = [i for i, x in enumerate(instructions) if isinstance(x, Receive)][:2]
    instructions[first], instructions[second] = instructions[second], instructions[first]
    wrong = replace(program, instructions=(program.instructions[0], tuple(instructions)))
    with pytest.raises(ValueError, match=r"transfer 0 from device 0 to 1 is sent as F1\.0 and received as F1\.1"):
        wrong.check()


def test_a_cycle_of_waits_is_printed():
    program = lower(greedy(cyclic(2), 1), cyclic(2))
    first, second = (list(i) for i in program.instructions)
    backward = next(i for i in first if isinstance(i, Compute) and i.run.chunk == 0 and i.run.kind is not F)
    forward = next(i for i in first if isinstance(i, Compute) and i.run.kind is F)
    sending = Send(Message(F, 1, 0), 1)
    rest = [i for i in first if i not in (backward, forward, sending)]
    wrong = replace(program, instructions=((*rest, backward, forward, sending), tuple(second)))
    with pytest.raises(
        ValueError, match=r"device 0 at BW0\.0 waits for B0\.0 from device 1, device 1 at F1\.0 waits for F1\.0 from"
    ):
        wrong.check()


def test_a_schedule_that_deadlocks_cannot_be_lowered():
    schedule = Schedule.parse([["F0.0", "BW0.0", "F0.1", "BW0.1"], ["F1.0", "F1.1", "BW1.0", "BW1.1"]])
    with pytest.raises(ValueError, match=r"deadlocks: device 0 at BW0\.0, device 1 at F1\.1 wait"):
        lower(schedule, cyclic(2))
