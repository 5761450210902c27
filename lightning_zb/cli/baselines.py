"""What the second paper compares with (its section Evaluation, Baselines, and its table of approaches), by the names it gives.

Each of them adapts one phase and leaves the other two as S-1F1B has them: even layers with the ends on the first and the last
chunk, one chunk per device, 1F1B with whole backward passes. Every link is charged.
"""

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
    "hanayo": Baseline("wave-1f1b", "even", "1f1b on one wave, even layers"),
}
"""The paper's `zb` is the schedule of that name with the default partition, even layers: W moved, nothing else adapted."""
