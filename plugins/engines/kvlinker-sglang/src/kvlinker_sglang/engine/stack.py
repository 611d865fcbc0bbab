"""Stack: how SGLang's own linkers get their pools from kvlinker's model plugins."""

from __future__ import annotations

import logging
from functools import cache

import sglang
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import (
    StackStrategy,
    register_stack_strategy,
)
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import (
    DevicePoolEntry,
    DevicePoolGroup,
    resolve_hybrid_device_pool_group,
)
from sglang.srt.runtime_context import get_context, get_memory

from kvlinker.description import KVCacheDescription
from kvlinker.discovery import load_plugins
from kvlinker.errors import UnsupportedKVCacheError
from kvlinker.installed import PluginKind
from kvlinker.selection import build_group, describe_cache, select_strategy
from kvlinker_sglang.engine.parameters import WorkerParameters, describe_request
from kvlinker_sglang.engine.stack_view import stack_view
from kvlinker_sglang.stack_compatibility import StackHost, check_stack_host
from kvlinker_sglang.worker import ENGINE

__all__ = ["LinkedStack", "install_stack", "installed_stack_host"]

logger = logging.getLogger(__name__)

_UNUSED = (
    "installed for SGLang's own linkers, and this server has none, so that nothing is laid out; add "
    "--enable-unified-cache-external-linker and name the linker, or do not install"
)


class LinkedStack(StackStrategy):  # type: ignore[misc, no-any-unimported]  # SGLang is untyped where it is not installed
    """Answers for every pool of a server with an external linker; SGLang's own strategies have what it refuses."""

    def __init__(self) -> None:
        """Ask for nothing yet: plugins are loaded in the worker that needs them."""
        self._steps_back = False
        self._said_unused = False

    def matches(self, kvcache: object, components: set[object]) -> bool:
        """Take every pool of a server with an external linker; the host tier beside none is SGLang's own matter."""
        del kvcache, components
        linked: bool = get_memory().enable_unified_cache_external_linker
        if not linked:
            self.say_unused()
        return linked and not self._steps_back

    def say_unused(self) -> None:
        """Log, once, that this server has no external linker, so that nothing is laid out for one."""
        if not self._said_unused:
            logger.warning("kvlinker: %s", _UNUSED)
        self._said_unused = True

    def build_direct_linker_pool_group(  # type: ignore[no-any-unimported]  # SGLang's group
        self, *, kvcache: object, params: WorkerParameters, page_size: int
    ) -> DevicePoolGroup:
        """Return the group that the one fitting model plugin lays out, or SGLang's own where none fits.

        Raises:
            KVLinkerError: the pools are described and cannot be laid out, or nobody takes them; the text says why.
        """
        registry = load_plugins(kinds=(PluginKind.MODEL, PluginKind.ENGINE))
        try:
            description = describe_cache(
                ENGINE, kvcache, describe_request(params), registry=registry
            )
            selection = select_strategy(description, registry)
        except UnsupportedKVCacheError as refusal:
            return self._own_group(kvcache, params, page_size, refusal)
        logger.info("kvlinker: strategy %s lays out the pools of SGLang's linker", selection.name)
        drafts = _draft_labels(description) if params.sidecar_draft_device_pools else ()
        return stack_view(build_group(selection, description), beside=drafts)

    def _own_group(  # type: ignore[no-any-unimported]  # SGLang's group
        self,
        kvcache: object,
        params: WorkerParameters,
        page_size: int,
        refusal: UnsupportedKVCacheError,
    ) -> DevicePoolGroup:
        self._steps_back = True
        try:
            group = resolve_hybrid_device_pool_group(
                kvcache=kvcache,
                page_size=page_size,
                params=params,
                components=set(params.tree_components or ()),
            )
        except Exception as error:
            # SGLang refuses with ValueError, AssertionError and AttributeError; what was asked first says more.
            raise refusal from error
        finally:
            self._steps_back = False
        logger.warning("kvlinker: SGLang's own strategy lays out its linker's pools: %s", refusal)
        return group


def _draft_labels(description: KVCacheDescription) -> frozenset[str]:
    return frozenset(
        span.label
        for role, spans in description.buffers.items()
        if role.startswith("draft_")
        for span in spans
    )


def installed_stack_host() -> StackHost:
    """Return the parts of the installed SGLang that the strategy relies on."""
    return StackHost(
        version=sglang.__version__,
        strategy=StackStrategy,
        entry=DevicePoolEntry,
        group=DevicePoolGroup,
        parameters=CacheInitParams,
        register=register_stack_strategy,
        resolve=resolve_hybrid_device_pool_group,
    )


@cache
def install_stack() -> LinkedStack:
    """Register the strategy in front of SGLang's, once in a process, and return it.

    Raises:
        UnsupportedOperationError: SGLang's own linkers take their pools otherwise; nothing is registered.
    """
    check_stack_host(installed_stack_host())
    strategy = LinkedStack()
    register_stack_strategy(strategy)
    # Where a server's plugins are loaded, its arguments are not published yet: the first pool asks again.
    published = get_context().is_config_namespace_published("memory")
    if published and not get_memory().enable_unified_cache_external_linker:
        strategy.say_unused()
    return strategy
