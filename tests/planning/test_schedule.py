from __future__ import annotations

import pytest

from lightning_zb.planning.placement import Placement, cyclic
from lightning_zb.planning.schedule import Pass, PassKind, Schedule


def schedule(*orders):
    return Schedule.parse([order.split() for order in orders])


def test_names():
    assert str(Pass(PassKind.BACKWARD, 2, 5)) == "BW2.5"
    assert Pass.parse("F0.13") == Pass(PassKind.FORWARD, 0, 13)
    with pytest.raises(ValueError, match="'F1' is not a pass"):
        Pass.parse("F1")


def test_fusing_joins_neighbours_only():
    fused = schedule("F0.0 B0.0 W0.0 F0.1 F0.2 B0.1 B0.2 W0.1 W0.2").fused()
    assert list(map(str, fused.orders[0])) == ["F0.0", "BW0.0", "F0.1", "F0.2", "B0.1", "B0.2", "W0.1", "W0.2"]


def test_a_right_one():
    schedule("F0.0 F0.1 BW0.0 B0.1 W0.1", "F1.0 B1.0 F1.1 W1.0 BW1.1").check(cyclic(2))


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        (("F0.0 BW0.0", "F1.0 B1.0"), "device 1 lacks W1"),
        (("F0.0 BW0.0", "F1.0 BW1.0 BW1.0"), "BW1.0 stands twice"),
        (("F0.0 F1.0 BW0.0", "BW1.0"), "F1.0 stands on device 0"),
        (("BW0.0 F0.0", "F1.0 BW1.0"), "before its forward"),
        (("F0.0 W0.0 B0.0", "F1.0 BW1.0"), "before its input gradient"),
        (("F0.1 F0.0 BW0.0 BW0.1", "F1.0 BW1.0 F1.1 BW1.1"), "out of turn"),
        (("F0.0 BW0.0 F0.1 BW0.1", "F1.0 F1.1 BW1.0 BW1.1"), "deadlocks: device 0 at BW0.0, device 1 at F1.1"),
    ],
)
def test_broken_rules_are_named(orders, message):
    with pytest.raises(ValueError, match=message):
        schedule(*orders).check(cyclic(2))


def test_another_placement():
    with pytest.raises(ValueError, match="the placement 1 and 2"):
        schedule("F0.0 BW0.0").check(Placement((0, 0), 1))
