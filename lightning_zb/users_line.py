"""Which line of the user's own code an error came through."""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path

_PACKAGE = Path(__file__).parent
_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = ("site-packages", "dist-packages")
_LIBRARIES = ("lightning", "pytorch_lightning", "torch")


def users_line(error: BaseException) -> str | None:
    """The innermost such line, as "file, line 12"; None where there is none.

    What lies in other installed libraries counts as the user's: they may be.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_file() and _PACKAGE not in path.parents and not _is_library(path):
            return f"{os.path.relpath(path)}, line {frame.lineno}"
    return None


def _is_library(path: Path) -> bool:
    for folder, inside in zip(path.parts, path.parts[1:], strict=False):
        if folder in _INSTALLED:
            return inside in _LIBRARIES
    return str(path).startswith(_STANDARD_LIBRARY)
