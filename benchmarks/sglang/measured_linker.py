"""A linker around several, in the engine's process: they take turns, and what each takes is noted.

The id of a request says whose turn it is. Nobody else is asked until the next request comes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from linker_events import Event, RequestName, What
from page_files import FILES, PageFilesLinker, Parameters
from pydantic import BaseModel
from sglang.srt.mem_cache.hicache_storage import PoolName  # noqa: TID253  # the engine alone loads this module
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import (  # noqa: TID253  # likewise
    UnifiedCacheLinker,
)

from kvlinker_sglang import KVLinker
from kvlinker_sglang.transfers import EngineTransfer

__all__ = ["MeasuredLinker"]

_WATCH_SECONDS = 0.0002


class _LayerCounter(Protocol):
    def set_consumer(self, index: int) -> None: ...
    def wait_until(self, threshold: int) -> None: ...


class _Linker(Protocol):
    """What SGLang asks of a linker."""

    @property
    def layer_done_counter(self) -> _LayerCounter: ...
    def lookup(self, rid: str, transfers: list[EngineTransfer]) -> list[int]: ...
    def load(self, rid: str, transfers: list[EngineTransfer]) -> bool: ...
    def start_layer_wise_loading(self) -> int: ...
    def finish_layer_wise_loading(self, counter_index: int) -> bool: ...
    def cancel_queued_load(self, rid: str) -> bool: ...
    def offload(self, transfers: list[EngineTransfer], session_id: str | None = None) -> bool: ...
    def num_completed_offloads(self) -> int: ...
    def pop_completed_offload(self) -> bool: ...
    def reset(self) -> None: ...
    def close(self) -> None: ...


class _Variant(BaseModel):
    """A linker."""

    files: str | None = None
    """Kind of a file for each page; None for kvlinker."""
    folder: Path


class _Options(BaseModel):
    """`linker_extra_config`."""

    events: Path
    """File that events are appended to."""
    capacity: int
    """Bytes of kvlinker's store."""
    variants: dict[str, _Variant]


class _Nobody:
    """A linker for requests that have none: it knows nothing and takes nothing."""

    def lookup(self, rid: str, transfers: list[EngineTransfer]) -> list[int]:
        del rid, transfers
        return []

    def load(self, rid: str, transfers: list[EngineTransfer]) -> bool:
        del rid, transfers
        return False

    def start_layer_wise_loading(self) -> int:
        return -1

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return counter_index < 0

    def cancel_queued_load(self, rid: str) -> bool:
        del rid
        return False

    def offload(self, transfers: list[EngineTransfer], session_id: str | None = None) -> bool:
        del transfers, session_id
        return False

    def num_completed_offloads(self) -> int:
        return 0

    def pop_completed_offload(self) -> bool:
        return False

    def reset(self) -> None:
        pass

    def close(self) -> None:
        pass

    @property
    def layer_done_counter(self) -> _LayerCounter:
        return self

    def set_consumer(self, index: int) -> None:
        del index

    def wait_until(self, threshold: int) -> None:
        del threshold


@dataclass(slots=True)
class _Seat:
    """A linker, and how many of its offloads it was asked for and gave back."""

    linker: _Linker
    offers: int = 0
    taken: int = 0

    def has_ended(self, number: int) -> bool:
        """Say whether the first `number` offloads have ended."""
        return self.taken + self.linker.num_completed_offloads() >= number


