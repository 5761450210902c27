"""Real processes over gloo for tests, with a hard deadline and no leftovers."""

from __future__ import annotations

import os
import pickle
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.processes import CONTEXT, free_port, keep_pages_shared


def run_processes(
    worker: Callable[..., Any], num_processes: int, *args: Any, timeout: float = 60, must_end: bool = True
) -> list[Any]:
    """Run `worker(rank, *args)` in processes that share a gloo group.

    Args:
        worker: an importable function; its result must be picklable.
        num_processes: how many.
        args: passed on.
        timeout: seconds until all are killed.
        must_end: raise where a process fails; otherwise its traceback stands in its place.

    Returns:
        The results by rank.

    Raises:
        AssertionError: a process failed or did not end in time.
    """
    port = free_port()
    ends, processes = [], []
    for rank in range(num_processes):
        parent, child = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(target=_enter, args=(worker, rank, num_processes, port, child, args), daemon=True)
        process.start()
        child.close()
        ends.append(parent)
        processes.append(process)
    deadline = time.monotonic() + timeout
    results: list[Any] = [None] * num_processes
    try:
        waiting = dict(enumerate(ends))
        while waiting:
            for rank, end in list(waiting.items()):
                if end.poll(0.02):
                    try:
                        results[rank] = pickle.loads(end.recv_bytes())
                    except EOFError:
                        results[rank] = False, "the process died without a word"
                    del waiting[rank]
            if time.monotonic() > deadline:
                raise AssertionError(f"ranks {sorted(waiting)} did not end within {timeout} s; the others: {results}")
            failed = [f"rank {r}:\n{x[1]}" for r, x in enumerate(results) if x is not None and not x[0]]
            if failed and must_end:
                raise AssertionError("\n".join(failed))
    finally:
        for process in processes:
            process.join(0.0 if process.is_alive() and time.monotonic() > deadline else 2.0)
            if process.is_alive():
                process.kill()
                process.join()
    return [x[1] for x in results]


def _enter(worker: Callable[..., Any], rank: int, num_processes: int, port: int, end: Any, args: tuple[Any, ...]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    keep_pages_shared()
    try:
        dist.init_process_group("gloo", rank=rank, world_size=num_processes, timeout=timedelta(seconds=50))
        end.send_bytes(pickle.dumps((True, worker(rank, *args))))  # by value: this process ends soon
        dist.destroy_process_group()
    except BaseException:
        end.send_bytes(pickle.dumps((False, traceback.format_exc())))
    end.close()
