"""The colours of passes, the same in every picture."""

from __future__ import annotations

from lightning_zb.planning.schedule import Pass, PassKind
from lightning_zb.planning.timeline import Timeline

COLOURS = {
    PassKind.FORWARD: "#4c84d9",
    PassKind.BACKWARD_INPUT: "#2ba89a",
    PassKind.BACKWARD_WEIGHT: "#6cb04a",
    PassKind.BACKWARD: "#ee8f35",
}
SHADE = 0.72
"""Brightness of a device's second chunk against the first."""


def shades(timeline: Timeline) -> dict[int, float]:
    """Brightness by chunk: on every device its chunks get darker from the first to the last."""
    result = {}
    for order in timeline.orders:
        chunks = sorted({p.chunk for p in order})
        for place, chunk in enumerate(chunks):
            result[chunk] = 1.0 if len(chunks) == 1 else 1.0 - (1.0 - SHADE) * place / (len(chunks) - 1)
    return result


def rgb(p: Pass, shade: float) -> tuple[float, float, float]:
    """The colour of a pass, each part from 0 to 1."""
    colour = COLOURS[p.kind]
    red, green, blue = (int(colour[i : i + 2], 16) / 255 * shade for i in (1, 3, 5))
    return red, green, blue
