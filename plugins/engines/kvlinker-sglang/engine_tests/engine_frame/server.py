"""A real SGLang server in processes of its own, on a free port of this machine alone."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import cycle
from pathlib import Path
from types import TracebackType
from typing import Self

from engine_frame.client import Client
from engine_frame.server_forge import Forge, Order

__all__ = [
    "START_SECONDS",
    "LinkerOptions",
    "Server",
    "ServerDied",
    "ServerOptions",
    "SharedServer",
    "free_port",
    "lives",
    "search_path",
]

ENGINE_TESTS = Path(__file__).parents[1]
START_SECONDS = 300.0
"""It takes 5 to 15 s on two idle cores, and many times that where they have more to do."""
STOP_SECONDS = 60.0
FIRST_PORT = 10_000
PORT_STEP = 16
"""The processes of a test run take every 16th port each, and none of each other's."""
FORKED = "KVLINKER_CPU_STUBS_FORK"
"""A variable of the stand-ins, which are no import of this module: types are checked where they are not installed."""
READ_LATE = frozenset({"PYTHONPATH", "KVLINKER_SECRET", "SGLANG_CPU_OMP_THREADS_BIND"})
"""Variables that no import of SGLang's looks at: a server that is forked may have its own."""
LAST_LINES = 40


class ServerDied(Exception):  # noqa: N818 - what happened
    """A server ended, or never came up; says what it logged last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkerOptions:
    """The external linker of a server."""

    extra_config: Mapping[str, object] = field(default_factory=dict)
    """Options of the linker itself, of JSON's types."""
    name: str = "KVLinker"
    module: str = "kvlinker_sglang"
    """Imported in the scheduler process, where the modules of `engine_tests` can be imported too."""

    @property
    def config(self) -> dict[str, object]:
        """As SGLang's Engine takes them."""
        return {
            "linker": self.name,
            "linker_module_path": self.module,
            "linker_extra_config": dict(self.extra_config),
        }

    @property
    def flags(self) -> list[str]:
        """As SGLang's command line takes them."""
        return [
            "--enable-unified-cache-external-linker",
            "--unified-cache-external-linker-backend=dynamic",
            f"--unified-cache-external-linker-config={json.dumps(self.config)}",
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How a server is started."""

    model: Path
    linker: LinkerOptions | None = None
    page_size: int = 16
    max_total_tokens: int = 4096
    """Slots of its KV pools."""
    max_running_requests: int = 8
    dtype: str = "bfloat16"
    """Of its weights and its KV pools."""
    flags: tuple[str, ...] = ()
    """Further flags of SGLang's command line; a later one wins."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Further variables of its processes."""
    spawned: bool = False
    """Start its processes as SGLang does, for tests of how they end; forked ones are up in a third of the time."""

    @property
    def is_forked(self) -> bool:
        """Whether its first process is forked too: other variables may decide what an import does."""
        return not self.spawned and self.environment.keys() <= READ_LATE

    def arguments(self, port: int) -> list[str]:
        """Return what SGLang's command line says behind its program."""
        return [
            *("--model-path", str(self.model), "--host", "127.0.0.1", "--port", str(port)),
            *("--device", "cpu", "--dtype", self.dtype, "--page-size", str(self.page_size)),
            *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
            *("--skip-tokenizer-init", "--skip-server-warmup", "--disable-cuda-graph"),
            "--sleep-on-idle",
            *("--mem-fraction-static", "0.5", "--max-total-tokens", str(self.max_total_tokens)),
            *("--max-running-requests", str(self.max_running_requests), "--random-seed", "0"),
            *(self.linker.flags if self.linker else ()),
            *self.flags,
        ]

    def variables(self) -> dict[str, str]:
        """Return the environment: one thread, so that a sum has one order, and no model from elsewhere."""
        return _variables(is_forked=not self.spawned) | dict(self.environment)


class Server:
    """A server that can be stopped, killed and started again; as a context, it is up inside."""

    def __init__(self, options: ServerOptions, log: Path) -> None:
        """Start nothing yet; `log` is written by the server's processes, one start after the other."""
        self.options = options
        self.log = log
        self._running: _Running | None = None
        self._port = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    @property
    def client(self) -> Client:
        """A client of the server that is running."""
        return Client(port=self._port)

    @property
    def pid(self) -> int:
        """The process that listens; the scheduler and others are its children, in a process group of this number.

        Raises:
            ServerDied: it does not run.
        """
        if self._running is None or self._running.has_ended():
            raise ServerDied(self.last_lines())
        return self._running.pid

    def start(self) -> None:
        """Start it and wait until it takes requests.

        Raises:
            ServerDied: it ended, or took too long.
        """
        self._port = free_port()
        start = _forked if self.options.is_forked else _spawned
        self._running = start(self.options, self._port, self.log)
        self._wait_until_healthy()

    def stop(self) -> None:
        """End it as an operator does, with SIGTERM, and wait until all of its processes are gone.

        Raises:
            ServerDied: it had to be killed.
        """
        pid = self.pid
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        while lives(pid):
            if time.monotonic() > deadline:
                self.kill()
                msg = f"did not stop on SIGTERM\n{self.last_lines()}"
                raise ServerDied(msg)
            time.sleep(0.05)
        self.kill()

    def kill(self) -> None:
        """End all of its processes at once, with SIGKILL, as a power cut does; fine where none runs."""
        running, self._running = self._running, None
        if running is None:
            return
        while lives(running.pid):
            with suppress(ProcessLookupError):  # it ended since
                os.killpg(running.pid, signal.SIGKILL)
            time.sleep(0.02)
        running.wait()

    def restart(self) -> None:
        """Kill it where it runs, and start it anew, on another port."""
        self.kill()
        self.start()

    def log_text(self) -> str:
        """Return everything that its processes wrote, all starts together."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def last_lines(self) -> str:
        """Return what its processes wrote last."""
        return "\n".join(self.log_text().splitlines()[-LAST_LINES:])

    def _wait_until_healthy(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self.client.is_healthy():
            if time.monotonic() > deadline:
                self.kill()
                msg = f"did not come up\n{self.last_lines()}"
                raise ServerDied(msg)
            _ = self.pid
            time.sleep(0.1)


@dataclass(frozen=True, slots=True)
class _Running:
    """The process that listens, and its handle where it is a child of this one."""

    pid: int
    child: subprocess.Popen[bytes] | None = None

    def has_ended(self) -> bool:
        if self.child is not None:
            return self.child.poll() is not None
        return not Path("/proc", str(self.pid)).exists()

    def wait(self) -> None:
        if self.child is not None:
            self.child.wait()


def _spawned(options: ServerOptions, port: int, log: Path) -> _Running:
    """Start a server as an operator does; it dies with this process, whatever ends it."""
    command = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m", "sglang.launch_server"]
    with log.open("ab") as output:
        child = subprocess.Popen(
            [*command, *options.arguments(port)],
            env=options.variables(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    return _Running(child.pid, child)


def _forked(options: ServerOptions, port: int, log: Path) -> _Running:
    """Start a server from what SGLang is imported in already."""
    order = Order(arguments=options.arguments(port), environment=options.variables(), log=str(log))
    return _Running(_forge().start(order))


@cache
def _forge() -> Forge:
    """Return what servers of this process are forked from; it ends when this process does."""
    return Forge(_variables(is_forked=True))


def _variables(*, is_forked: bool) -> dict[str, str]:
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",  # what SGLang compiles, for several workers alone, needs triton
        FORKED: "1" if is_forked else "0",
        **search_path(),
    }


class SharedServer:
    """Keeps one server up for tests that want the same, and no second one beside it: there are two cores."""

    def __init__(self, folder: Path) -> None:
        """Write logs into a folder, one for each server."""
        self._folder = folder
        self._server: Server | None = None
        self._count = 0

    def get(self, options: ServerOptions) -> Server:
        """Return a server with these options and empty pools, the one that is up or a new one in its place.

        Raises:
            ServerDied: it did not come up.
        """
        if self._server and self._server.options == options and self._server.client.is_healthy():
            self._server.client.flush_cache()
            return self._server
        self.close()
        self._count += 1
        self._server = Server(options, self._folder / f"server-{self._count}.log")
        self._server.start()
        return self._server

    def close(self) -> None:
        """Kill the server that is up, if any."""
        if self._server is not None:
            self._server.kill()
        self._server = None


def search_path(*folders: Path) -> dict[str, str]:
    """Return the variable by which a server's processes find modules, of further folders too."""
    found = (*map(str, folders), str(ENGINE_TESTS), os.environ.get("PYTHONPATH"))
    return {"PYTHONPATH": os.pathsep.join(filter(None, found))}


def free_port() -> int:
    """Return a port that nothing listens on, below those that the kernel hands out: no client takes it meanwhile.

    Whoever asks for the next one, here or in another process of a test run, gets another one, for a server takes
    long to listen on its own.
    """
    while True:
        port = next(_own_ports())
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@cache
def _own_ports() -> Iterator[int]:
    """Return the ports of this process of a test run, in an order that no other run has."""
    given_out = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    own = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % PORT_STEP
    ports = range(FIRST_PORT + own, max(int(given_out[0]), 2 * FIRST_PORT), PORT_STEP)
    return cycle(random.sample(ports, len(ports)))


def lives(group: int) -> bool:
    """Say whether a process group has a process that runs; one that has ended and was not waited for does not."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, process_group, *_ = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(process_group) == group and state not in "XZ":
            return True
    return False
