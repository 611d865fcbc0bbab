"""The command with the real plugins: layouts without torch, and a real file store, sound and damaged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from repository import ROOT

from kvlinker.device import HostAccess
from kvlinker.discovery import load_plugins
from kvlinker.entries import DevicePoolEntry
from kvlinker.keys import OBJECT_KEY_BYTES
from kvlinker.registry import open_store
from kvlinker.spans import BufferSpan
from kvlinker.store import Store, WriteBatch

OBJECTS, OBJECT_BYTES = 6, 4096
PATTERN = b"\xa5" * OBJECT_BYTES


def kvlinker(*arguments: str | Path, program: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command, or a program that calls it, in a process of its own."""
    how = ["-c", program] if program else ["-m", "kvlinker"]
    command = [sys.executable, *how, *map(str, arguments)]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def open_file_store(folder: Path) -> Store:
    return open_store(load_plugins(), "file", {"path": str(folder), "capacity": "16MiB"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a closed file store with a few objects of one pattern."""
    memory = np.frombuffer(PATTERN * OBJECTS, np.uint8).reshape(OBJECTS, OBJECT_BYTES)
    span = BufferSpan(
        base_ptr=memory.ctypes.data,
        rows=OBJECTS,
        row_bytes=OBJECT_BYTES,
        row_stride=OBJECT_BYTES,
        label="kv[0]",
    )
    entry = DevicePoolEntry(
        name="kv",
        indices_from_pool="kv",
        components=[[span]],
        layer_mapping={0: 0},
        page_size=1,
        rows_are_pages=True,
    )
    plan = entry.page_plan(entry.prepare_locations(list(range(OBJECTS))))
    keys = tuple(bytes([i]) * OBJECT_KEY_BYTES for i in range(OBJECTS))
    batch = WriteBatch(keys=keys, plan=plan, fingerprint=bytes(16))
    store = open_file_store(tmp_path / "store")
    (statuses,) = store.write([batch], HostAccess(), may_publish=lambda: True)
    store.close()
    assert all(status.is_stored for status in statuses)
    return tmp_path / "store"


def damage(folder: Path) -> None:
    """Change one byte of one stored object."""
    for path in sorted(folder.rglob("*.slab")):
        content = bytearray(path.read_bytes())
        place = content.find(PATTERN)
        if place >= 0:
            content[place + 100] ^= 1
            path.write_bytes(content)
            return
    pytest.fail("no object was found in the store's files")


# ---- layouts ----------------------------------------------------------------------------------


def test_b107_a_layout_is_explained_where_torch_cannot_be_imported() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\nfrom kvlinker.cli import main; main(sys.argv[1:])"
    )
    description = ROOT / "examples" / "descriptions" / "deepseek-v4-flash.json"

    done = kvlinker("explain", description, program=program)

    assert (done.returncode, done.stderr) == (0, "")
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "strategy deepseek_v4 lays it out" in lines
    assert "swa 43 6,439,680 last page of swa" in lines
    assert "deepseek_v4_c4_indexer 21 177,408 693.0 every page of kv" in lines
    assert "every stored boundary takes 8,160,000 B more: what its last pages alone need" in lines
    assert "1M 4,096,819,968 3.8 GiB" in lines


def test_every_plugin_of_this_repository_is_sound() -> None:
    done = kvlinker("plugins", "--json")

    plugins = json.loads(done.stdout)["plugins"]
    assert (done.returncode, done.stderr) == (0, "")
    assert {plugin["status"] for plugin in plugins} == {"loaded"}


# ---- a real file store ------------------------------------------------------------------------


def test_a_file_store_is_inspected(folder: Path) -> None:
    done = kvlinker("store", "inspect", "--json", folder)

    contents = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert (contents["objects"], contents["payload_bytes"]) == (OBJECTS, OBJECTS * OBJECT_BYTES)
    assert (contents["path"], contents["capacity_bytes"]) == (str(folder), 16 << 20)
    assert {space["objects"] for space in contents["namespaces"]} == {1}


def test_a_sound_file_store_is_verified(folder: Path) -> None:
    done = kvlinker("store", "verify", folder)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "6 objects read, 24.0 KiB",
        "every one is what was written",
    ]


def test_t1_a_damaged_object_is_found_and_can_be_removed(folder: Path) -> None:
    damage(folder)

    found = kvlinker("store", "verify", "--json", folder)
    removed = kvlinker("store", "verify", "--drop", folder)
    after = kvlinker("store", "verify", "--json", folder)

    assert (found.returncode, json.loads(found.stdout)["corrupt"]) == (1, 1)
    assert (removed.returncode, removed.stdout.splitlines()[-1]) == (1, "1 removed")
    assert (after.returncode, json.loads(after.stdout)["intact"]) == (0, OBJECTS - 1)


def test_one_namespace_of_a_file_store_is_pruned(folder: Path) -> None:
    spaces = json.loads(kvlinker("store", "inspect", "--json", folder).stdout)["namespaces"]

    done = kvlinker("store", "prune", "--json", "--namespace", spaces[0]["namespace"], folder)

    pruned = json.loads(done.stdout)
    assert (done.returncode, pruned["removed"], pruned["objects"]) == (0, 1, OBJECTS - 1)


def test_a_file_store_in_use_is_pruned_beside_its_user(folder: Path) -> None:
    store = open_file_store(folder)
    try:
        done = kvlinker("store", "prune", "--json", "--older-than", "0s", folder)
        left = store.stats().objects
    finally:
        store.close()

    assert (done.returncode, done.stderr, left) == (0, "", 0)
    assert json.loads(done.stdout)["removed"] == OBJECTS


def test_a_folder_of_other_files_is_no_store() -> None:
    done = kvlinker("store", "inspect", ROOT / "docs")

    assert (done.returncode, done.stdout) == (2, "")
    assert "holds no store that an installed plugin knows" in done.stderr


def test_t5_doctor_tests_a_file_store_and_leaves_nothing_in_it(folder: Path) -> None:
    options = ("--option", f"path={folder}", "--option", "capacity=16MiB")

    done = kvlinker("doctor", "--store", "file", *options)

    assert (done.returncode, done.stderr) == (0, "")
    assert "self-test passed: " in done.stdout
    contents = json.loads(kvlinker("store", "inspect", "--json", folder).stdout)
    assert contents["objects"] == OBJECTS
