from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_zb.planning.costs import CostModel, LayerCost, LayerRole, Link, Reduction
from lightning_zb.planning.planfile import (
    costs_from_json,
    costs_to_json,
    plan_from_json,
    plan_to_json,
    read_costs,
    read_plan,
    write_costs,
    write_plan,
)
from lightning_zb.planning.planner import make_plan
from lightning_zb.planning.torch_csv import from_csv, to_csv
from tests.planning import reference
from tests.planning.paper import unit_costs

NAMES = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "v-half"]


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_round_trips(data):
    num_devices = data.draw(st.integers(1, 3))
    costs = data.draw(reference.cost_models(2 * num_devices, num_devices, stash_above_activation=False))
    assert costs_from_json(json.loads(json.dumps(costs_to_json(costs)))) == costs
    plan = make_plan(costs, num_devices, data.draw(st.integers(1, 5)), data.draw(st.sampled_from(NAMES)))
    assert plan_from_json(json.loads(json.dumps(plan_to_json(plan), allow_nan=False))) == plan
    assert from_csv(to_csv(plan.schedule)) == (plan.schedule, plan.placement)


def test_files(tmp_path):
    layers = (
        LayerCost("embedding", 0.1, 0.0, 0.2, role=LayerRole.PROLOGUE, workspace_bytes={"F": 3.0}, transient_bytes=2.0),
        LayerCost("layer", 1, 1, 1, 5, 2, 7, 3, state_bytes=9.0, backward=1.5),
        LayerCost("head", 1, 1, 1, role=LayerRole.EPILOGUE),
    )
    links = tuple(tuple(Link(0.1 * a, 1 + b) for b in range(1)) for a in range(1))
    costs = CostModel(layers, links, (2.0,), Reduction(4, Link(1e-5, 1e9)))
    write_costs(costs, tmp_path / "costs.json")
    assert read_costs(tmp_path / "costs.json") == costs
    written = json.loads((tmp_path / "costs.json").read_text())["layers"]
    assert ["backward" in layer for layer in written] == [False, True, False]
    plan = make_plan(costs, 1, 3, "1f1b", memory_budget=[2.0])
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan
    assert json.loads((tmp_path / "plan.json").read_text())["passes"][0][:3] == ["F0.0", "BW0.0", "F0.1"]


def test_the_least_costs_file():
    costs = costs_from_json({"layers": [{"name": "a", "forward": 1, "backward_input": 1, "backward_weight": 0}]})
    assert costs == CostModel((LayerCost("a", 1, 1, 0),))
    assert set(costs_to_json(costs)) == {"layers", "link", "device_speed"}


def spoil(data, path, value):
    for key in path[:-1]:
        data = data[key]
    if value is None:
        del data[path[-1]]
    else:
        data[path[-1]] = value


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("devices",), None, "devices: is missing"),
        (("format",), "other/1", "format: is 'other/1'"),
        (("devices",), 0, "devices: 0 is not a count"),
        (("costs", "layers", 1, "forward"), None, r"costs.layers\[1\].forward: is missing"),
        (("costs", "layers", 1, "forward"), "fast", r"costs.layers\[1\].forward: 'fast' is not a number"),
        (("costs", "layers", 0, "colour"), 1, r"costs.layers\[0\].colour: is not a known field"),
        (("costs", "layers", 0, "backward"), -0.5, r"costs.layers\[0\].backward: -0.5 is negative"),
        (("costs", "link", "latency"), -1, "costs.link.latency: -1 is negative"),
        (("costs", "device_speed"), [0], r"costs.device_speed\[0\]: 0 is not positive"),
        (("costs", "reduction"), {"num_replicas": 0}, "costs.reduction.num_replicas: 0 is not a count"),
        (("passes", 1, 2), "Q1.2", r"passes\[1\]\[2\]: 'Q1.2' is not a pass"),
        (("passes", 1, 2), "F1.3", "passes: F1.3 on device 1 is out of turn"),
        (("partition", 0), [1], "partition: .* contiguous"),
        (("placement", 0), 1, "placement: .* must use each"),
        (("microbatches",), 5, "passes: run 4 microbatches, microbatches says 5"),
        (("layers", 0), "other", "layers: differ"),
        (("memory_limit",), [1.0], "memory_limit: has 1 entries for 2 devices"),
        (("planner", "status"), "good", "planner.status: 'good'"),
        (("predicted", "busy"), 3, "predicted.busy: 3 is not a list"),
    ],
)
def test_errors_name_the_field(path, value, message, tmp_path):
    data = copy.deepcopy(json.loads(json.dumps(plan_to_json(make_plan(unit_costs(2), 2, 4, "zb-h1")))))
    spoil(data, path, value)
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=f"plan.json: {message}"):
        read_plan(tmp_path / "plan.json")


def test_csv_of_others():
    schedule, placement = from_csv("0F0,,0SEND_F0,0F1,0RECV_B0,0I0,0W0,0B1\n1RECV_F0,1F0,1B0,1F1,1B1\n")
    assert placement.devices == (0, 1)
    assert [str(p) for p in schedule.orders[0]] == ["F0.0", "F0.1", "B0.0", "W0.0", "BW0.1"]
    with pytest.raises(ValueError, match="row 0, column 1: '0X0'"):
        from_csv("0F0,0X0\n")
