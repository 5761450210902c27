"""Transfers stretched to what whole passes fill.

Devices begin one after the other, each as soon as the first microbatch arrives, so a microbatch that goes on in that direction
always finds them at the same place of their orders. On its way back it does not: to a device that began earlier by a pass and
a transfer, it takes two of each. Unless some passes take just as long, either the device waits or the microbatch does, at
every device anew. An order that comes from transfers a little longer than they are, so that passes fill that way exactly, lets
the microbatch wait, which costs nothing where memory is not what limits.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from lightning_zb.planning.instance import Instance

_MOST_PASSES = 5  # of a kind, that together fill the way
_ALIKE = 0.01  # of a mean F: sums of passes that differ by less count as one


def stretched_lags(instance: Instance) -> tuple[np.ndarray, np.ndarray]:
    """Transfers to order by, in seconds; the true ones where some passes or all transfers take no time.

    Args:
        instance: the problem; the means over its chunks decide what passes fill.

    Returns:
        As `Instance.lag`, and `Clock.warm_up_lag`: as long as a device has only F to run, only F fill the way.
    """
    lag, warm_up = instance.lag.copy(), np.zeros(instance.num_chunks)
    forward, backward, weight = (float(seconds) for seconds in instance.duration.mean(axis=1))
    if not (lag > 0.0).any() or min(forward, backward, weight) <= 0.0:
        return lag, warm_up
    alike = _ALIKE * forward
    begins = np.cumsum(np.append(0.0, instance.duration[0, :-1] + instance.lag[0, 1:]))  # of the first microbatch
    first = np.array([begins[instance.chunks_of(d)[0]] for d in range(instance.num_devices)])
    for c in range(1, instance.num_chunks):
        back = first[instance.device[c - 1]] - first[instance.device[c]]
        if back > 0.0:
            way = float(instance.duration[0, c - 1] + lag[0, c] + back)
            warm_up[c] = lag[0, c] + _filled((forward,), way, alike) - way
            lag[0, c] += _filled((forward, backward, weight), way, alike) - way
        if back < 0.0:
            way = float(instance.duration[1, c] + lag[1, c - 1] - back)
            lag[1, c - 1] += _filled((backward, weight), way, alike) - way
    return lag, warm_up


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
