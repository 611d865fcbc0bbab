"""Worker: the store, the linker and the exporter of one SGLang worker, opened together and closed together."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import weakref
from contextlib import ExitStack

from kvlinker.description import DescribeRequest
from kvlinker.device_access import device_access_for
from kvlinker.discovery import load_plugins
from kvlinker.explanation import explain
from kvlinker.installed import PluginKind, available, plugin_not_found
from kvlinker.keys import KeyNamespace
from kvlinker.linker import Linker
from kvlinker.registry import PluginRegistry
from kvlinker.selection import build_group, describe_cache, select_strategy
from kvlinker.store import Store
from kvlinker_sglang.metrics import Exporter, WorkerPlace
from kvlinker_sglang.options import WorkerConfig
from kvlinker_sglang.secret_references import resolve_secrets
from kvlinker_sglang.start_lines import start_lines

__all__ = ["ENGINE", "Worker", "load_registry"]

logger = logging.getLogger(__name__)

ENGINE = "sglang"
"""Name under which pools are described, and of this plugin."""


def load_registry(config: WorkerConfig) -> PluginRegistry:
    """Load the plugins that the configuration allows.

    Raises:
        PluginError: a name that no distribution provides.
    """
    stores = config.store.tree(config.store.options).plugins
    for name in stores:
        _check_store_is_installed(name)
    if config.plugins is None:
        return load_plugins()
    allowed = {*config.plugins, ENGINE, *stores}
    return load_plugins(allow=allowed, allowed_by="plugins in linker_extra_config")


def _check_store_is_installed(name: str) -> None:
    """Say that it is the store's name that nobody provides, and not one of the names in `plugins`."""
    installed = available()
    if not any(found.kind is PluginKind.STORE and found.answers_to(name) for found in installed):
        asked = "store.plugin in linker_extra_config is"
        raise plugin_not_found(name, installed, kinds=(PluginKind.STORE,), asked=asked)


class Worker:
    """Everything that one worker of a server keeps open for its linker."""

    def __init__(
        self,
        kv_cache: object,
        request: DescribeRequest,
        config: WorkerConfig,
        namespace: KeyNamespace,
        place: WorkerPlace,
    ) -> None:
        """Describe the pools, lay them out, open the store and link both.

        Raises:
            KVLinkerError: nothing takes the pools, or the store cannot be opened; nothing stays open.
        """
        registry = load_registry(config)
        description = describe_cache(ENGINE, kv_cache, request, registry=registry)
        selection = select_strategy(description, registry, strategy=config.strategy)
        self.group = build_group(selection, description)
        with ExitStack() as opened:
            store = _open(registry, config, opened)
            device = device_access_for(self.group)
            opened.callback(device.close)
            self.linker = Linker(
                self.group, store, namespace, device=device, options=config.linker_options()
            )
            opened.callback(self.linker.close)
            if config.metrics.enabled:
                exporter = Exporter(
                    self.linker, store, config.metrics, model=namespace.model_id, place=place
                )
                opened.callback(exporter.close)
            found = explain(description, registry, strategy=selection.name)
            title = config.store.tree(config.store.options).title
            for line in start_lines(found, store, title):
                logger.info("kvlinker: %s", line)
            self._opened = opened.pop_all()
        self._at_exit = functools.partial(_close_at_exit, weakref.ref(self), os.getpid())
        atexit.register(self._at_exit)

    def close(self) -> None:
        """End what is under way and close the store. Idempotent."""
        atexit.unregister(self._at_exit)
        try:
            self._opened.close()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001  # L1: an engine that ends must end
            self.linker.failures.report("close", error)


def _open(registry: PluginRegistry, config: WorkerConfig, opened: ExitStack) -> Store:
    store = config.store.tree(resolve_secrets(config.store.options)).open(registry)
    opened.callback(store.close)
    return store


def _close_at_exit(reference: weakref.ref[Worker], process: int) -> None:
    worker = reference()
    # A forked child shares the store's files with its parent, and must not finish it.
    if worker is not None and os.getpid() == process:
        worker.close()
