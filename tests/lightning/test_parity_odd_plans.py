"""Every bit equals the plain Trainer's on plans of odd shapes, all devices in one process."""

from __future__ import annotations

from itertools import accumulate

import pytest

from lightning_zb.planning.cooptimize import cooptimize
from lightning_zb.planning.planfile import read_plan, write_plan
from tests.lightning import odd_plans
from tests.lightning.fitting import differences, run
from tests.lightning.test_parity_offline import _case


def check(model, path, tmp_path, **options):
    plan = read_plan(path)
    case = _case(model, str(path), plan.num_devices, **options)
    result = run(case, tmp_path)
    assert differences([result], run(case.plain(), tmp_path / "plain")) == []
    assert result["num_chunks"] == plan.placement.num_chunks


@pytest.mark.parametrize("model", ["tokens", "hybrid"])
@pytest.mark.parametrize("shape", odd_plans.SHAPES)
def test_every_shape(shape, model, tmp_path):
    check(model, odd_plans.write(shape, 4, tmp_path / "plan.json"), tmp_path)


@pytest.mark.parametrize("shape", ["embedding alone on a device, head alone on another", "ends together on device 2"])
def test_tied_ends(shape, tmp_path):
    check("tokens", odd_plans.write(shape, 4, tmp_path / "plan.json"), tmp_path, model_options={"tied": True})


def test_mixed_precision(tmp_path):
    path = odd_plans.write("a permutation with uneven chunks", 4, tmp_path / "plan.json")
    check("tokens", path, tmp_path, precision="bf16-mixed")


@pytest.mark.parametrize("num_devices", [2, 3])
def test_what_the_co_optimizer_makes_of_costs(num_devices, tmp_path):
    costs = read_plan(odd_plans.write("one chunk beside five", 4, tmp_path / "costs.json")).costs
    write_plan(cooptimize(costs, num_devices, 4, 1.5, effort=2), tmp_path / "plan.json")
    check("tokens", tmp_path / "plan.json", tmp_path)


def test_the_layout_of_a_user(tmp_path):
    case = _case("tokens", "zb", 2, strategy={"partition": "Et|t*3|tt|t*2L"}, size=16)
    result = run(case, tmp_path)
    assert differences([result], run(case.plain(), tmp_path / "plain")) == []
    assert result["partition"] == [2, 3, 2, 3]


@pytest.mark.slow
def test_constraints_of_a_user(tmp_path):
    constraints = {"alone": ["epilogue"], "together": [["net.layers.0", "net.layers.2"]]}
    case = _case("tokens", "auto", 2, strategy={"constraints": constraints}, size=16)
    result = run(case, tmp_path)
    assert differences([result], run(case.plain(), tmp_path / "plain")) == []
    cuts = set(accumulate(result["partition"]))
    assert 9 in cuts  # of ten items
    assert not {2, 3} & cuts


def test_constraints_that_cannot_be_are_said(tmp_path):
    with pytest.raises(ValueError, match="constraints need a schedule that cuts the layers itself; write schedule 'auto'"):
        run(_case("tokens", "zb-v", 2, strategy={"constraints": {"alone": ["epilogue"]}}), tmp_path)
