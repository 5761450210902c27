"""The first failure of a job, told to every process: the last words of each are the cause, not what followed from it.

When a process fails its connections break, and every other process fails as well, with a long traceback about a peer
that does not answer. The rendezvous store keeps what failed first; whoever lost a peer ends with that.
"""

from __future__ import annotations

import threading

import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_zb.execution.transport import TransportError
from lightning_zb.users_line import users_line

_KEY = "lightning_zb/first_failure"
_SECONDS = 3.0
"""How long to wait for the store: the process that serves it may have ended, or hang."""


class OtherRankFailed(RuntimeError):
    """Another process failed first; its message is part of this one's."""


def note_failure(error: BaseException, run: int = 0) -> str | None:
    """Write this process's failure down, unless another process failed before.

    Args:
        error: what ends this process's run.
        run: which run of the job it is, for scripts that go on after a failure.

    Returns:
        Rank and message of the process that failed first; None where that is this one, or where nobody can tell.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    mine = f"rank {dist.get_rank()} {what_happened(error)}"
    found: list[str] = []

    def ask() -> None:
        try:
            store = dist.distributed_c10d._get_default_store()
            found.append(store.compare_set(f"{_KEY}/{run}", "", mine).decode())
        except (RuntimeError, ValueError):  # the store is gone with its process
            return

    asking = threading.Thread(target=ask, daemon=True, name="first-failure")  # a stopped process never answers
    asking.start()
    asking.join(_SECONDS)
    return found[0] if found and found[0] != mine else None


def what_happened(error: BaseException) -> str:
    """What ended a process, to follow its name in a sentence.

    Args:
        error: that ended it.
    """
    if isinstance(error, SIGTERMException):
        return "was ended by SIGTERM"
    if isinstance(error, KeyboardInterrupt):
        return "was interrupted"
    lines = str(error).strip().splitlines() or [""]
    line = lines[-1] if "Traceback" in str(error) else lines[0]  # a loader's worker hands its whole traceback over
    where = users_line(error)
    place = f" ({where})" if where else ""
    return f"failed first: {type(error).__name__}: {line}{place}"


def follows_from_a_lost_peer(error: BaseException) -> bool:
    """Whether an error says no more than that another process does not answer."""
    return isinstance(error, (TransportError, dist.DistError)) or (isinstance(error, RuntimeError) and "gloo" in str(error))
