"""Planning that goes on while training does, and an outcome that reaches all processes between the same two steps."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import pickle
import sys
import time
from collections.abc import Callable
from threading import Thread
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zb.planning.budget import InfeasibleBudget

_TAG = 17  # the executor's messages in the same group have none
_SECONDS = 60.0  # for a thread to end with the interpreter, far longer than a function takes to compile
_thinking: WeakSet[Thread] = WeakSet()


@atexit.register
def _give_up() -> None:
    """End planning that still goes on before the interpreter ends.

    Native code of a thread, a compiler's above all, that came back to Python after that would abort the process, whatever
    it was to end with. Threads end by SystemExit silently, and nothing takes it for a failure.
    """
    own_hook = sys.unraisablehook
    sys.unraisablehook = lambda raised: None if raised.exc_type is SystemExit else own_hook(raised)
    deadline = time.monotonic() + _SECONDS
    for thread in list(_thinking):
        while thread.is_alive() and time.monotonic() < deadline:
            with contextlib.suppress(KeyboardInterrupt):  # nobody is left to show it to
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
                thread.join(0.5)


class Deliberation:
    """Rank 0 thinks in a thread while all train; every process learns the outcome at the end of the same step.

    At the end of each step rank 0 says whether it is done, and the others read what it said a step before. No device
    finishes a step without messages that rank 0 sent after saying so, hence the word is under way already and nobody
    waits for another's step to end.

    Args:
        think: finds the outcome; None on other processes than rank 0.
        group: of all processes, on the CPU; None for one process.
        waits: whether rank 0 holds training up until it is done.
    """

    def __init__(self, think: Callable[[], Any] | None, group: dist.ProcessGroup | None, waits: bool = False) -> None:
        self._group, self._waits = group, waits
        self._said: bytes | None = None
        self._sent: list[tuple[Any, Tensor]] = []
        self._outcome: tuple[Any, str | None] | None = None
        self._error: Exception | None = None
        self._thread: Thread | None = None
        if think is not None:
            self._thread = Thread(target=self._think, args=(think,), name="zero_bubble planner", daemon=True)
            _thinking.add(self._thread)
            self._thread.start()

    def end_step(self) -> Any | None:
        """Called by every process at the end of each step, this one first at the end of the step it began after.

        Returns:
            The outcome, on all processes at the end of the same step; None until then.

        Raises:
            RuntimeError: on every process, what went wrong in rank 0's thread.
        """
        heard, self._said = (self._said, self._say()) if self._thread is not None else (self._hear(), b"")
        if not heard:
            return None
        for work, _ in self._sent:
            work.wait()
        outcome, error = pickle.loads(heard)
        if error is not None:
            raise RuntimeError(error) from self._error
        return outcome

    def close(self) -> None:
        """Called by every process where training ends before an outcome: nothing stays under way."""
        if self._thread is None:
            self._hear()
        for work, _ in self._sent:
            work.wait()

    def _think(self, think: Callable[[], Any]) -> None:
        try:
            self._outcome = think(), None
        except InfeasibleBudget as error:
            self._error = error
            self._outcome = None, f"with the bytes that were measured, {error}"
        except Exception as error:
            self._error = error
            self._outcome = None, f"planning with measured costs failed on rank 0: {type(error).__name__}: {error}"

    def _say(self) -> bytes:
        """On rank 0: tell the others the outcome, or that there is none yet."""
        assert self._thread is not None
        if self._said:
            return self._said  # it was told a step ago
        if self._waits:
            self._thread.join()
        word = b"" if self._thread.is_alive() else pickle.dumps(self._outcome)
        if self._group is not None:
            size, text = torch.tensor([len(word)]), torch.frombuffer(bytearray(word or b"-"), dtype=torch.uint8)
            for rank in range(1, dist.get_world_size()):
                for tensor in (size, text) if word else (size,):
                    work = dist.isend(tensor, dst=rank, group=self._group, tag=_TAG)
                    self._sent.append((work, tensor))
        return word

    def _hear(self) -> bytes:
        """On the others: what rank 0 said at the end of the step before."""
        if self._said is None or self._group is None:
            return b""
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, src=0, group=self._group, tag=_TAG)
        text = torch.empty(int(size), dtype=torch.uint8)
        if int(size):
            dist.recv(text, src=0, group=self._group, tag=_TAG)
        return text.numpy().tobytes()
