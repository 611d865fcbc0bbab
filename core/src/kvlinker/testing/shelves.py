"""A shelf is a pool with pages whose bytes follow from their keys, beside a store to move them to and from.

Every read is checked: pages that are reported as right must be, and no other byte may change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from kvlinker.device import DeviceAccess
from kvlinker.entries import DevicePoolEntry
from kvlinker.keys import KeyBuilder, KeyNamespace, digest_fields
from kvlinker.plans import TransferPlan
from kvlinker.pools import KV, DevicePoolGroup
from kvlinker.store import (
    ObjectKey,
    ReadRequest,
    ReadSession,
    ReadStatus,
    Store,
    WriteBatch,
    WriteStatus,
)
from kvlinker.testing.patterns import PagePattern, page_keys
from kvlinker.testing.pool_memory import HostMemory, OpaqueMemory, PoolMemory
from kvlinker.testing.pools import FakePools
from kvlinker.testing.strategies import MadeUpMemory
from kvlinker.testing.verdicts import fail

__all__ = ["LAYERS", "Shelf", "allow", "made_up_batch", "object_keys", "shelves_of"]

LAYERS = 4
"""Layers of a shelf's pool; a page is one range of K and one of V in each."""
_PAGE_SIZE = 4
_RANGES = 2 * LAYERS
_SOURCE_PAGES = 32
_FINGERPRINT = b"kvlinker kit/1\0\0"


def allow() -> bool:
    """Give the permission to publish."""
    return True


def object_keys(count: int, *, model: str = "kit", chain: str = "prompt") -> tuple[ObjectKey, ...]:
    """Return object keys of chained pages; another model is another namespace."""
    builder = KeyBuilder(
        KeyNamespace(model_id=model, producer="kvlinker.testing"),
        fingerprint=digest_fields("kvlinker.testing/1", (_RANGES,), size=16),
        layer_range=(0, LAYERS),
        pool=KV,
    )
    return builder.object_keys(page_keys(count, chain=chain))


def made_up_batch(keys: Sequence[ObjectKey], *, page_bytes: int) -> WriteBatch:
    """Return a batch of objects of any length at addresses that must not be read."""
    span = MadeUpMemory().span(len(keys), page_bytes)
    entry = DevicePoolEntry(
        name=KV,
        indices_from_pool=KV,
        components=[[span]],
        layer_mapping={0: 0},
        page_size=1,
        rows_are_pages=True,
    )
    plan = entry.page_plan(entry.prepare_locations(range(len(keys))))
    return WriteBatch(keys=tuple(keys), plan=plan, fingerprint=_FINGERPRINT)


