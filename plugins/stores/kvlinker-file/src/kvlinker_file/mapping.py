"""Mappings of slab files at addresses of our choice.

All segments of a kind are mapped at multiples of its slot size, so that slots of several segments are rows
of one span with one stride: a batch is copied in one call, wherever its slots lie. `mmap.mmap` cannot do
that, and it holds the interpreter lock while the kernel works; hence the C library.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kvlinker.errors import StoreError

__all__ = ["FileMapping", "map_bytes", "punch", "reserve"]

_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MADV_POPULATE_WRITE = 23
"""Linux 5.14: fault pages in at once, seven times faster than one by one; older kernels say EINVAL."""
_MS_SYNC = 4
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_FAILED = ctypes.c_void_p(-1).value
_PAGE_MASK = ~(mmap.PAGESIZE - 1)

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_munmap = _libc.munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_madvise = _libc.madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_fallocate = _libc.fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
_msync = _libc.msync
_msync.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_CANNOT = (errno.EOPNOTSUPP, errno.ENOSYS)


class FileMapping:
    """A file mapped shared and writable at a multiple of some number of bytes."""

    def __init__(self, descriptor: int, size: int, *, alignment: int) -> None:
        """Map a file; the descriptor is closed.

        Args:
            descriptor: of a file whose blocks are reserved.
            size: bytes of the file.
            alignment: a multiple of the page size.

        Raises:
            OSError: there is no address space for it.
        """
        self.size = size
        try:
            self.address = _map_aligned(descriptor, size, alignment)
        finally:
            os.close(descriptor)
        self._is_mapped = True

    def populate(self, start: int, end: int) -> None:
        """Fault in bytes that are about to be written.

        Raises:
            StoreError: the disk cannot give the pages; writing them would have ended the process.
        """
        first = self.address + (start & _PAGE_MASK)
        size = self.address + min(end, self.size) - first
        if _madvise(first, size, _MADV_POPULATE_WRITE) and ctypes.get_errno() == errno.EFAULT:
            msg = f"the disk cannot give bytes [{start}, {end}) of a segment that was reserved"
            raise StoreError(msg)

    def sync(self) -> None:
        """Return when what was written is on the disk.

        Raises:
            OSError: it cannot be written.
        """
        if _msync(self.address, self.size, _MS_SYNC):
            raise _error("msync")

    def close(self) -> None:
        """Unmap; any later access to the addresses ends the process. Idempotent."""
        if self._is_mapped:
            self._is_mapped = False
            _munmap(self.address, self.size)


class _MappedBytes:
    """Bytes of a file, mapped shared and writable for as long as an array of them exists; no descriptor is kept."""

    def __init__(self, descriptor: int, offset: int, size: int) -> None:
        """Map bytes of a file whose blocks are reserved; the descriptor stays open.

        Args:
            descriptor: of the file.
            offset: a multiple of the page size.
            size: at least 1.

        Raises:
            OSError: there is no address space for them.
        """
        self._size = 0
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        address: int | None = _mmap(None, size, protection, mmap.MAP_SHARED, descriptor, offset)
        if address is None or address == _FAILED:
            raise _error("mmap")
        self._address = address
        self._size = size

    @cached_property
    def __array_interface__(self) -> dict[str, object]:
        """What numpy needs to make an array, which then keeps the mapping."""
        return {
            "shape": (self._size,),
            "typestr": "|u1",
            "data": (self._address, False),
            "version": 3,
        }

    def __del__(self) -> None:
        if self._size:
            _munmap(self._address, self._size)


def map_bytes(descriptor: int, offset: int, size: int) -> NDArray[np.uint8]:
    """Return bytes of a file as an array that keeps them mapped.

    Raises:
        OSError: there is no address space for them.
    """
    return np.asarray(_MappedBytes(descriptor, offset, size), dtype=np.uint8)


def punch(descriptor: int, size: int) -> None:
    """Give the blocks of a file back although others may have it mapped: they read zeros from then on.

    Raises:
        OSError: the file system cannot do it.
    """
    if _fallocate(descriptor, _PUNCH_HOLE | _KEEP_SIZE, 0, size):
        raise _error("fallocate")


def reserve(descriptor: int, offset: int, size: int) -> None:
    """Make sure that bytes of a file that others may be writing have blocks on the disk.

    Never by `posix_fallocate`: where the file system cannot reserve, the C library reads a byte of each
    block and writes it back, over what somebody else wrote there meanwhile.

    Raises:
        OSError: there is no space, or the file has holes and the file system cannot fill them.
    """
    while size and _fallocate(descriptor, 0, offset, size):
        error = _error("fallocate")
        if (
            error.errno == errno.EINTR
        ):  # go on once the signal's handler has run, as Python's own calls do
            continue
        if error.errno in _CANNOT and os.fstat(descriptor).st_blocks * 512 >= offset + size:
            return
        raise error


def _map_aligned(descriptor: int, size: int, alignment: int) -> int:
    """Reserve more address space than is needed, map the file within it, give the rest back."""
    reserved = size + alignment
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    base: int | None = _mmap(None, reserved, 0, flags, -1, 0)
    if base is None or base == _FAILED:
        raise _error("mmap")
    address = -(-base // alignment) * alignment
    flags = mmap.MAP_SHARED | _MAP_FIXED
    if _mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0) != address:
        error = _error("mmap")
        _munmap(base, reserved)
        raise error
    end = address + -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    if address > base:
        _munmap(base, address - base)
    if base + reserved > end:
        _munmap(end, base + reserved - end)
    return address


def _error(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")
