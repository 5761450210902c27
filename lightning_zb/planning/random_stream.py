"""Pseudo-random numbers inside numba that are the same on every machine and for every library version."""

from __future__ import annotations

import numpy as np
from numba import njit


def new_stream(seed: int) -> np.ndarray:
    """The state of a stream (xorshift64*), shape (1,)."""
    mixed = (seed * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) % 2**64
    return np.array([mixed or 1], np.uint64)


@njit(cache=True, nogil=True)
def uniform(stream):
    """A number in [0, 1)."""
    x = stream[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    stream[0] = x
    return np.float64((x * np.uint64(0x2545F4914F6CDD1D)) >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@njit(cache=True, nogil=True)
def below(stream, bound):
    """An integer in [0, bound)."""
    return int(uniform(stream) * bound)


@njit(cache=True, nogil=True)
def bell(stream):
    """A number of mean 0 and variance 1 (sum of four uniforms: no logarithm, hence the same bits everywhere)."""
    return (uniform(stream) + uniform(stream) + uniform(stream) + uniform(stream) - 2.0) * 1.7320508075688772