class Shelf:
    """A pool, and the store under test; 32 pages to write from, and as many to read into."""

    def __init__(
        self,
        store: Store,
        *,
        page_bytes: int = 640,
        seed: bytes = b"",
        fingerprint: bytes = _FINGERPRINT,
        others: Sequence[Shelf] = (),
    ) -> None:
        """Make the pool, and register its memory where the store wants that.

        The memory can be dereferenced by those stores alone that move device memory themselves.

        Args:
            store: the store under test.
            page_bytes: bytes of one object, a multiple of 32.
            seed: of what pages hold; another seed, other bytes under the same keys.
            fingerprint: of the layout, which stores with headers keep.
            others: shelves on the same store, whose memory stays registered.
        """
        self.store = store
        self.page_bytes = page_bytes
        self._fingerprint = fingerprint
        reaches = store.capabilities.device_memory
        memory = HostMemory() if reaches else OpaqueMemory(staging_bytes=max(65536, page_bytes))
        self.pools = _pools(memory, page_bytes, PagePattern(seed=seed))
        self.entry = self.pools.group.entries[0]
        self.access: DeviceAccess = self.pools.access()
        self._others = tuple(others)
        if store.capabilities.registers_memory:
            store.unregister()
            shelves = (*others, self)
            store.register([r for shelf in shelves for r in shelf.pools.group.regions])

    def beside(
        self,
        *,
        page_bytes: int | None = None,
        seed: bytes = b"",
        fingerprint: bytes = _FINGERPRINT,
    ) -> Shelf:
        """Return another shelf on the same store; arguments as for a new one."""
        return Shelf(
            self.store,
            page_bytes=page_bytes or self.page_bytes,
            seed=seed,
            fingerprint=fingerprint,
            others=(*self._others, self),
        )

    @property
    def fingerprint(self) -> bytes:
        """The layout's, which stores with headers keep."""
        return self._fingerprint

    # ---- pages --------------------------------------------------------------------------------

    def plan(self, pages: Sequence[int]) -> TransferPlan:
        """Return the plan of whole pages."""
        return self.entry.page_plan(self.entry.prepare_locations(self.pools.slots(KV, pages)))

    def layer_plan(self, pages: Sequence[int], layer: int) -> TransferPlan:
        """Return the plan of one layer of some pages."""
        locations = self.entry.prepare_locations(self.pools.slots(KV, pages))
        plan = self.entry.layer_plan(locations, layer)
        if plan is None:
            fail(f"layer {layer} is none of {LAYERS}")
        return plan

    def payload(self, key: ObjectKey) -> bytes:
        """Return the bytes that the object of a key has."""
        size = self.page_bytes // _RANGES
        return b"".join(
            self.pools.pattern.content(pool=KV, label=span.label, page_key=key, size=size)
            for span in self.entry.spans
        )

    # ---- writing ------------------------------------------------------------------------------

    def batch(self, keys: Sequence[ObjectKey], *, first_page: int = 0) -> WriteBatch:
        """Fill pages with what the keys stand for, and return the batch that writes them."""
        pages = range(first_page, first_page + len(keys))
        self.pools.fill(self.pools.page_transfers(keys, {KV: pages}))
        return WriteBatch(keys=tuple(keys), plan=self.plan(pages), fingerprint=self._fingerprint)

    def write(
        self,
        keys: Sequence[ObjectKey],
        *,
        memory: DeviceAccess | None = None,
        may_publish: Callable[[], bool] = allow,
        first_page: int = 0,
    ) -> tuple[WriteStatus, ...]:
        """Write one batch of objects, at most 32, and return their statuses."""
        batches = [self.batch(keys, first_page=first_page)]
        return self.store.write(batches, memory or self.access, may_publish=may_publish)[0]

    def stock(self, keys: Sequence[ObjectKey]) -> None:
        """Write objects that must be stored afterwards."""
        statuses = self.write(keys)
        if not all(status.is_stored for status in statuses):
            fail(
                f"{len(keys)} objects of {self.page_bytes} B should fit in a fresh store, write answered {statuses}"
            )

    # ---- reading ------------------------------------------------------------------------------

    def request(self, keys: Sequence[ObjectKey]) -> ReadRequest:
        """Return the request for the objects of some keys."""
        return ReadRequest(
            keys=tuple(keys), object_bytes=self.page_bytes, fingerprint=self._fingerprint
        )

    def open(self, keys: Sequence[ObjectKey]) -> ReadSession:
        """Open a session over the objects of some keys."""
        return self.store.open_read(self.request(keys))

    def read(
        self,
        keys: Sequence[ObjectKey],
        *,
        session: ReadSession | None = None,
        layer: int | None = None,
        memory: DeviceAccess | None = None,
    ) -> tuple[ReadStatus, ...]:
        """Read into pages that hold 0xFF, check every byte, and return the statuses.

        Whole objects where the store reads them, else layer by layer.

        Args:
            keys: what to read, at most 32.
            session: an open one over these keys; a new one by default.
            layer: read this layer alone.
            memory: instead of the shelf's own access.

        Raises:
            AssertionError: a page that is OK is not right, or another byte changed.
        """
        if session is None:
            with self.open(keys) as opened:
                return self.read(keys, session=opened, layer=layer, memory=memory)
        pages = range(_SOURCE_PAGES, _SOURCE_PAGES + len(keys))
        self.pools.memory.poison()
        statuses = self._read_into(session, pages, layer, memory or self.access)
        self._check(keys, pages, statuses, [layer] if layer is not None else range(LAYERS))
        return statuses

    def _read_into(
        self, session: ReadSession, pages: Sequence[int], layer: int | None, memory: DeviceAccess
    ) -> tuple[ReadStatus, ...]:
        if layer is not None:
            return session.read(self.layer_plan(pages, layer), memory)
        if self.store.capabilities.whole_reads:
            return session.read(self.plan(pages), memory)
        answers = [session.read(self.layer_plan(pages, one), memory) for one in range(LAYERS)]
        return tuple(map(_worst, zip(*answers, strict=True)))

    def _check(
        self,
        keys: Sequence[ObjectKey],
        pages: Sequence[int],
        statuses: Sequence[ReadStatus],
        layers: Sequence[int],
    ) -> None:
        if len(statuses) != len(keys):
            fail(f"read of {len(keys)} objects answered {len(statuses)} statuses; answer one each")
        good = [i for i, status in enumerate(statuses) if status is ReadStatus.OK]
        left = [pages[i] for i in range(len(keys)) if i not in good]
        memory = self.pools.memory
        found = memory.snapshot()
        # What a page holds that is not OK is nobody's business: the engine computes it anew.
        rows = [
            (span, row) for span in self.entry.spans for row in self.pools.slots(KV, left).tolist()
        ]
        rest = [memory.read(span, row) for span, row in rows]
        memory.poison()
        right = self.pools.page_transfers([keys[i] for i in good], {KV: [pages[i] for i in good]})
        self.pools.fill(right, layers=layers)
        for (span, row), content in zip(rows, rest, strict=True):
            memory.write(span, row, content)
        if wrong := [label for label, data in memory.snapshot().items() if data != found[label]]:
            fail(
                f"a read that answered {[status.value for status in statuses]} left wrong bytes in {wrong}: objects "
                f"that are OK must be whole and right, and no byte outside of their pages may change"
            )


