"""Files are mapped where slots of several of them are rows of one span, and what the kernel refuses is an error."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from kvlinker.errors import StoreError
from kvlinker_file import mapping as mapping_module
from kvlinker_file.mapping import FileMapping, reserve
from kvlinker_file.segments import Segment, SlotBlock, SlotKind

PAGE = mmap.PAGESIZE


def make_file(path: Path, size: int) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.posix_fallocate(descriptor, 0, size)
    return descriptor


def mappings_of(path: Path) -> list[str]:
    lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    return [line for line in lines if str(path) in line]


@pytest.mark.parametrize("pages", [1, 3, 7, 64])
def test_a_file_is_mapped_at_a_multiple_and_takes_no_more_addresses(
    tmp_path: Path, pages: int
) -> None:
    size, alignment = 5 * PAGE, pages * PAGE
    made = [
        FileMapping(make_file(tmp_path / str(i), size), size, alignment=alignment) for i in range(4)
    ]

    for i, mapping in enumerate(made):
        assert mapping.address % alignment == 0
        (line,) = mappings_of(tmp_path / str(i))
        start, _, end = line.split()[0].partition("-")
        assert (int(start, 16), int(end, 16)) == (mapping.address, mapping.address + size)
        ctypes.memset(mapping.address, i + 1, size)
        mapping.sync()
        assert (tmp_path / str(i)).read_bytes() == bytes([i + 1]) * size
        mapping.close()
        mapping.close()
        assert mappings_of(tmp_path / str(i)) == []


def test_slots_of_several_files_are_rows_of_one_span(tmp_path: Path) -> None:
    kind = SlotKind(payload_bytes=1000, ranges=2)
    segments = [
        Segment(
            number=i,
            open_file=lambda number, size: make_file(tmp_path / str(number), size),
            file_bytes=4 * PAGE,
            kind=kind,
            slots=kind.slots_in(4 * PAGE),
        )
        for i in range(3)
    ]
    chosen = [segment.addresses(np.arange(3)) for segment in segments]
    block = SlotBlock(kind=kind, addresses=np.concatenate(chosen)[::-1])

    host = block.objects
    starts = host.span.base_ptr + host.slots * host.span.row_stride

    assert (starts == block.addresses + kind.header_bytes).all()
    assert (host.slots < host.span.rows).all()
    headers = np.random.default_rng(0).integers(0, 255, (9, kind.header_bytes), dtype=np.uint8)
    block.write_headers(headers)
    assert (block.read_headers() == headers).all()
    assert block.select(slice(0, 0)).read_headers().shape == (0, kind.header_bytes)
    for segment in segments:
        segment.close()


def test_a_file_that_cannot_be_mapped_is_an_error_and_no_address_is_lost(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(PAGE))
    before = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").count("---p")

    with pytest.raises(OSError, match="mmap") as caught:
        FileMapping(os.open(tmp_path / "file", os.O_RDONLY), PAGE, alignment=PAGE)
    with pytest.raises(OSError, match="mmap") as too_large:
        FileMapping(os.open(tmp_path / "file", os.O_RDWR), PAGE, alignment=1 << 60)

    assert (caught.value.errno, too_large.value.errno) == (errno.EACCES, errno.ENOMEM)
    after = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").count("---p")
    assert after <= before


def test_pages_that_the_disk_cannot_give_are_an_error_and_no_signal(tmp_path: Path) -> None:
    mapping = FileMapping(make_file(tmp_path / "file", 4 * PAGE), 4 * PAGE, alignment=PAGE)
    mapping.populate(0, 4 * PAGE)
    os.truncate(tmp_path / "file", PAGE)

    mapping.populate(0, PAGE)
    with pytest.raises(StoreError, match=r"the disk cannot give bytes \[4096, 16384\)"):
        mapping.populate(PAGE, 4 * PAGE)

    mapping.close()
    with pytest.raises(OSError, match="msync"):
        mapping.sync()


def test_reserving_goes_on_behind_a_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reserve_now, signals = mapping_module._fallocate, [errno.EINTR, errno.EINTR]  # noqa: SLF001  # the C library's

    def interrupted(*arguments: int) -> int:
        if signals:
            ctypes.set_errno(signals.pop())
            return -1
        return int(reserve_now(*arguments))

    monkeypatch.setattr(mapping_module, "_fallocate", interrupted)
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)

    reserve(descriptor, 0, 5 * PAGE)

    assert os.fstat(descriptor).st_blocks * 512 >= 5 * PAGE
    assert signals == []
    os.close(descriptor)
