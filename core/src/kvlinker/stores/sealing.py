"""Sealing turns blocks of an object into frames of AES-256-GCM, each of which can be opened alone.

An object is cut into blocks of 16 KiB. The frame of a block is a salt, which is random for each object that is written,
the ciphertext, and the cipher's tag (NIST SP 800-38D). Each salt makes a key of its own from the secret, so that the
number of the block can be the nonce, however many objects there are. What is authenticated besides is the object's
key, its layout and its length: a frame opens in its own place alone.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvlinker.description import IndexArray
from kvlinker.errors import ContractError
from kvlinker.keys import digest_fields
from kvlinker.plans import PreparedPages, SpanColumns, TransferPlan

__all__ = [
    "BLOCK_BYTES",
    "FRAME_EXTRA_BYTES",
    "BlockLayout",
    "SealedObject",
    "Sealer",
    "blocks_of",
    "salt_of",
]

BLOCK_BYTES = 16 << 10
"""A range that is read alone is read with the rest of its first and last block; each block costs one call."""
_SALT_BYTES, _TAG_BYTES, _NONCE_BYTES = 16, 16, 12
FRAME_EXTRA_BYTES = _SALT_BYTES + _TAG_BYTES
_KEY_BYTES = 32
_FORM = "kvlinker.sealed/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """Where the blocks of an object lie, and their frames."""

    object_bytes: int

    @property
    def blocks(self) -> int:
        """How many there are; the last one may be shorter."""
        return -(-self.object_bytes // BLOCK_BYTES)

    @property
    def sealed_bytes(self) -> int:
        """Bytes of all frames."""
        return self.object_bytes + self.blocks * FRAME_EXTRA_BYTES

    @property
    def frame_bytes(self) -> Sequence[int]:
        """Bytes of each frame, in order."""
        places = map(self.place, range(self.blocks))
        return [last - first + FRAME_EXTRA_BYTES for first, last in places]

    def place(self, block: int) -> tuple[int, int]:
        """Return where a block begins and ends in the object."""
        return block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, self.object_bytes)

    def covering(self, plan: TransferPlan) -> IndexArray:
        """Return the blocks that a plan's ranges lie in, ascending."""
        first = plan.spans.offset // BLOCK_BYTES
        last = (plan.spans.offset + plan.range_bytes - 1) // BLOCK_BYTES
        marks = np.zeros(self.blocks + 1, dtype=np.int64)
        np.add.at(marks, first, 1)
        np.add.at(marks, last + 1, -1)
        return np.flatnonzero(np.cumsum(marks[:-1]) > 0)

    def frame_plan(self, pool: str, pages: int, blocks: IndexArray, *, base: int) -> TransferPlan:
        """Return the plan of some frames of so many objects, at addresses that must not be read.

        Args:
            pool: name of the pool.
            pages: objects; object i lies in row i.
            blocks: whose frames.
            base: address of row 0, by which the plan is known again.
        """
        begin = blocks * (BLOCK_BYTES + FRAME_EXTRA_BYTES)
        size = np.minimum(BLOCK_BYTES, self.object_bytes - blocks * BLOCK_BYTES) + FRAME_EXTRA_BYTES
        same = np.ones(len(blocks), dtype=np.int64)
        spans = SpanColumns(
            labels=tuple(f"{pool}[{block}]" for block in blocks.tolist()),
            base=base + begin,
            stride=same * self.sealed_bytes,
            row_bytes=size,
            span_rows=same * pages,
            offset=begin,
            part=same * 0,
        )
        rows = PreparedPages.of_starts(pool, np.arange(pages, dtype=np.int64), 1)
        return TransferPlan(pages=rows, spans=spans, part_bytes=(self.sealed_bytes,))


def blocks_of(plan: TransferPlan) -> list[int]:
    """Return the blocks whose frames a plan of `frame_plan` names, or a selection of one."""
    blocks: list[int] = (plan.spans.offset // (BLOCK_BYTES + FRAME_EXTRA_BYTES)).tolist()
    return blocks


class Sealer:
    """Seals and opens objects with one secret."""

    def __init__(self, secret: bytes) -> None:
        """Take a secret of 32 random bytes.

        Raises:
            ContractError: it has another length.
        """
        if len(secret) != _KEY_BYTES:
            msg = f"a secret has {_KEY_BYTES} bytes, got {len(secret)}"
            raise ContractError(msg)
        self._secret = secret
        self._name = digest_fields(_FORM, ("name",), size=16, secret=secret)

    def fingerprint(self, fingerprint: bytes) -> bytes:
        """Return the fingerprint of sealed objects of a layout: another secret has another one."""
        return digest_fields(_FORM, (fingerprint, self._name), size=16)

    def seal(self, key: bytes, fingerprint: bytes, layout: BlockLayout) -> SealedObject:
        """Return what seals a new object: with a salt that nothing else has."""
        return self.open(key, fingerprint, layout, os.urandom(_SALT_BYTES))

    def open(
        self, key: bytes, fingerprint: bytes, layout: BlockLayout, salt: bytes
    ) -> SealedObject:
        """Return what opens an object whose frames begin with a salt."""
        own = hashlib.blake2b(
            salt, digest_size=_KEY_BYTES, key=self._secret, person=b"kvlinker.sealed1"
        )
        about = digest_fields(_FORM, (key, fingerprint, layout.object_bytes), size=32)
        return SealedObject(own.digest(), salt, about, layout)


class SealedObject:
    """One object's cipher."""

    def __init__(self, key: bytes, salt: bytes, about: bytes, layout: BlockLayout) -> None:
        """Take a key that is this object's alone, and what is authenticated besides its blocks."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher = AESGCM(key)
        self.salt = salt
        """What its frames begin with."""
        self._about, self._layout = about, layout

    def frame(self, block: int, content: NDArray[np.uint8]) -> bytes:
        """Return the frame of a block."""
        sealed = self._cipher.encrypt(_nonce(block), content.data, self._about)
        return self.salt + sealed

    def content(self, block: int, frame: NDArray[np.uint8]) -> bytes | None:
        """Return the block of a frame; None where it is not what was sealed, for this object and place."""
        from cryptography.exceptions import InvalidTag

        first, last = self._layout.place(block)
        if len(frame) != last - first + FRAME_EXTRA_BYTES or salt_of(frame) != self.salt:
            return None
        try:
            return self._cipher.decrypt(_nonce(block), frame[_SALT_BYTES:].data, self._about)
        except InvalidTag:
            return None


def salt_of(frame: NDArray[np.uint8]) -> bytes:
    """Return the salt that a frame begins with."""
    return frame[:_SALT_BYTES].tobytes()


def _nonce(block: int) -> bytes:
    return block.to_bytes(_NONCE_BYTES, "little")