def shelves_of(store: Store, sizes: Iterable[int]) -> Iterator[Shelf]:
    """Yield a shelf for each number of bytes a page, beside those before it.

    One after the other, so that a store that registers memory knows all of it.
    """
    shelf: Shelf | None = None
    for size in sizes:
        shelf = Shelf(store, page_bytes=size) if shelf is None else shelf.beside(page_bytes=size)
        yield shelf


def _worst(statuses: Sequence[ReadStatus]) -> ReadStatus:
    return next((status for status in statuses if status is not ReadStatus.OK), ReadStatus.OK)


def _pools(memory: PoolMemory, page_bytes: int, pattern: PagePattern) -> FakePools:
    pages = 2 * _SOURCE_PAGES
    row_bytes, rest = divmod(page_bytes, _RANGES * _PAGE_SIZE)
    if rest or not row_bytes:
        fail(f"page_bytes must be a multiple of {_RANGES * _PAGE_SIZE}, got {page_bytes}")
    components = [
        [
            memory.allocate(pages * _PAGE_SIZE, row_bytes, label=f"{role}[{i}]")
            for i in range(LAYERS)
        ]
        for role in ("k", "v")
    ]
    entry = DevicePoolEntry(
        name=KV,
        indices_from_pool=KV,
        components=components,
        layer_mapping={layer: layer for layer in range(LAYERS)},
        page_size=_PAGE_SIZE,
        rows_are_pages=False,
    )
    group = DevicePoolGroup([entry], LAYERS, _PAGE_SIZE, layout="kit/1")
    return FakePools(group, memory, pages=pages, windows={}, pattern=pattern)
