"""What the second paper compares with (its section Evaluation, Baselines), by the names it gives."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Baseline:
    """A schedule with the partition that belongs to it.

    Args:
        schedule: a name of the registry.
        partition: `"even"` or `"balanced"`.
        meaning: in words.
    """

    schedule: str
    partition: str
    meaning: str


BASELINES = {
    "s-1f1b": Baseline("1f1b", "even", "1f1b, even layers"),
    "i-1f1b": Baseline("interleaved", "even", "interleaved, even layers, two chunks per device"),
    "mist": Baseline("1f1b", "balanced", "1f1b, layers balanced by time"),
    "hanayo": Baseline("wave-2", "even", "one wave, even layers"),
}
"""The paper's `zb` is the schedule of that name."""
