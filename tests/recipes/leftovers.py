"""Which processes are still there."""

from __future__ import annotations

import time
from pathlib import Path


def processes_naming(text: str) -> list[str]:
    """The command lines of all processes that name something, as a sweep's folder."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has just ended
            continue
        if text in line:
            lines.append(line)
    return lines


def all_end(text: str, seconds: float = 5.0) -> bool:
    """Whether all such processes are gone within some seconds: a killed process needs a moment."""
    deadline = time.monotonic() + seconds
    while processes_naming(text):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
