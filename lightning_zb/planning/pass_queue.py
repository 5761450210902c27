"""A queue of passes for propagation inside numba: in which order to look at what a move may have changed.

A binary heap of passes by key, each at most once: `keys` and `items`, whether a pass is `present`, and its `size` in an array
of one. The functions take these one by one: numba counts a reference whenever it reads an array from a tuple, which in the
annealer's loops took as long as everything else together.
"""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True, nogil=True)
def empty_queue(capacity):
    """The four arrays of a queue of passes below `capacity`: keys, items, present, size."""
    return np.empty(capacity), np.empty(capacity, np.int32), np.zeros(capacity, np.bool_), np.zeros(1, np.int64)


@njit(cache=True, inline="always")
def push(keys, items, present, size, key, item):
    if present[item]:
        return
    present[item] = True
    i = size[0]
    size[0] = i + 1
    while i > 0:
        parent = (i - 1) >> 1
        if keys[parent] <= key:
            break
        keys[i] = keys[parent]
        items[i] = items[parent]
        i = parent
    keys[i] = key
    items[i] = item


@njit(cache=True, inline="always")
def pop(keys, items, present, size):
    item = items[0]
    present[item] = False
    last = size[0] - 1
    size[0] = last
    if last > 0:
        key, moved = keys[last], items[last]
        i = 0
        while True:
            child = 2 * i + 1
            if child >= last:
                break
            if child + 1 < last and keys[child + 1] < keys[child]:
                child += 1
            if keys[child] >= key:
                break
            keys[i] = keys[child]
            items[i] = items[child]
            i = child
        keys[i] = key
        items[i] = moved
    return item


@njit(cache=True, nogil=True)
def clear(items, present, size):
    for i in range(size[0]):
        present[items[i]] = False
    size[0] = 0
