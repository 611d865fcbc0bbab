"""A memory store is a file store in a tmpfs, whose files are memory.

Processes share it, it keeps to its capacity, and whoever dies leaves whole objects alone. It holds them as
long as some process has it open.
"""

from __future__ import annotations

from kvlinker_file import FileStore
from kvlinker_memory.options import MemoryStoreOptions
from kvlinker_memory.tmpfs import check_owner, check_room, check_tmpfs

__all__ = ["open_memory_store"]


def open_memory_store(options: MemoryStoreOptions) -> FileStore:
    """Open the store, or make it.

    Raises:
        ContractError: an option has a wrong value, the folder is in no tmpfs, or there is less memory than that.
        StoreError: the user's folder is another user's; or as FileStore raises it.
    """
    own, pin_bytes = options.file_options(), options.pinned_bytes()
    check_tmpfs(own.path)
    check_room(own.path, own.capacity)
    if options.path is None:
        check_owner(own.path)
    return FileStore(own, is_temporary=not options.keep, pin_bytes=pin_bytes)
