"""The slab file holds all objects of a store in one file: segments, each with a table of what is in its slots.

A record of 64 bytes makes an object visible, after its bytes are in the file; a record that is not whole, or of an
older cut of its segment, is none. What lies in a slot is told by its frame's checksums, never by its record alone.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvlinker.errors import StoreBusyError, StoreError, StoreFormatError, StoreFullError
from kvlinker.keys import OBJECT_KEY_BYTES
from kvlinker.store import ObjectKey
from kvlinker_nixl.depots import UsedBytes
from kvlinker_nixl.space import Entry, Segment, Space, SpaceLayout, round_up

__all__ = ["RECORD_BYTES", "SlabFile", "slab_layout"]

_NAME = "objects.kvlinker-nixl"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_FORMAT = 1
_HEAD_BYTES = 4096
_SEGMENTS = 16
_BACK_BYTES = 16 << 20
"""Room is made in steps: enough that the file lies in few pieces."""
_MAGIC = int.from_bytes(b"kvlnixl1", "little")
_RECORD = np.dtype(
    [
        ("checksum", "<u8"),  # of everything behind it
        ("cut", "<u8"),  # which cut of the segment it belongs to
        ("frame_bytes", "<u8"),
        ("tick", "<u8"),
        ("key", "u1", (OBJECT_KEY_BYTES,)),
    ]
)
RECORD_BYTES = _RECORD.itemsize
_HEAD = np.dtype(
    [
        ("checksum", "<u8"),
        ("cut", "<u8"),
        ("magic", "<u8"),
        ("slot_bytes", "<u8"),
        ("boot", "u1", (16,)),  # the start of the machine that it was cut in
        ("padding", "u1", (OBJECT_KEY_BYTES - 16,)),
    ]
)
_CHECKED_FROM = 8


def slab_layout(capacity: int, alignment: int) -> SpaceLayout:
    """Return how a file of at most so many bytes is cut."""
    segment_bytes = (capacity - _HEAD_BYTES) // _SEGMENTS // 4096 * 4096
    return SpaceLayout(
        first_offset=_HEAD_BYTES,
        segment_bytes=segment_bytes,
        segments=_SEGMENTS,
        alignment=alignment,
        record_bytes=RECORD_BYTES,
    )


class SlabFile(UsedBytes):
    """The file, which one process has at a time, and its tables."""

    def __init__(
        self, folder: Path, layout: SpaceLayout, *, is_direct: bool, has_checksums: bool = True
    ) -> None:
        """Open the file of a folder, or make both.

        Args:
            folder: of the store, made with mode 0700 where it is missing.
            layout: of a new file; an old one must have it too.
            is_direct: transfers go past the page cache.
            has_checksums: payloads are checked when they are read. Otherwise nothing is taken over that was there
                before the machine started: where it lost its power, a slot may have another object's bytes.

        Raises:
            StoreBusyError: another store has it open.
            StoreFormatError: something else lies there, or a file of another layout.
            StoreFullError: there is no room for the file.
            StoreError: it cannot be read or written.
        """
        self.path = folder / _NAME
        self._layout = layout
        self._backed = [0] * layout.segments
        self._cuts = [0] * layout.segments
        self._process = os.getpid()
        self._has_checksums = has_checksums
        self._boot = _boot_number()
        self._fd = _open(folder, self.path)
        self.transfer_fd = self._fd
        """What transfers go through: a descriptor of its own where they go past the page cache."""
        self.is_direct = False
        try:
            self._lock()
            self._check_head()
            if is_direct:
                self._open_direct()
        except OSError as error:
            self.close()
            if isinstance(error, StoreError):
                raise
            raise self._failed("opening", error) from error

    def _failed(self, what: str, error: OSError) -> StoreError:
        return StoreError(f"nixl store {self.path}: {what} failed: {error.strerror or error}")

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            msg = (
                f"nixl store {self.path} is open already, and processes do not share one; "
                f"give each a path of its own, or use the store plugin 'file', which is shared"
            )
            raise StoreBusyError(msg) from None

    def _check_head(self) -> None:
        found = os.pread(self._fd, _HEAD_BYTES, 0).rstrip(b"\0")
        wanted = json.dumps(
            {
                "store": "kvlinker-nixl",
                "format": _FORMAT,
                "segments": self._layout.segments,
                "segment_bytes": self._layout.segment_bytes,
                "alignment": self._layout.alignment,
            }
        ).encode()
        if found == wanted:
            return
        if found:
            msg = (
                f"nixl store {self.path}: the file there says {found[:200]!r}, expected {wanted!r}; open it with the "
                f"capacity and direct_io that it was made with, or remove it"
            )
            raise StoreFormatError(msg)
        try:
            os.posix_fallocate(self._fd, 0, _HEAD_BYTES)
            os.pwrite(self._fd, wanted.ljust(_HEAD_BYTES, b"\0"), 0)
        except OSError as error:
            msg = f"nixl store {self.path}: there is no room for {_HEAD_BYTES} B: {error.strerror}"
            raise StoreFullError(msg) from error

    def _open_direct(self) -> None:
        """Open the file a second time past the page cache; where the file system refuses, transfers go through it."""
        try:
            self.transfer_fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
            self.is_direct = True
        except OSError:
            self.transfer_fd = self._fd

    def close(self) -> None:
        """Let another store have the file. Idempotent."""
        if self._fd >= 0 and self._process == os.getpid():
            with suppress(OSError):
                fcntl.flock(
                    self._fd, fcntl.LOCK_UN
                )  # a forked child may have the descriptor for longer
        for descriptor in {self._fd, self.transfer_fd}:
            if descriptor >= 0:
                with suppress(OSError):
                    os.close(descriptor)
        self._fd = self.transfer_fd = -1

    @property
    def used_bytes(self) -> int:
        """Bytes that the file takes on disk."""
        return os.fstat(self._fd).st_blocks * 512

    # ---- reading --------------------------------------------------------------------------------

    def load(self, space: Space) -> None:
        """Take over what the tables say into an empty space."""
        for segment in range(self._layout.segments):
            head = self._records(segment, 0, 1).view(_HEAD)[0]
            slot_bytes = int(head["slot_bytes"])
            is_cut = head["magic"] == _MAGIC and _is_whole(head)
            if not is_cut or not 0 < slot_bytes <= self._layout.longest_slot:
                continue
            if not self._has_checksums and not (
                self._boot and head["boot"].tobytes() == self._boot
            ):
                continue
            self._cuts[segment] = int(head["cut"])
            space.restore(segment, slot_bytes, self._objects(segment, slot_bytes))
        space.sort_restored()

    def _objects(self, segment: int, slot_bytes: int) -> Iterator[tuple[int, ObjectKey, int, int]]:
        records = self._records(segment, 1, self._layout.slots_of(slot_bytes))
        is_likely = (
            (records["cut"] == self._cuts[segment])
            & (records["frame_bytes"] > 0)
            & (records["frame_bytes"] <= slot_bytes)
        )
        for slot in np.flatnonzero(is_likely).tolist():
            record = records[slot]
            if _is_whole(record):
                key = record["key"].tobytes()
                yield slot, key, int(record["frame_bytes"]), int(record["tick"])

    def _records(self, segment: int, first: int, count: int) -> NDArray[np.void]:
        """Return records of a table; where the file ends, there is nothing."""
        start = self._layout.start_of(segment) + first * RECORD_BYTES
        raw = os.pread(self._fd, count * RECORD_BYTES, start)
        return np.frombuffer(raw.ljust(count * RECORD_BYTES, b"\0"), dtype=_RECORD)

    # ---- writing, as a journal --------------------------------------------------------------------

    def cut(self, segment: Segment) -> None:
        """See Journal: what the table said before is void at once, since it belongs to another cut."""
        start = self._layout.start_of(segment.number)
        self.back(segment, start + self._layout.table_bytes(segment.slots))
        cut = self._cuts[segment.number] = secrets.randbits(63) | 1
        head = np.zeros(1, dtype=_HEAD)
        head["cut"], head["magic"], head["slot_bytes"] = cut, _MAGIC, segment.slot_bytes
        head["boot"] = np.frombuffer(self._boot or bytes(16), dtype=np.uint8)
        self._write(start, head)

    def back(self, segment: Segment, end: int) -> None:
        """See Journal."""
        start = self._layout.start_of(segment.number)
        wanted, backed = round_up(end - start, 4096), self._backed[segment.number]
        if wanted <= backed:
            return
        ample = min(round_up(wanted, _BACK_BYTES), self._layout.segment_bytes)
        try:
            os.posix_fallocate(self._fd, start + backed, ample - backed)
        except OSError:
            ample = wanted
            os.posix_fallocate(self._fd, start + backed, ample - backed)
        self._backed[segment.number] = ample

    def note(self, entry: Entry) -> None:
        """See Journal."""
        record = np.zeros(1, dtype=_RECORD)
        record["cut"], record["frame_bytes"] = self._cuts[entry.segment.number], entry.frame_bytes
        record["tick"], record["key"] = entry.tick, np.frombuffer(entry.key, dtype=np.uint8)
        self._write(self._place_of(entry), record)

    def forget(self, entry: Entry) -> None:
        """See Journal."""
        with suppress(
            OSError
        ):  # the object is not found by this process, and by another one as a damaged one
            os.pwrite(self._fd, bytes(RECORD_BYTES), self._place_of(entry))

    def _place_of(self, entry: Entry) -> int:
        return self._layout.start_of(entry.segment.number) + (entry.slot + 1) * RECORD_BYTES

    def _write(self, place: int, record: NDArray[np.void]) -> None:
        record["checksum"] = _checksum(record[0])
        os.pwrite(self._fd, record.tobytes(), place)


def _boot_number() -> bytes:
    """Return what tells this start of the machine from others, 16 bytes; none where the system does not say."""
    try:
        return uuid.UUID(_BOOT.read_text().strip()).bytes
    except (OSError, ValueError):
        return b""


def _checksum(record: np.void) -> int:
    return xxhash.xxh3_64_intdigest(record.tobytes()[_CHECKED_FROM:])


def _is_whole(record: np.void) -> bool:
    return int(record["checksum"]) == _checksum(record)


def _open(folder: Path, path: Path) -> int:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists() and any(folder.iterdir()):
            msg = f"nixl store {folder}: the folder has something else in it; name an empty one, or one that is missing"
            raise StoreFormatError(msg)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        if isinstance(error, StoreError):
            raise
        msg = f"nixl store {folder}: the folder cannot be used: {error.strerror}"
        raise StoreError(msg) from error
