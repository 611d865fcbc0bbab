"""Movers are found, compared with what stores expect of them, and done without."""

from __future__ import annotations

import logging
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvlinker.moving import (
    MOVER_VARIABLE,
    Mover,
    current_mover,
    range_sums,
    summing_mover,
    using_mover,
)
from kvlinker.testing import PythonMover
from kvlinker.testing.movers import MoverTests

PRINTS = """
import logging
logging.basicConfig(format="%(message)s")
from kvlinker.moving import current_mover
print(type(current_mover()).__name__, current_mover() is current_mover())
"""


def other(view: memoryview) -> int:
    return zlib.adler32(view)


@pytest.fixture
def checksum() -> object:
    return zlib.crc32


@pytest.fixture
def mover() -> Mover:
    return PythonMover(zlib.crc32)


class TestPythonMover(MoverTests):
    """The mover of tests passes what every mover has to."""


def distribution(folder: Path, name: str, source: str) -> None:
    """Let whoever has a folder on its path find a mover."""
    info = folder / f"{name}_mover-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-mover\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[kvlinker.movers]\n{name} = {name}_mover\n")
    (folder / f"{name}_mover.py").write_text(source)


GOOD = """
import zlib
from kvlinker.testing import PythonMover
def open_mover():
    return PythonMover(zlib.crc32)
"""


def printed(folder: Path, wanted: str | None, **variables: str) -> tuple[str, str]:
    """Return what a process says of its mover that finds those in a folder, and what it logs."""
    named = {MOVER_VARIABLE: wanted} if wanted else {}
    environment = {"PYTHONPATH": str(folder), **named, **variables}
    ended = subprocess.run(
        [sys.executable, "-c", PRINTS], env=environment, capture_output=True, text=True, check=True
    )
    return ended.stdout.strip(), ended.stderr


def test_a_mover_is_found_by_its_entry_point_and_opened_once(tmp_path: Path) -> None:
    distribution(tmp_path, "good", GOOD)

    assert printed(tmp_path, "good") == ("PythonMover True", "")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise ImportError('no library')", "no library"),
        ("def open_mover():\n    raise RuntimeError('no compiler')", "no compiler"),
        ("def open_mover():\n    return 3", "returned int, expected a Mover"),
        ("", "open_mover"),
    ],
)
def test_a_mover_that_cannot_be_used_is_told_and_done_without(
    tmp_path: Path, source: str, reason: str
) -> None:
    distribution(tmp_path, "bad", source)

    found, told = printed(tmp_path, "bad")

    assert found == "NoneType True"
    assert told.startswith("mover bad cannot be used, copies are made by Python: ")
    assert reason in told
    assert told.count("\n") == 1


def test_a_mover_that_is_named_and_not_installed_is_told(tmp_path: Path) -> None:
    found, told = printed(tmp_path, "goud")

    assert found == "NoneType True"
    assert "no mover 'goud' is installed" in told


def test_none_is_a_choice(tmp_path: Path) -> None:
    distribution(tmp_path, "good", GOOD)

    assert printed(tmp_path, "none") == ("NoneType True", "")


@pytest.mark.parametrize("allowed", ["file", ""])
@pytest.mark.parametrize(("wanted", "found"), [(None, "NoneType"), ("good", "PythonMover")])
def test_s6_where_plugins_are_allowed_by_name_or_none_is_a_mover_is_imported_only_by_its_own(
    tmp_path: Path, wanted: str | None, found: str, allowed: str
) -> None:
    distribution(tmp_path, "good", GOOD)

    assert printed(tmp_path, wanted, KVLINKER_PLUGINS=allowed) == (f"{found} True", "")


def test_a_block_chooses_a_mover_and_gives_the_former_back() -> None:
    before, mover = current_mover(), PythonMover(zlib.crc32)

    with using_mover(mover):
        assert current_mover() is mover
        with using_mover(None):
            assert current_mover() is None
        assert current_mover() is mover
    assert current_mover() is before


def test_t1_a_mover_makes_checksums_only_for_who_would_make_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    mover = PythonMover(zlib.crc32)

    with using_mover(mover), caplog.at_level(logging.INFO):
        assert summing_mover(zlib.crc32) is mover
        assert summing_mover(other) is None
        assert summing_mover(other) is None

    assert caplog.text.count("are not those of a store") == 1


class _WrongTogether(PythonMover):
    """Sums rightly what it does not copy, and goes wrong where it does both."""

    def __init__(self, *, copies: bool) -> None:
        super().__init__(zlib.crc32)
        self._copies = copies

    def move_and_sum(
        self, targets: NDArray[np.int64], sources: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> NDArray[np.uint64]:
        if self._copies:
            return super().move_and_sum(targets, sources, sizes) ^ np.uint64(1)
        return self.sums(sources, sizes)


@pytest.mark.parametrize("copies", [True, False], ids=["wrong sums", "no copy"])
def test_t1_a_mover_that_goes_wrong_where_it_copies_and_sums_makes_no_checksums(
    *, copies: bool
) -> None:
    with using_mover(_WrongTogether(copies=copies)):
        assert summing_mover(zlib.crc32) is None


@pytest.fixture(params=["by Python", "by a mover", "by a mover of others"])
def made(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let checksums be made in every way."""
    movers = {"by Python": None, "by a mover": PythonMover(zlib.crc32)}
    with using_mover(movers.get(request.param, PythonMover(other))):
        yield


@pytest.mark.usefixtures("made")
def test_checksums_of_ranges_are_the_same_however_they_are_made() -> None:
    blocks = np.random.default_rng(3).integers(0, 256, (4, 100), dtype=np.uint8)
    starts, sizes = np.array([0, 10, 99]), np.array([10, 0, 1])

    found = range_sums(zlib.crc32, [block.data for block in blocks], starts, sizes)

    assert found.tolist() == [
        [zlib.crc32(block[:10]), zlib.crc32(b""), zlib.crc32(block[99:])] for block in blocks
    ]
    assert found.dtype == np.uint64


@pytest.mark.usefixtures("made")
def test_no_view_has_no_checksums() -> None:
    assert range_sums(zlib.crc32, [], np.array([0, 4]), np.array([4, 4])).shape == (0, 2)
