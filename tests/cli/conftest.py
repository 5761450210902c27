"""A costs file of equal layers."""

from __future__ import annotations

import pytest

from lightning_zb.planning.planfile import write_costs
from tests.cli.calls import model


@pytest.fixture
def costs(tmp_path):
    path = tmp_path / "costs.json"
    write_costs(model(), path)
    return path
