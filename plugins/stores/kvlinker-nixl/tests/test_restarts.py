"""A file whose payloads nobody checks is not believed once the machine was started anew."""

from __future__ import annotations

import uuid
import weakref
from pathlib import Path

import pytest
from fake_client import FakeClient

from kvlinker.errors import StoreBusyError, StoreError
from kvlinker.testing.shelves import object_keys
from kvlinker_nixl import NixlStoreOptions, open_nixl_store, slab_file
from kvlinker_nixl.agents import Agent
from kvlinker_nixl.slab_file import SlabFile, slab_layout
from kvlinker_nixl.space import Space

LAYOUT = slab_layout(4 << 20, 4096)
(KEY,) = object_keys(1)


@pytest.fixture
def boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the file in which the system says which start of the machine this is."""
    place = tmp_path / "boot_id"
    place.write_text(f"{uuid.uuid4()}\n")
    monkeypatch.setattr(slab_file, "_BOOT", place)
    return place


def opened(folder: Path, *, has_checksums: bool) -> tuple[SlabFile, Space]:
    """Return the file of a folder, and what it says is in it."""
    file = SlabFile(folder, LAYOUT, is_direct=False, has_checksums=has_checksums)
    space = Space(LAYOUT, file)
    file.load(space)
    return file, space


@pytest.mark.parametrize("has_checksums", [True, False])
def test_t1_objects_without_checksums_are_believed_until_the_machine_starts_anew(
    tmp_path: Path, boot: Path, *, has_checksums: bool
) -> None:
    folder = tmp_path / "store"
    file, space = opened(folder, has_checksums=has_checksums)
    entry = space.take(KEY, 640)
    assert entry is not None
    space.publish(entry)
    file.close()

    file, space = opened(folder, has_checksums=has_checksums)
    assert space.find(KEY) is not None
    file.close()
    for other in (f"{uuid.uuid4()}\n", "no number"):
        boot.write_text(other)
        file, space = opened(folder, has_checksums=has_checksums)
        assert (space.find(KEY) is not None) == has_checksums
        file.close()


def test_t1_what_was_not_believed_is_not_found_by_anybody_once_its_segment_is_used_again(
    tmp_path: Path, boot: Path
) -> None:
    folder = tmp_path / "store"
    file, space = opened(folder, has_checksums=False)
    old = space.take(KEY, 640)
    assert old is not None
    space.publish(old)
    file.close()
    boot.write_text(f"{uuid.uuid4()}\n")
    file, space = opened(folder, has_checksums=False)
    (other,) = object_keys(1, chain="other")
    new = space.take(other, 640)
    assert new is not None
    assert new.offset == old.offset
    space.publish(new)
    file.close()

    for has_checksums in (False, True):
        file, space = opened(folder, has_checksums=has_checksums)
        assert space.find(KEY) is None
        assert space.find(other) is not None
        file.close()


def test_a_store_that_is_refused_its_file_leaves_no_agent_to_who_keeps_the_error(
    tmp_path: Path,
) -> None:
    options = NixlStoreOptions.of_config(
        {"backend": "POSIX", "path": str(tmp_path / "store"), "capacity": "4MiB"}
    )
    first, client = open_nixl_store(options, client=FakeClient()), FakeClient()

    with pytest.raises(StoreBusyError) as caught:
        open_nixl_store(options, client=client)

    left = [weakref.ref(client.agents.pop()) for _ in range(2)]
    assert [agent() for agent in left] == [None, None]
    assert caught.value.__traceback__ is not None  # which has the store's own agents all the time
    first.close()


def test_an_agent_that_was_let_go_of_is_asked_for_nothing() -> None:
    agent = Agent(FakeClient(), "POSIX", {}, advice="")
    agent.close()
    agent.close()

    with pytest.raises(StoreError, match="let go of"):
        agent.progress()
