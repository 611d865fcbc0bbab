"""What a server or an engine that has ended left behind: whoever uses its store, its port, and what keeps objects."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

from linked_servers import Link, wait_for

from kvlinker_file import FileStore, FileStoreOptions, inspect, prune

__all__ = ["check_nothing_is_held", "is_free", "users_of"]

OTHER_CAPACITY = "48MiB"
"""Which a store takes from an opener that is alone, and refuses beside another one."""


def users_of(store: Path) -> list[int]:
    """Return the processes that have a file of a store open or mapped."""
    return [
        int(process.name)
        for process in Path("/proc").glob("[0-9]*")
        if any(str(store) in used for used in _used_by(process))
    ]


def _used_by(process: Path) -> Iterator[str]:
    """Yield what names the files of a process, as far as it lives and tells."""
    with suppress(OSError):
        yield (process / "maps").read_text(errors="replace")
    with suppress(OSError):
        for descriptor in (process / "fd").iterdir():
            with suppress(OSError):
                yield str(descriptor.readlink())


def is_free(port: int) -> bool:
    """Say whether nothing listens on a port of this machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def check_nothing_is_held(link: Link) -> None:
    """Check that all of a store can be had by whoever comes next; it is empty then."""
    # The kernel takes a moment for what a process held whose first thread has ended.
    wait_for(lambda: users_of(link.store) == [], "the end of whoever uses the store")
    wait_for(lambda: is_free(link.port), "the end of whoever listens")
    options = FileStoreOptions.of_config({"path": str(link.store), "capacity": OTHER_CAPACITY})
    with closing(FileStore(options)) as store:
        assert store.stats().objects > 0
    assert prune(link.store, older_than=0).objects == 0
    # A slot that somebody reads or writes keeps its file.
    assert inspect(link.store).segments == ()
