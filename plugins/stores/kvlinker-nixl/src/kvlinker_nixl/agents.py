"""An agent is NIXL's owner of registered memory and of transfers; each direction of a store has one of its own."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Mapping, Sequence
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from kvlinker.errors import StoreClosedError, StoreError
from kvlinker_nixl.library import Client, ClientAgent

__all__ = ["Agent", "Descriptors", "Memory", "Operation", "Registration", "Transfer"]

_log = logging.getLogger(__name__)

Descriptors = NDArray[np.uint64]
"""[ranges, 3]: address or offset, length, device or descriptor of the file."""


class Memory(Enum):
    """What an address is one of."""

    HOST = "DRAM"
    DEVICE = "VRAM"
    FILE = "FILE"
    OBJECT = "OBJ"


class Operation(Enum):
    """Which way bytes go."""

    READ = "READ"
    WRITE = "WRITE"


class Agent:
    """An agent with one backend; it counts what it has given out, so that nothing is forgotten."""

    def __init__(
        self, client: Client, backend: str, params: Mapping[str, str], *, advice: str
    ) -> None:
        """Make an agent, and its backend.

        Args:
            client: NIXL.
            backend: its name there.
            params: of the backend.
            advice: what to do where the backend cannot be had, for the message.

        Raises:
            StoreError: the backend cannot be had.
        """
        self.name = f"kvlinker-{uuid.uuid4().hex}"
        self.backend = backend
        self._counting = threading.Lock()
        self.transfers = 0
        """Transfers that were begun and not released."""
        self.registrations = 0
        """Registrations that were not taken back."""
        self._client: ClientAgent | None = client.make_agent(self.name)
        try:
            self._client.create_backend(backend, dict(params))
        except Exception as error:  # noqa: BLE001  # the client's errors have no base of their own
            msg = f"NIXL's backend {backend} cannot be opened: {_code(error)}; {advice}"
            raise StoreError(msg) from None

    @property
    def client(self) -> ClientAgent:
        """NIXL's own agent.

        Raises:
            StoreClosedError: it was let go of.
        """
        if self._client is None:
            msg = f"nixl store: the agent of its backend {self.backend} was let go of; open the store again"
            raise StoreClosedError(msg)
        return self._client

    def close(self) -> None:
        """Let NIXL end its agent, of which nothing may be registered or under way. Idempotent."""
        self._client = None

    def register(
        self, regions: Sequence[tuple[int, int, int, str]], memory: Memory
    ) -> Registration:
        """Register memory, or files or objects by number: (address, bytes, device, name).

        Raises:
            StoreError: the client refuses; the message has its code.
        """
        try:
            listed = self.client.register_memory(list(regions), memory.value)
        except Exception as error:  # noqa: BLE001  # see above
            raise StoreError(_code(error)) from None
        self._count(registrations=1)
        return Registration(self, listed)

    def deregister(self, listed: object) -> None:
        """Take a registration back; a client that refuses keeps nobody from going on."""
        self._count(registrations=-1)
        try:
            self.client.deregister_memory(listed)
        except Exception as error:  # noqa: BLE001  # see above
            # Whoever gives back memory has pins, room or a file to let go of behind it.
            _log.warning("nixl store: a registration could not be taken back: %s", _code(error))

    def begin(
        self,
        operation: Operation,
        local: tuple[Memory, Descriptors],
        remote: tuple[Memory, Descriptors],
        peer: str,
    ) -> Transfer:
        """Begin to move range i of one side to range i of the other.

        Args:
            operation: a READ fills local memory.
            local: where, in memory of this process.
            remote: where, in files, objects or the memory of a peer.
            peer: name of the agent that has the other side; this agent's own for files and objects.

        Raises:
            StoreError: the client refuses.
        """
        agent = self.client
        try:
            handle = agent.initialize_xfer(
                operation.value,
                agent.get_xfer_descs(local[1], local[0].value),
                agent.get_xfer_descs(remote[1], remote[0].value),
                peer,
            )
        except Exception as error:  # noqa: BLE001  # see above
            raise StoreError(_code(error)) from None
        self._count(transfers=1)
        transfer = Transfer(self, agent, handle)
        transfer.start()
        return transfer

    def _count(self, *, transfers: int = 0, registrations: int = 0) -> None:
        with self._counting:
            self.transfers += transfers
            self.registrations += registrations

    def ended(self) -> None:
        """Note that a transfer was released."""
        self._count(transfers=-1)

    # ---- peers ----------------------------------------------------------------------------------

    @property
    def metadata(self) -> bytes:
        """What a peer needs to reach the memory that is registered now."""
        return self.client.get_agent_metadata()

    def add_peer(self, metadata: bytes) -> str:
        """Take over what a peer says of itself, and return its name.

        Raises:
            StoreError: the client refuses.
        """
        try:
            name = self.client.add_remote_agent(metadata)
        except Exception as error:  # noqa: BLE001  # see above
            raise StoreError(_code(error)) from None
        return name.decode() if isinstance(name, bytes) else name

    def remove_peer(self, name: str) -> None:
        """Forget a peer; one that is gone already is no error."""
        try:
            self.client.remove_remote_agent(name)
        except Exception:  # noqa: BLE001  # the peer is dead, and so is what the client knows of it
            return

    def progress(self) -> None:
        """Let the backend answer peers that move bytes of this agent."""
        self.client.get_new_notifs()


class Registration:
    """Memory that an agent has registered, until it is released."""

    def __init__(self, agent: Agent, listed: object) -> None:
        """Note what is to be taken back."""
        self._agent = agent
        self._listed: object | None = listed

    def release(self) -> None:
        """Take it back; where the client refuses, it counts as taken back. Idempotent."""
        listed, self._listed = self._listed, None
        if listed is not None:
            self._agent.deregister(listed)


class Transfer:
    """Bytes on their way; it must be released once it has ended."""

    def __init__(self, agent: Agent, client: ClientAgent, handle: object) -> None:
        """Take a handle that nobody has started."""
        self._agent = agent
        self._client = client
        self._handle: object | None = handle
        self._state = "PROC"
        self.problem = ""
        """Why it failed; the client's code."""

    def start(self) -> None:
        """Let the bytes go; a failure is seen by `has_ended`."""
        try:
            self._state = self._client.transfer(self._handle)
        except Exception as error:  # noqa: BLE001  # see above
            self._fail(_code(error))

    def has_ended(self) -> bool:
        """Whether no byte moves any more; `problem` says whether it went well."""
        if self._state == "PROC":
            try:
                self._state = self._client.check_xfer_state(self._handle)
            except Exception as error:  # noqa: BLE001  # see above
                self._fail(_code(error))
        if self._state == "ERR":
            self._fail("ERR")
        return self._state != "PROC"

    def _fail(self, problem: str) -> None:
        self._state, self.problem = "FAILED", self.problem or problem

    def release(self) -> None:
        """Let go of the handle of a transfer that has ended. Idempotent."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        self._agent.ended()
        try:
            self._client.release_xfer_handle(handle)
        except Exception:  # noqa: BLE001  # the client keeps it, and releases it with the agent
            return


def _code(error: Exception) -> str:
    return str(error) or type(error).__name__
