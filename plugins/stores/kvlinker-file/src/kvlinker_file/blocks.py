"""Blocks are where pinned objects lie: their slots by kind, each kind as rows of one span."""

from __future__ import annotations

import logging

import numpy as np

from kvlinker.description import IndexArray
from kvlinker.errors import StoreError
from kvlinker_file.segments import SlotBlock, SlotKind
from kvlinker_file.state import StoreState

__all__ = ["blocks_of"]

_log = logging.getLogger(__name__)


def blocks_of(
    state: StoreState, rows: IndexArray
) -> tuple[list[tuple[IndexArray, SlotBlock]], IndexArray]:
    """Return the slots of pinned rows by kind, each with the positions among the rows, and those that failed.

    Rows of a segment whose file is gone are left out. Rows failed whose file could not be mapped now, such as
    for want of descriptors: that says nothing about the objects.
    """
    with state.changing():
        parts = list(state.space.segments_of(rows))
    addresses = np.zeros(len(rows), dtype=np.int64)
    kinds: dict[SlotKind, list[int]] = {}
    failed: list[int] = []
    for segment, chosen in parts:
        try:
            found = segment.addresses(rows[chosen] - segment.first_row)
        except OSError as error:
            _log.warning("%s: %s", state.options.path, error)
            if not isinstance(error, StoreError):
                state.count("disk_errors")
                failed.extend(chosen.tolist())
            continue
        addresses[chosen] = found
        kinds.setdefault(segment.kind, []).extend(chosen.tolist())
    blocks = []
    for kind, positions in kinds.items():
        order = np.sort(np.array(positions, dtype=np.int64))
        blocks.append((order, SlotBlock(kind=kind, addresses=addresses[order])))
    return blocks, np.array(failed, dtype=np.int64)
