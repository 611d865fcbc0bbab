"""Files that take long begin first, and every one that is named is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from distributions import ROOT
from longest_first import LONGEST, place_of

TESTS = "import pytest\n\n\n@pytest.mark.parametrize('n', range({}))\ndef test_it(n): ...\n"


@pytest.mark.parametrize("end", LONGEST)
def test_a_file_that_is_to_begin_first_is_there_once(end: str) -> None:
    folders = [ROOT / name for name in ("benchmarks", "core", "plugins", "tests")]

    found = [path for folder in folders for path in folder.glob(f"**/{Path(end).name}")]

    assert [place_of(path) for path in found].count(LONGEST.index(end)) == 1


def test_files_run_by_their_place_and_others_by_their_number_of_tests(tmp_path: Path) -> None:
    sizes = {
        "a/test_few.py": 1,
        "b/test_many.py": 3,
        "engine_tests/test_busy_servers.py": 1,
        "engine_tests/test_servers.py": 2,
    }
    for name, size in sizes.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(TESTS.format(size))
    command = [sys.executable, "-m", "pytest", "-p", "longest_first", "--collect-only", "-q"]

    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "--import-mode=importlib", *reversed(sizes)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT / "tools")},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )

    assert [line for line in done.stdout.splitlines() if "::" in line] == [
        "engine_tests/test_busy_servers.py::test_it[0]",
        "engine_tests/test_servers.py::test_it[0]",
        "engine_tests/test_servers.py::test_it[1]",
        "b/test_many.py::test_it[0]",
        "b/test_many.py::test_it[1]",
        "b/test_many.py::test_it[2]",
        "a/test_few.py::test_it[0]",
    ]
