"""Errors of the operating system become the store's own: what could not be done, and what to do about it."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from kvlinker.errors import StoreError, StoreFormatError, StoreFullError

__all__ = ["NO_NEW_FILES", "NO_SPACE", "changed_segment", "typed_os_errors"]

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
NO_NEW_FILES = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.EMFILE, errno.ENFILE})
"""What keeps a process from making files, and leaves it those that it has mapped."""


@contextmanager
def typed_os_errors(what: str) -> Iterator[None]:
    """Turn OSError into the store error that says what to do."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in NO_SPACE:
            msg = f"{what}: {reason}; free space on the disk or lower the capacity"
            raise StoreFullError(msg) from error
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            msg = f"{what}: {reason}; symlinks are not followed, name the real directory"
            raise StoreFormatError(msg) from error
        if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
            msg = f"{what}: {reason}; a file store needs a file system that reserves blocks, such as ext4, xfs or btrfs"
            raise StoreError(msg) from error
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            msg = f"{what}: {reason}; a file store needs a directory that it can write"
            raise StoreError(msg) from error
        msg = f"{what}: {reason}"
        raise StoreError(msg) from error


def changed_segment(number: int) -> StoreError:
    """Return what to raise where a segment file is gone, or is another one."""
    return StoreError(
        f"segment {number} is not the file that was made; run `kvlinker store verify --drop` on the store"
    )
