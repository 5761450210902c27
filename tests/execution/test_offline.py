"""All devices in one process: the gradients of any schedule are those of plain accumulation, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_zb.execution.lowering import lower, lower_forward
from lightning_zb.execution.offline import offline_executors, run_offline
from lightning_zb.execution.program import Send
from lightning_zb.planning.placement import Placement, cyclic, wave
from tests.execution.pipeline_models import Model, Runner, differing, greedy, make_microbatches, reference, whole

PLACEMENTS = [cyclic(1), cyclic(2), cyclic(4), cyclic(2, 2), wave(1), wave(2), wave(4), wave(2, 3), Placement((0, 0, 1, 0), 2)]


def check(placement, schedule, model, microbatches):
    losses, gradients = reference(model, microbatches)
    executors = offline_executors([Runner(model, microbatches, placement, d) for d in range(placement.num_devices)])
    program = lower(schedule, placement)
    results = run_offline(program, executors)
    assert differing(model, gradients) == []
    assert all(map(torch.equal, results, losses))
    assert len(results) == len(losses)
    assert not any(p.grad is not None and p.grad.requires_grad for p in model.parameters())
    for device, executor in enumerate(executors):
        assert executor.passes.num_live == 0
        assert executor.statistics.passes == program.count(device)
        assert executor.statistics.messages == sum(isinstance(i, Send) for i in program.instructions[device])
    assert (sum(e.statistics.sent_bytes for e in executors) > 0) is (len(set(placement.devices)) > 1)


@pytest.mark.parametrize("num_microbatches", [1, 3, 6])
@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda p: "-".join(map(str, p.devices)))
@pytest.mark.parametrize("kind", ["plain", "nested", "tied", "frozen"])
def test_gradients_are_those_of_accumulation(placement, kind, num_microbatches):
    torch.manual_seed(0)
    if kind == "tied" and placement.devices[0] != placement.devices[-1]:
        pytest.skip("tied parameters on different devices are not the executor's")
    model = Model(placement.num_chunks, **({} if kind == "plain" else {kind: True}))
    microbatches = make_microbatches(num_microbatches, uneven=True)
    schedule = greedy(placement, num_microbatches)
    check(placement, schedule, model, microbatches)
    model.zero_grad()
    check(placement, whole(schedule), model, microbatches)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_placement_and_order(data):
    num_devices = data.draw(st.integers(1, 4))
    extra = data.draw(st.lists(st.integers(0, num_devices - 1), max_size=4))
    devices = data.draw(st.permutations([*range(num_devices), *extra]))
    placement = Placement(tuple(devices), num_devices)
    num_microbatches = data.draw(st.integers(1, 5))
    schedule = greedy(placement, num_microbatches, limit=data.draw(st.integers(2 * placement.num_chunks, 20)))
    schedule.check(placement)
    torch.manual_seed(0)
    check(
        placement, schedule, Model(placement.num_chunks, nested=data.draw(st.booleans())), make_microbatches(num_microbatches)
    )


def test_two_steps_accumulate_like_one_process():
    torch.manual_seed(0)
    placement, microbatches = wave(2), make_microbatches(4)
    model = Model(placement.num_chunks)
    twice = copy.deepcopy(model)
    executors = offline_executors([Runner(model, microbatches, placement, d) for d in range(2)])
    run_offline(lower(greedy(placement, 4), placement), executors)
    run_offline(lower(greedy(placement, 4), placement), executors)
    for _ in range(2):
        for ids in microbatches:
            received = None
            for chunk in range(placement.num_chunks):
                received = twice.run_chunk(chunk, received, ids)
            (received / 4).backward()
    assert differing(model, {n: p.grad for n, p in twice.named_parameters()}) == []


@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda p: "-".join(map(str, p.devices)))
def test_evaluation_yields_outputs_and_no_gradients(placement):
    torch.manual_seed(0)
    model, microbatches = Model(placement.num_chunks, nested=True), make_microbatches(3, uneven=True)
    losses, _ = reference(model, microbatches)
    executors = offline_executors([Runner(model, microbatches, placement, d) for d in range(placement.num_devices)])
    with torch.inference_mode():
        results = run_offline(lower_forward(placement, 3), executors)
    assert all(map(torch.equal, results, losses))
    assert all(p.grad is None for p in model.parameters())
    assert sum(e.passes.num_live for e in executors) == 0
