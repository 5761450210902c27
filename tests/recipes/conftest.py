"""A folder of real text: the topics of Python's interactive help, a file each."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics

import pytest


@pytest.fixture(scope="session")
def topics_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("topics")
    for name, text in topics.items():
        (folder / f"{name}.txt").write_text(text)
    return folder
