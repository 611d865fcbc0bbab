"""A network namespace of the tests' own: Mooncake's clients listen on every interface, whatever is configured."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["NetworkNamespace"]

_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS = 0x8914
_IFF_UP_RUNNING = 0x1 | 0x40
_OWN = "/proc/thread-self/ns/net"


class NetworkNamespace:
    """A namespace with nothing but loopback; threads and processes that are begun inside stay there."""

    def __init__(self) -> None:
        """Make one.

        Raises:
            PermissionError: that needs root.
        """
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._file = -1
        self._errors: list[OSError] = []
        maker = threading.Thread(target=self._make)
        maker.start()
        maker.join()
        if self._errors:
            raise self._errors[0]

    def _make(self) -> None:
        try:
            self._check(self._libc.unshare(_CLONE_NEWNET))
            with socket.socket() as control:
                request = struct.pack("16sh14x", b"lo", _IFF_UP_RUNNING)
                fcntl.ioctl(control, _SIOCSIFFLAGS, request)
            self._file = os.open(_OWN, os.O_RDONLY)
        except OSError as error:
            self._errors.append(error)

    def _check(self, result: int) -> None:
        if result:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Let this thread, and what it begins, be inside for the length of a block."""
        before = os.open(_OWN, os.O_RDONLY)
        try:
            self._check(self._libc.setns(self._file, _CLONE_NEWNET))
            try:
                yield
            finally:
                self._check(self._libc.setns(before, _CLONE_NEWNET))
        finally:
            os.close(before)

    def close(self) -> None:
        """Let it go when nobody is inside any more."""
        os.close(self._file)