class MeasuredLinker(UnifiedCacheLinker):  # type: ignore[misc, no-any-unimported]  # SGLang is untyped where it is not installed
    """Passes everything on to whose turn it is; is its own layer counter, since SGLang asks for that only once."""

    def __init__(
        self,
        server_args: object,
        params: Parameters,
        *,
        components: object,
        extra_config: object,
        forward_stream: object,
    ) -> None:
        """Make the linkers that the options name."""
        options = _Options.model_validate(extra_config)
        self._seats: dict[str, _Seat] = {}
        for name, variant in options.variants.items():
            linker: _Linker
            if variant.files is not None:
                linker = PageFilesLinker(params, FILES[variant.files](variant.folder))
            else:
                linker = KVLinker(
                    server_args,
                    params,
                    components=components,
                    extra_config=_kvlinker_config(variant, options.capacity),
                    forward_stream=forward_stream,
                )
            self._seats[name] = _Seat(linker)
        self._nobody = _Seat(_Nobody())
        self._now = self._nobody
        self._is_alone = False
        self.layer_done_counter = self
        self.pools: Mapping[object, object] = {
            PoolName.KV: params.token_to_kv_pool_allocator.get_kvcache()
        }
        self._events = options.events.open("a", buffering=1, encoding="utf-8")
        self._load_seconds, self._load_pages = 0.0, 0
        self._landed: dict[int, bool] = {}

    # ---- loads --------------------------------------------------------------------------------

    def lookup(self, rid: str, transfers: list[EngineTransfer]) -> list[int]:
        """See UnifiedCacheLinker; a request begins with this."""
        request = RequestName.parse(rid)
        self._now = self._seats.get(request.variant, self._nobody)
        self._is_alone = request.is_alone
        start = time.perf_counter()
        found = self._now.linker.lookup(rid, transfers)
        self._note(What.LOOKUP, time.perf_counter() - start, _pages(transfers))
        return found

    def load(self, rid: str, transfers: list[EngineTransfer]) -> bool:
        """See UnifiedCacheLinker."""
        start = time.perf_counter()
        queued = self._now.linker.load(rid, transfers)
        self._load_seconds += time.perf_counter() - start
        self._load_pages += _pages(transfers)
        return queued

    def start_layer_wise_loading(self) -> int:
        """See UnifiedCacheLinker."""
        start = time.perf_counter()
        index = self._now.linker.start_layer_wise_loading()
        if self._is_alone and index >= 0:
            landed = self._landed[index] = self._now.linker.finish_layer_wise_loading(index)
            seconds = self._load_seconds + time.perf_counter() - start
            self._note(What.LOAD, seconds, self._load_pages, is_ok=landed)
        self._load_seconds, self._load_pages = 0.0, 0
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """See UnifiedCacheLinker."""
        if counter_index in self._landed:
            return self._landed.pop(counter_index)
        return self._now.linker.finish_layer_wise_loading(counter_index)

    def cancel_queued_load(self, rid: str) -> bool:
        """See UnifiedCacheLinker."""
        return self._now.linker.cancel_queued_load(rid)

    def set_consumer(self, index: int) -> None:
        """See LayerWiseLoadCounter."""
        self._now.linker.layer_done_counter.set_consumer(index)

    def wait_until(self, threshold: int) -> None:
        """See LayerWiseLoadCounter."""
        self._now.linker.layer_done_counter.wait_until(threshold)

    # ---- offloads -----------------------------------------------------------------------------

    def offload(self, transfers: list[EngineTransfer], session_id: str | None = None) -> bool:
        """See UnifiedCacheLinker."""
        start = time.perf_counter()
        taken = self._now.linker.offload(transfers, session_id)
        if taken:
            self._now.offers += 1
            pages = _pages(transfers)
            self._note(What.OFFER, time.perf_counter() - start, pages)
            end = (self._now, self._now.offers, start, pages)
            threading.Thread(target=self._await_offload, args=end, daemon=True).start()
        return taken

    def _await_offload(self, seat: _Seat, number: int, start: float, pages: int) -> None:
        """Note the end of an offload when it comes: an idle scheduler sleeps, and asks late."""
        while not seat.has_ended(number):
            time.sleep(_WATCH_SECONDS)
        self._note(What.OFFLOAD, time.perf_counter() - start, pages)

    def num_completed_offloads(self) -> int:
        """See UnifiedCacheLinker."""
        return self._now.linker.num_completed_offloads()

    def pop_completed_offload(self) -> bool:
        """See UnifiedCacheLinker."""
        stored = self._now.linker.pop_completed_offload()
        self._now.taken += 1
        if not stored:
            self._note(What.LOST, 0.0, 0, is_ok=False)
        return stored

    # ---- life cycle ---------------------------------------------------------------------------

    def reset(self) -> None:
        """See UnifiedCacheLinker."""
        for seat in self._seats.values():
            seat.linker.reset()
            seat.taken = seat.offers
        self._landed.clear()

    def close(self) -> None:
        """See UnifiedCacheLinker."""
        for seat in self._seats.values():
            seat.linker.close()

    def _note(self, what: What, seconds: float, pages: int, *, is_ok: bool = True) -> None:
        event = Event(what=what, seconds=seconds, pages=pages, is_ok=is_ok)
        self._events.write(event.model_dump_json() + "\n")


def _kvlinker_config(variant: _Variant, capacity: int) -> dict[str, object]:
    store = {"path": str(variant.folder), "capacity": capacity}
    return {"store": {"plugin": "file", "options": store}, "min_hit_tokens": 1}


def _pages(transfers: list[EngineTransfer]) -> int:
    return sum(len(transfer.keys or ()) for transfer in transfers)
