"""A heap of passes for propagation inside numba: in which order to look at what a move may have changed."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit


class Heap(NamedTuple):
    """A binary heap of passes by key, each at most once.

    Args:
        keys: shape (passes,).
        items: shape (passes,).
        present: whether a pass is in the heap, shape (passes,).
        size: shape (1,).
    """

    keys: np.ndarray
    items: np.ndarray
    present: np.ndarray
    size: np.ndarray


@njit(cache=True, inline="always")
def push(heap, key, item):
    if heap.present[item]:
        return
    heap.present[item] = True
    i = heap.size[0]
    heap.size[0] = i + 1
    while i > 0:
        parent = (i - 1) >> 1
        if heap.keys[parent] <= key:
            break
        heap.keys[i] = heap.keys[parent]
        heap.items[i] = heap.items[parent]
        i = parent
    heap.keys[i] = key
    heap.items[i] = item


@njit(cache=True, inline="always")
def pop(heap):
    item = heap.items[0]
    heap.present[item] = False
    last = heap.size[0] - 1
    heap.size[0] = last
    if last > 0:
        key, moved = heap.keys[last], heap.items[last]
        i = 0
        while True:
            child = 2 * i + 1
            if child >= last:
                break
            if child + 1 < last and heap.keys[child + 1] < heap.keys[child]:
                child += 1
            if heap.keys[child] >= key:
                break
            heap.keys[i] = heap.keys[child]
            heap.items[i] = heap.items[child]
            i = child
        heap.keys[i] = key
        heap.items[i] = moved
    return item


@njit(cache=True, nogil=True)
def clear(heap):
    for i in range(heap.size[0]):
        heap.present[heap.items[i]] = False
    heap.size[0] = 0
