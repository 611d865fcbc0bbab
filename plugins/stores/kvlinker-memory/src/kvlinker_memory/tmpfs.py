"""Where memory is that has names: a tmpfs, and how much of it there can be."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from kvlinker.errors import ContractError, StoreError

__all__ = ["check_owner", "check_room", "check_tmpfs"]

_MOUNTS = Path("/proc/self/mountinfo")
_MEMORY = Path("/proc/meminfo")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def check_tmpfs(path: Path) -> None:
    """Do nothing for a folder in a tmpfs, which need not exist yet.

    Raises:
        ContractError: it lies, or would lie, in a file system of another kind.
        StoreError: the system does not say in which one.
    """
    folder = _existing(path)
    found = folder.stat().st_dev
    kind = _kinds().get(f"{os.major(found)}:{os.minor(found)}", "an unknown kind")
    if kind != "tmpfs":
        msg = (
            f"memory store {path}: {folder} is on a file system of type {kind}, and not in memory; name a folder "
            f"in a tmpfs, such as /dev/shm/kvlinker, or use the store 'file' for a disk"
        )
        raise ContractError(msg)


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _kinds() -> dict[str, str]:
    """Return the type of every mounted file system by its device, as proc_pid_mountinfo(5) lists them."""
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        msg = f"memory store: {_MOUNTS} cannot be read, so no tmpfs can be told: {error}"
        raise StoreError(msg) from error
    kinds = {}
    for line in lines:
        mount, _, kind = line.partition(" - ")
        kinds[mount.split(" ")[2]] = kind.split(" ")[0]
    return kinds


def check_owner(path: Path) -> None:
    """Make a folder whose name everybody can guess, or do nothing where this user has made it.

    Where everybody may make folders, another user could be first: who owns a folder reads and changes what lies in it.

    Raises:
        StoreError: it is another user's, or no folder.
    """
    with suppress(OSError):  # what is in the way is seen below, or by whoever opens it
        path.mkdir(mode=0o700)
    with suppress(FileNotFoundError):
        found = path.lstat()
        if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode):
            msg = (
                f"memory store {path}: it is no folder of this user's (user {os.geteuid()}), but something of user "
                f"{found.st_uid}'s; name a path of your own, or have it removed"
            )
            raise StoreError(msg)


def check_room(path: Path, capacity: int) -> None:
    """Do nothing where so many bytes can be there at all.

    Raises:
        ContractError: the tmpfs, the machine or the control group has less memory.
    """
    for what, size, remedy in _limits(path):
        if capacity > size:
            msg = (
                f"memory store {path}: the capacity is {capacity} B, and {what} has {size} B in all; "
                f"set a smaller capacity, or {remedy}"
            )
            raise ContractError(msg)


def _limits(path: Path) -> list[tuple[str, int, str]]:
    found = os.statvfs(_existing(path))
    limits = [("the machine", _machine_bytes(), "use a larger machine")]
    if found.f_blocks:  # a tmpfs without a limit says 0
        size = found.f_blocks * found.f_frsize
        remedy = f"mount it with a larger size (containers: --shm-size={size * 2})"
        limits.append(("its tmpfs", size, remedy))
    with suppress(OSError, ValueError):  # "max", or no control groups of version 2
        size = int(_CGROUP_LIMIT.read_text(encoding="ascii"))
        limits.append(("the control group of this process", size, "raise its memory limit"))
    return limits


def _machine_bytes() -> int:
    first = _MEMORY.read_text(encoding="ascii").splitlines()[0]
    return int(first.split()[1]) * 1024
