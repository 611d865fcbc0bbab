"""A group is all device pools of one model on one rank, with the fingerprint of their layout."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from kvlinker.entries import DevicePoolEntry
from kvlinker.errors import ContractError, StalePoolError
from kvlinker.integers import as_integer
from kvlinker.keys import digest_fields
from kvlinker.plans import PoolLife
from kvlinker.spans import MemoryRegion, unique_regions
from kvlinker.transfers import (
    HitPolicy,
    PoolTransfer,
    Resolution,
    ResolutionStatus,
    as_index_array,
)

__all__ = ["KV", "DevicePoolEntry", "DevicePoolGroup"]

KV = "kv"
"""The logical pool whose pages are the prefix itself."""


class DevicePoolGroup:
    """All entries of one model on one rank; it keeps the memory's owners alive until it is closed."""

    def __init__(
        self,
        entries: Sequence[DevicePoolEntry],
        num_layers: int,
        page_size: int,
        *,
        layout: str,
        layer_range: tuple[int, int] | None = None,
        page_multiples: Mapping[str, int] | None = None,
    ) -> None:
        """Check that the entries make one group.

        Args:
            entries: in the order in which transfers resolve.
            num_layers: transfer layers of this pipeline stage; every mapped layer is below.
            page_size: slots in a page of the prefix tree.
            layout: name and version of the plugin's layout, such as `dsa/1`; it enters every key.
            layer_range: global layers [start, end) of the stage; [0, num_layers) by default.
            page_multiples: logical pool to the number of tree pages in one of its pages; 1 by default.

        Raises:
            ContractError: a repeated name, a layer out of range, or page sizes in no known relation.
        """
        self.entries = tuple(entries)
        names = [entry.name for entry in self.entries]
        if not names or len(set(names)) != len(names):
            msg = f"a group needs entries with distinct names, got {names}"
            raise ContractError(msg)
        self._what = f"group {names}"
        self._life = PoolLife(self._what)
        self.num_layers = as_integer(num_layers, f"{self._what}: num_layers", at_least=1)
        self.page_size = as_integer(page_size, f"{self._what}: page_size", at_least=1)
        self.layout = layout
        self.layer_range = self._range(layer_range or (0, self.num_layers))
        self.page_multiples: Mapping[str, int] = MappingProxyType(
            {
                pool: as_integer(multiple, f"{self._what}: page multiple of {pool!r}", at_least=1)
                for pool, multiple in (page_multiples or {}).items()
            }
        )
        if not layout:
            msg = f"{self._what}: needs a layout with its version, such as dsa/1"
            raise ContractError(msg)
        for entry in self.entries:
            self._check_entry(entry)
        self.entry_map: Mapping[str, DevicePoolEntry] = MappingProxyType(
            {entry.name: entry for entry in self.entries}
        )
        self.sources: Mapping[str, str] = MappingProxyType(
            {entry.name: entry.indices_from_pool for entry in self.entries}
        )
        self._keeping = threading.RLock()
        self._regions: tuple[MemoryRegion, ...] | None = (
            None  # made when asked for, kept until given up
        )
        self.fingerprint = self._digest()
        """16 bytes that change with anything that determines the bytes of an object."""

    def _range(self, layers: tuple[int, int]) -> tuple[int, int]:
        start = as_integer(layers[0], f"{self._what}: first global layer", at_least=0)
        end = as_integer(layers[1], f"{self._what}: end of global layers", at_least=start + 1)
        return start, end

    def _check_entry(self, entry: DevicePoolEntry) -> None:
        if outside := [layer for layer in entry.layer_mapping if layer >= self.num_layers]:
            msg = f"pool {entry.name!r}: layer {outside[0]} is outside of the group's 0..{self.num_layers - 1}"
            raise ContractError(msg)
        multiple = self.page_multiples.get(entry.indices_from_pool, 1)
        is_slot_pool = entry.page_size == 1 and entry.indices_from_pool != KV
        if entry.page_size != self.page_size * multiple and not is_slot_pool:
            msg = (
                f"pool {entry.name!r}: page size {entry.page_size} does not fit the group's {self.page_size} "
                f"(times {multiple}); make them equal, or state the multiple in page_multiples"
            )
            raise ContractError(msg)

    def _digest(self) -> bytes:
        fields = (
            self.layout,
            self.num_layers,
            self.page_size,
            tuple(sorted(self.page_multiples.items())),
            tuple(
                entry.layout_fields()
                for entry in sorted(self.entries, key=lambda entry: entry.name)
            ),
        )
        return digest_fields("kvlinker.layout/1", fields, size=16)

    @property
    def rank_replicated(self) -> bool:
        """Whether every entry is the same on all ranks."""
        return all(entry.replicated for entry in self.entries)

    @property
    def regions(self) -> tuple[MemoryRegion, ...]:
        """The distinct allocations behind all entries, for stores that register memory.

        Raises StalePoolError once the memory was given up.
        """
        for entry in self.entries:
            entry.check_live()
        if (known := self._regions) is not None:
            return known
        with self._keeping:
            self.check_live()
            self._regions = unique_regions(span for entry in self.entries for span in entry.spans)
            return self._regions

    # ---- transfers ----------------------------------------------------------------------------

    def resolve_transfers(
        self,
        transfers: Iterable[PoolTransfer],
        *,
        allow_partial: bool = False,
        allow_missing_kv: bool = False,
    ) -> Resolution:
        """Expand an engine's logical transfers to physical ones, in entry order.

        Slots are translated here, once. Entries fed from `kv` always get ALL_PAGES, whatever the
        transfer says: a hole in the prefix itself cannot be restored around. A transfer for a pool that
        no entry takes is named in `unused`: a stage may hold none of its layers, and even `kv` may have
        no storage of its own.

        Args:
            transfers: at most one per logical pool; lookups carry keys alone.
            allow_partial: resolve the pools that are there when others are absent.
            allow_missing_kv: go on without a `kv` transfer.

        Raises:
            ContractError: two transfers of one pool, or key and page counts that differ.
            StalePoolError: the memory was given up.
        """
        self.check_live()
        by_name = self._by_name(transfers)
        needed = tuple(dict.fromkeys((*self.sources.values(), KV)))
        missing = tuple(name for name in needed if name not in by_name)
        absent = tuple(name for name in missing if name in self.sources.values())
        unused = tuple(name for name in by_name if name not in self.sources.values())
        if not by_name:
            return Resolution((), ResolutionStatus.EMPTY, missing)
        if KV in missing and not allow_missing_kv:
            return Resolution((), ResolutionStatus.MISSING_KV, missing)
        if absent and not allow_partial:
            return Resolution((), ResolutionStatus.MISSING_POOLS, missing)
        resolved = tuple(
            self._resolve(entry, by_name[entry.indices_from_pool])
            for entry in self.entries
            if entry.indices_from_pool in by_name
        )
        status = ResolutionStatus.PARTIAL if absent else ResolutionStatus.COMPLETE
        return Resolution(resolved, status, missing, unused)

    def _by_name(self, transfers: Iterable[PoolTransfer]) -> dict[str, PoolTransfer]:
        by_name: dict[str, PoolTransfer] = {}
        for transfer in transfers:
            if transfer.name in by_name:
                msg = f"pool {transfer.name!r}: two transfers for one logical pool; merge them"
                raise ContractError(msg)
            by_name[transfer.name] = transfer
            if not transfer.keys and transfer.device_indices is not None:
                slots = as_index_array(transfer.device_indices, pool=transfer.name)
                if len(slots):
                    msg = f"pool {transfer.name!r}: 0 keys do not fit {len(slots)} slots; pass one key per page"
                    raise ContractError(msg)
        return {name: transfer for name, transfer in by_name.items() if transfer.keys}

    def _resolve(self, entry: DevicePoolEntry, source: PoolTransfer) -> PoolTransfer:
        slots = None
        if source.device_indices is not None:
            slots = entry.translate_indices(source.device_indices)
            if len(slots) != len(source.keys) * entry.page_size:
                msg = (
                    f"pool {entry.name!r}: {len(source.keys)} keys do not fit {len(slots)} slots "
                    f"of pages of {entry.page_size}; pass one key per page"
                )
                raise ContractError(msg)
        policy = HitPolicy.ALL_PAGES if source.name == KV else source.hit_policy
        return replace(source, name=entry.name, device_indices=slots, hit_policy=policy)

    # ---- life time ----------------------------------------------------------------------------

    def check_live(self) -> None:
        """Do nothing while the memory may be used.

        Raises:
            StalePoolError: a buffer moved or the group was closed.
        """
        self._life.check()

    def verify(self) -> None:
        """Compare current addresses with the planned ones where owners are tensors.

        Raises:
            StalePoolError: a buffer moved; the whole group is unusable from here on.
        """
        self.check_live()
        for entry in self.entries:
            try:
                entry.verify()
            except StalePoolError:
                self._retire(f"a buffer of pool {entry.name!r} moved")
                raise

    def close(self) -> None:
        """Let go of the memory; every later use raises StalePoolError. Idempotent."""
        self._retire("the group was closed")

    def _retire(self, reason: str) -> None:
        self._life.end(reason)
        with self._keeping:
            self._regions = None
        for entry in self.entries:
            entry.retire(reason)
