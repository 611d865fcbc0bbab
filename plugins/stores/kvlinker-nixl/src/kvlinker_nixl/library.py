"""NIXL's client, loaded when a store is opened, as the calls that the store needs of it."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Sequence
from types import ModuleType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvlinker.errors import StoreError

__all__ = ["CALLS", "Client", "ClientAgent", "load_client"]

_MODULES = ("nixl._api", "nixl_cu13._api", "nixl_cu12._api")
CALLS = (
    "add_remote_agent",
    "check_xfer_state",
    "create_backend",
    "deregister_memory",
    "get_agent_metadata",
    "get_new_notifs",
    "get_xfer_descs",
    "initialize_xfer",
    "register_memory",
    "release_xfer_handle",
    "remove_remote_agent",
    "transfer",
)
"""What an agent of the client must be able to do."""


class ClientAgent(Protocol):
    """An agent as NIXL has it; lists of descriptors, handles and registrations are opaque."""

    def create_backend(self, backend: str, initParams: dict[str, str]) -> None:  # noqa: N803 - NIXL's name
        """Make a backend."""
        ...

    def register_memory(
        self, reg_list: Sequence[tuple[int, int, int, str]], mem_type: str
    ) -> object:
        """Register (address, bytes, device, name)."""
        ...

    def deregister_memory(self, dereg_list: object) -> None:
        """Take back what `register_memory` returned."""
        ...

    def get_xfer_descs(self, descs: NDArray[np.uint64], mem_type: str) -> object:
        """Return descriptors as transfers take them."""
        ...

    def initialize_xfer(
        self, operation: str, local_descs: object, remote_descs: object, remote_agent: str
    ) -> object:
        """Return a handle."""
        ...

    def transfer(self, handle: object) -> str:
        """Start, and return DONE, PROC or ERR."""
        ...

    def check_xfer_state(self, handle: object) -> str:
        """Return DONE, PROC or ERR."""
        ...

    def release_xfer_handle(self, handle: object) -> None:
        """Let go of a handle."""
        ...

    def get_agent_metadata(self) -> bytes:
        """Return what a peer needs."""
        ...

    def add_remote_agent(self, metadata: bytes) -> bytes | str:
        """Take over a peer's, and return its name."""
        ...

    def remove_remote_agent(self, agent: str) -> None:
        """Forget a peer."""
        ...

    def get_new_notifs(self) -> object:
        """Let backends make progress, and return what peers have said."""
        ...


class Client(Protocol):
    """The module of the client."""

    def make_agent(self, name: str) -> ClientAgent:
        """Return an agent without backends and without threads of its own."""
        ...


class _Module(Protocol):
    """What is used of the module's own names."""

    @property
    def nixl_thread_sync_t(self) -> _SyncModes:
        """How threads share an agent."""
        ...

    def nixl_agent(self, agent_name: str, nixl_conf: object) -> ClientAgent:
        """Make an agent."""
        ...

    def nixl_agent_config(
        self, *, enable_prog_thread: bool, backends: list[str], sync_mode: object
    ) -> object:
        """Make the configuration of an agent."""
        ...


class _SyncModes(Protocol):
    @property
    def NIXL_THREAD_SYNC_STRICT(self) -> object:  # noqa: N802 - NIXL's name
        """One thread at a time."""
        ...


class _LoadedClient:
    """The installed client."""

    def __init__(self, module: _Module) -> None:
        self._module = module

    def make_agent(self, name: str) -> ClientAgent:
        """See Client."""
        # The default is a thread that never sleeps; whoever waits for a transfer drives it instead.
        config = self._module.nixl_agent_config(
            enable_prog_thread=False,
            backends=[],
            sync_mode=self._module.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        return self._module.nixl_agent(name, config)


def load_client(names: Sequence[str] = _MODULES) -> Client:
    """Return NIXL's client.

    Args:
        names: of its module, the first one that is installed is taken.

    Raises:
        StoreError: none is installed, or it is too old; the message says what is missing.
    """
    problems = []
    for name in names:
        try:
            module = _import_quietly(name)
        except ImportError as error:
            problems.append(f"{name}: {error}")
            continue
        _check(name, module)
        client: _Module = module  # _check looked for the names
        return _LoadedClient(client)
    msg = (
        f"NIXL cannot be loaded ({'; '.join(problems)}); pip install nixl, "
        f"or, where torch must stay as it is, pip install --no-deps nixl-cu12"
    )
    raise StoreError(msg)


def _import_quietly(name: str) -> ModuleType:
    """Import the client, and let its log lines go where the application's go, instead of to the standard output."""
    raises = logging.raiseExceptions
    try:
        module = importlib.import_module(name)
    finally:
        logging.raiseExceptions = raises  # the import turns it off for the whole process
    log = logging.getLogger("nixl")
    log.handlers.clear()
    log.propagate = True
    if "NIXL_LOG_LEVEL" not in os.environ:
        log.setLevel(logging.WARNING)
    return module


def _check(name: str, module: ModuleType) -> None:
    found = vars(module)
    missing = [
        one for one in ("nixl_agent", "nixl_agent_config", "nixl_thread_sync_t") if one not in found
    ]
    if not missing:
        missing = [f"nixl_agent.{one}" for one in CALLS if one not in dir(found["nixl_agent"])]
    if missing:
        msg = f"the installed NIXL ({name}) is too old: it has no {', '.join(missing)}; install nixl 1.5 or newer"
        raise StoreError(msg)
