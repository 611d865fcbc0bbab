"""A full disk is an answer, never the end of the process: files are reserved before they are mapped."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from file_shelf import Shelf, make_key

from kvlinker.store import WriteStatus
from kvlinker_file import FileStore, FileStoreOptions
from kvlinker_file.directory import StoreDirectory
from kvlinker_file.table_layout import TableConfig

SCRIPT = Path(__file__).parent / "full_disk.py"


def run_on_small_disk(folder: Path, what: str, *, mib: int) -> str:
    """Run the script on a file system of a few MiB of its own."""
    mount = f'mount -t tmpfs -o size={mib}m,mode=700 none "$0" && exec "$@"'
    command = ["/usr/bin/env", "unshare", "-rm", "sh", "-c", mount, str(folder)]
    run = [sys.executable, str(SCRIPT), str(folder), what]
    answer = subprocess.run([*command, *run], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.strip()


def test_enospc_a_store_larger_than_the_disk_lives_with_what_there_is(tmp_path: Path) -> None:
    assert run_on_small_disk(tmp_path, "grow", mib=6) == "80 True True True"


def test_enospc_a_capacity_of_which_one_segment_is_larger_than_the_disk_is_grown_into_by_steps(
    tmp_path: Path,
) -> None:
    assert run_on_small_disk(tmp_path, "far", mib=24) == "True 20 True True"


def test_enospc_a_write_that_the_disk_cannot_hold_evicts_nothing(tmp_path: Path) -> None:
    assert run_on_small_disk(tmp_path, "much", mib=6) == "True True 0"


def test_a_store_with_all_its_segments_has_no_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TableConfig, "segment_limit", 2)
    monkeypatch.setattr(StoreDirectory, "disk_bytes", lambda _: (8 << 20, 1 << 20))
    shelf = Shelf(row_bytes=16 << 10, pages=1)
    store = FileStore(FileStoreOptions(path=tmp_path / "store", capacity=8 << 20))

    statuses = {shelf.put(store, [make_key(i)]) for i in range(20)}

    counters = store.stats().counters
    store.close()
    assert statuses == {(WriteStatus.WRITTEN,)}
    assert counters["evicted"] > 0
    assert counters["disk_full"] == 0


def test_a_capacity_that_the_file_system_can_never_hold_is_logged_when_the_store_is_opened(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    size = shutil.disk_usage(tmp_path).total

    for capacity in (size + (1 << 30), 64 << 20):
        FileStore(FileStoreOptions(path=tmp_path / f"{capacity}", capacity=capacity)).close()

    (record,) = caplog.records
    assert f"the capacity is {size + (1 << 30)} B and its whole file system has {size} B" in (
        record.getMessage()
    )


def test_enospc_objects_stay_readable_on_a_full_disk_and_writing_goes_on_when_there_is_space(
    tmp_path: Path,
) -> None:
    statuses, bad, deleted = run_on_small_disk(tmp_path, "fill", mib=6).rsplit(" ", 2)

    assert "failed" in statuses or "full" in statuses
    assert (bad, deleted) == ("0", "False")


def test_enospc_opening_on_a_full_disk_says_what_to_do(tmp_path: Path) -> None:
    answer = run_on_small_disk(tmp_path, "open", mib=2)

    assert answer.startswith("StoreFullError file store")
    assert "free space" in answer


@pytest.mark.parametrize("what", ["limit"])
def test_a_limit_on_file_sizes_is_an_answer_too(tmp_path: Path, what: str) -> None:
    answer = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path), what],
        capture_output=True,
        text=True,
        check=True,
    )

    stored, is_full, *_ = answer.stdout.split()
    assert (stored, is_full) == ("0", "True")
