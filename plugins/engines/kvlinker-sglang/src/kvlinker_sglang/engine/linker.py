"""The linker of one SGLang worker: SGLang's calls in the core's words, and the core's answers back."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar, runtime_checkable

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from kvlinker.device import DeviceEvent
from kvlinker.entries import DevicePoolEntry
from kvlinker.keys import KeyNamespace, digest_fields
from kvlinker.metrics import LinkerMetrics, TokenOutcome
from kvlinker.pools import KV
from kvlinker.transfers import PoolTransfer
from kvlinker_sglang.compatibility import check_host, refuse_differences
from kvlinker_sglang.engine.host import (
    check_arguments,
    engine_weights_version,
    installed_host,
    model_facts,
)
from kvlinker_sglang.engine.launch import launch_name
from kvlinker_sglang.engine.parameters import (
    WorkerParameters,
    describe_request,
    place_of,
)
from kvlinker_sglang.engine.weight_updates import watch_weight_updates
from kvlinker_sglang.identity import make_namespace
from kvlinker_sglang.options import parse_config
from kvlinker_sglang.page_keys import check_page_keys
from kvlinker_sglang.transfers import EngineTransfer, core_transfers
from kvlinker_sglang.weights import WeightsWatch
from kvlinker_sglang.worker import Worker

__all__ = ["KVLinker"]

logger = logging.getLogger(__name__)

_DIGEST_BYTES = 12
_WEIGHTS = "weights"
"""Stands for a pool where lookups miss because weights are being replaced."""
_T = TypeVar("_T")


@runtime_checkable
class _WaitsForStates(Protocol):
    """SGLang's `HybridReqToTokenPool`: a forward asks it, and not the pool of pages, for a layer's state."""

    def register_layer_transfer_counter(self, layer_transfer_counter: object) -> None: ...


class KVLinker(UnifiedCacheLinker):  # type: ignore[misc, no-any-unimported]  # SGLang is untyped where it is not installed
    """Links the pools of one worker to a store; `--unified-cache-external-linker-config` names this class."""

    def __init__(
        self,
        server_args: object,
        params: WorkerParameters,
        *,
        components: object,
        extra_config: object = None,
        forward_stream: object = None,
        **unknown: object,
    ) -> None:
        """Check the installed SGLang, open the store and link the worker's pools.

        Raises:
            KVLinkerError: the configuration, this SGLang, the pools or the store do not fit; the server ends.
        """
        del server_args, components  # the runtime context has the arguments as they were resolved
        self.forward_stream = forward_stream
        config = parse_config(extra_config)
        host = installed_host()
        check_host(host)
        if unknown:
            refuse_differences(host.version, [f"a linker is given {name}" for name in unknown])
        check_page_keys(host)
        check_arguments()
        launch = launch_name(params.tp_cache_group)
        namespace = make_namespace(config.namespace, model_facts(), launch=launch)
        self._worker = Worker(
            params.token_to_kv_pool_allocator.get_kvcache(),
            describe_request(params),
            config,
            namespace,
            place_of(params),
        )
        self._linker = self._worker.linker
        self.layer_done_counter = self._linker.layer_done_counter
        self.pools = _pools(self._linker.group.entries)
        if PoolName.MAMBA in self.pools and isinstance(params.req_to_token_pool, _WaitsForStates):
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        self.weights = WeightsWatch(
            namespace,
            launch=launch,
            engine_version=engine_weights_version,
            updates_are_unique=config.namespace.updates_are_unique,
        )
        self._has_warned = False
        watch_weight_updates()
        _log_namespace(namespace)

    @property
    def metrics(self) -> LinkerMetrics:
        """What the worker counted."""
        return self._linker.metrics

    @property
    def pending(self) -> int:
        """Lookups, loads and offloads that are open."""
        return self._linker.pending

    # ---- loads --------------------------------------------------------------------------------

    def lookup(self, rid: str, transfers: list[EngineTransfer]) -> list[int]:
        """Return every prefix length in pages that is restorable; see `kvlinker.linker.Linker.lookup`."""

        def ask() -> list[int]:
            asked = core_transfers(transfers)
            if self._declines("lookups"):
                self._miss(asked)
                return []
            return self._linker.lookup(rid, asked)

        return self._guarded("lookup", ask, default=[])

    def load(self, rid: str, transfers: list[EngineTransfer]) -> bool:
        """Queue a load into the given slots."""
        return self._guarded(
            "load", lambda: self._linker.load(rid, core_transfers(transfers)), default=False
        )

    def start_layer_wise_loading(self) -> int:
        """Start what is queued; -1 with nothing queued."""
        return self._linker.start_layer_wise_loading(ready=self._ready())

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Wait until a batch writes no more; True when all of it landed."""
        return self._linker.finish_layer_wise_loading(counter_index)

    def cancel_queued_load(self, rid: str) -> bool:
        """Take back a load that has not started."""
        return self._linker.cancel_queued_load(rid)

    # ---- offloads -----------------------------------------------------------------------------

    def offload(self, transfers: list[EngineTransfer], session_id: str | None = None) -> bool:
        """Offer pages for storing; each accepted offer completes once, in order."""

        def offer() -> bool:
            asked = core_transfers(transfers)
            if not asked or self._declines("offloads"):
                return False
            return self._linker.offload(asked, ready=self._ready(), session_id=session_id)

        return self._guarded("offload", offer, default=False)

    def num_completed_offloads(self) -> int:
        """Return how many offers have completed and were not taken."""
        return self._linker.num_completed_offloads()

    def pop_completed_offload(self) -> bool:
        """Take the oldest completion: whether all of it is stored."""
        return self._linker.pop_completed_offload()

    def _declines(self, what: str) -> bool:
        """Return whether nobody can say whose pages are asked for; counted, and logged once until the next flush."""
        if not self.weights.is_mixed:
            return False
        self.metrics.count(f"{what}_of_mixed_weights")
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "kvlinker: weights are being replaced, or an update of them was refused or failed: nothing is stored "
                "or restored until SGLang flushes its prefix cache, as /flush_cache does",
            )
        return True

    def _miss(self, asked: Sequence[PoolTransfer]) -> None:
        pages = max((len(transfer.keys) for transfer in asked if transfer.name == KV), default=0)
        tokens = pages * self._linker.group.page_size
        self.metrics.look_up(tokens)
        self.metrics.settle(TokenOutcome.MISS, tokens, pool=_WEIGHTS)

    def _ready(self) -> Iterator[DeviceEvent]:
        """Record the events behind which pages may be touched, when they are asked for."""
        events: Iterable[DeviceEvent] = self.record_offload_ready()
        yield from events

    # ---- life cycle ---------------------------------------------------------------------------

    def reset(self) -> None:
        """Give up everything under way, and read anew which weights compute the KV."""
        self._linker.reset(namespace=self._guarded("reset", self.weights.flush, default=None))
        self._has_warned = self._has_warned and self.weights.is_mixed

    def close(self) -> None:
        """End everything and close the store. Idempotent; runs at the end of the process, too."""
        self._worker.close()

    def _guarded(self, what: str, ask: Callable[[], _T], *, default: _T) -> _T:
        """Answer for a question that cannot be put: the scheduler dies of an exception."""
        outer = sys.exc_info()[1]
        try:
            return ask()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001  # L1
            self._linker.failures.report(what, error, outer=outer)
            return default


def _pools(entries: Sequence[DevicePoolEntry]) -> dict[object, DevicePoolEntry]:
    """Return an entry for every logical pool that has one: SGLang leaves `swa` out where it is missing."""
    names = {member.value: member for member in PoolName}
    return {
        names[entry.indices_from_pool]: entry
        for entry in reversed(entries)
        if entry.indices_from_pool in names
    }


def _log_namespace(namespace: KeyNamespace) -> None:
    values = dict(namespace.fields)
    arguments = str(values.pop("value_format"))
    fields = ", ".join(f"{name}={value!r}" for name, value in values.items())
    keyed = "keyed with a secret" if namespace.secret else "without a secret"
    logger.info(
        "kvlinker: namespace %s, %s, %s, arguments %s",
        namespace.digest.hex(),
        keyed,
        fields,
        digest_fields("kvlinker-sglang.arguments/1", (arguments,), size=_DIGEST_BYTES).hex(),
    )
    logger.debug("kvlinker: arguments and variables that values may depend on: %s", arguments)
