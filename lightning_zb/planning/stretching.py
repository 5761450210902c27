"""Transfers stretched to what whole passes fill.

The way of a microbatch to the next device and back takes two passes and two transfers. Meanwhile a device runs other passes,
and unless some of them take just as long, either the device waits or the microbatch does, at every device anew. An order that
comes from transfers a little longer than they are, so that passes fill that way exactly, lets the microbatch wait everywhere
alike, which costs nothing where memory is not what limits.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from lightning_zb.planning.instance import Instance

_MOST_PASSES = 5  # of a kind, that together fill the way
_ALIKE = 0.01  # of a mean F: sums of passes that differ by less count as one


def stretched_lags(instance: Instance) -> np.ndarray:
    """Transfers to order by, in seconds, as `Instance.lag`; the true ones where some passes or all transfers take no time.

    Args:
        instance: the problem; the means over its chunks and transfers decide.
    """
    lag = instance.lag
    forward, backward, weight = (float(seconds) for seconds in instance.duration.mean(axis=1))
    if not (lag > 0.0).any() or min(forward, backward, weight) <= 0.0:
        return lag
    mean = float(lag[lag > 0.0].mean())
    alike = _ALIKE * forward
    up = _filled((forward, backward, weight), 2.0 * (forward + mean), alike)
    down = _filled((backward, weight), 2.0 * (backward + mean), alike)
    return lag * np.array([[(up / 2.0 - forward) / mean], [(down / 2.0 - backward) / mean]])


def _filled(lengths: tuple[float, ...], way: float, alike: float) -> float:
    """The smallest sum of passes that is at least a way long; the way itself where so many passes do not last as long.

    Args:
        lengths: seconds of the passes to choose from.
        way: seconds.
        alike: sums that differ by less from the next count as one, and the largest of them is taken.
    """
    counts = product(range(_MOST_PASSES + 1), repeat=len(lengths))
    sums = sorted(sum(k * length for k, length in zip(count, lengths, strict=True)) for count in counts)
    sums = [total for total in sums if total >= way * (1.0 - 1e-9)]
    for total, following in zip(sums, [*sums[1:], np.inf], strict=False):
        if following - total > alike:
            return total
    return way
