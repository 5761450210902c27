"""Schedules as the CSV of torch.distributed.pipelining: a row for each rank, cells such as 0F3, 0I3, 0W3 and 0B3.

A cell is stage, action, microbatch; F is the forward, I the input gradient, W the weight gradient and B both at once.
"""

from __future__ import annotations

import csv
import io
import re

from lightning_zb.planning.placement import Placement
from lightning_zb.planning.schedule import Pass, PassKind, Schedule

_ACTIONS = {
    PassKind.FORWARD: "F",
    PassKind.BACKWARD_INPUT: "I",
    PassKind.BACKWARD_WEIGHT: "W",
    PassKind.BACKWARD: "B",
}
_KINDS = {action: kind for kind, action in _ACTIONS.items()}
_CELL = re.compile(r"(\d+)([A-Z_]+?)(\d*)")
_COMMUNICATION = re.compile(r"SEND_|RECV_|UNSHARD|RESHARD|REDUCE_GRAD")


def to_csv(schedule: Schedule) -> str:
    """The compute-only CSV of a schedule."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for order in schedule.orders:
        writer.writerow(f"{p.chunk}{_ACTIONS[p.kind]}{p.microbatch}" for p in order)
    return out.getvalue()


def from_csv(text: str) -> tuple[Schedule, Placement]:
    """Read such a CSV; empty cells, transfers and sharding actions in it are left out.

    Returns:
        The schedule, and the placement that its rows imply.

    Raises:
        ValueError: a cell is not an action (row and column are named), or the schedule cannot run.
    """
    rows = [row for row in csv.reader(io.StringIO(text)) if any(cell.strip() for cell in row)]
    orders = []
    owners: dict[int, int] = {}
    for device, row in enumerate(rows):
        order = []
        for column, cell in enumerate(row):
            name = cell.strip()
            if not name or _COMMUNICATION.search(name):
                continue
            match = _CELL.fullmatch(name)
            if match is None or match[2] not in _KINDS or not match[3]:
                raise ValueError(f"row {device}, column {column}: {name!r} is not an action such as 0F3, 0I3, 0W3 or 0B3")
            p = Pass(_KINDS[match[2]], int(match[1]), int(match[3]))
            owners.setdefault(p.chunk, device)
            order.append(p)
        orders.append(tuple(order))
    if sorted(owners) != list(range(len(owners))):
        raise ValueError(f"stages {sorted(owners)} are not 0, 1, 2, ... without a gap")
    schedule = Schedule(tuple(orders))
    placement = Placement(tuple(owners[chunk] for chunk in range(len(owners))), len(rows))
    schedule.check(placement)
    return schedule, placement
