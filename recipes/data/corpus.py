"""Text read from files, whole files held out for validation."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

NOT_LIBRARY_CODE = frozenset({"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"})
"""Folders of the standard library's tree that are left out: tests, bundled programs, installed packages."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Bytes for training and for validation, from different files.

    Args:
        name: where the text comes from.
        num_files: files read.
        num_validation_files: how many of them are held out.
        sha256: digest of all files in order, so that two runs can tell whether they saw the same text.
        train: the bytes to learn from.
        validation: the bytes of the files held out.
    """

    name: str
    num_files: int
    num_validation_files: int
    sha256: str
    train: bytes
    validation: bytes

    def __str__(self) -> str:
        num_bytes = len(self.train) + len(self.validation)
        return (
            f"{self.name}: {self.num_files} files, {num_bytes:,} bytes, sha256 {self.sha256[:16]}; "
            f"{self.num_validation_files} files ({len(self.validation):,} bytes) held out for validation"
        )


def read_standard_library(hold_out_every: int = 20) -> Corpus:
    """Read the running interpreter's standard library sources (PSF licence): real text without a download.

    The text differs between Python versions; the printed digest tells.

    Args:
        hold_out_every: one of so many files is held out for validation.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = (path for path in _walk(root) if path.suffix == ".py")
    return _read(f"standard library of Python {sysconfig.get_python_version()}", root, paths, hold_out_every)


def read_folder(path: str, hold_out_every: int = 20) -> Corpus:
    """Read every text file below a folder; hidden files and files with zero bytes (binaries) are left out.

    Args:
        path: the folder.
        hold_out_every: one of so many files is held out for validation.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: fewer than two text files, so that none could be held out.
    """
    root = Path(path).expanduser()
    if not root.is_dir():
        raise FileNotFoundError(f"data.path={path!r} is not a folder; give a folder of text files")
    return _read(str(root), root, _walk(root), hold_out_every)


def _walk(root: Path) -> Iterable[Path]:
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in NOT_LIBRARY_CODE and not name.startswith(".")]
        yield from (Path(folder, name) for name in files if not name.startswith("."))


def _read(name: str, root: Path, paths: Iterable[Path], hold_out_every: int) -> Corpus:
    # Sorted by name in the tree: the walk's own order depends on the file system.
    contents = [path.read_bytes() for path in sorted(paths, key=lambda path: path.relative_to(root).as_posix())]
    texts = [content for content in contents if content and b"\0" not in content]
    if len(texts) < 2:
        raise ValueError(f"{name} has {len(texts)} text file(s); at least two are needed, one of them held out for validation")
    first_held_out = min(hold_out_every, len(texts)) - 1
    held_out = range(first_held_out, len(texts), hold_out_every)
    return Corpus(
        name=name,
        num_files=len(texts),
        num_validation_files=len(held_out),
        sha256=hashlib.sha256(b"".join(texts)).hexdigest(),
        train=b"".join(text for index, text in enumerate(texts) if index not in held_out),
        validation=b"".join(texts[index] for index in held_out),
    )
