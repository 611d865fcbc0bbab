"""Fixtures: a folder in memory."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """Give a folder of its own in a tmpfs."""
    folder = Path(tempfile.mkdtemp(prefix="kvlinker-test-", dir="/dev/shm"))  # the place under test
    yield folder
    shutil.rmtree(folder)
