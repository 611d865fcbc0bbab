"""One engine and all linkers in it: asks it, times it, and reads what the linkers noted."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self

from engine_frame.client import Answer
from engine_frame.server import LinkerOptions, Server, ServerDied, ServerOptions
from linker_events import Event, EventFile, RequestName, What, pending_offloads

__all__ = ["PAGE_SIZE", "Engine", "Memory", "ServerDied", "Timed"]

FOLDERS = (Path(__file__).parent, Path(__file__).parents[1])
SETTLE_SECONDS = 60.0
PAGE_SIZE = 16
MAX_TOKENS = 8192
CAPACITY = 1 << 30
FLAGS = ("--mem-fraction-static", "0.5")
"""Of the memory that others left: more than the pool takes, which has a limit of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One request: what was answered, after how long, and what the linker noted."""

    answer: Answer
    seconds: float
    """Until the answer was here; until its first token where there is no other."""
    events: tuple[Event, ...]
    """Up to the end of what it made the linker store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What all processes of a server hold, in bytes; what several share counts once."""

    own: int
    """Anonymous and shared memory: what is gone for all others."""
    mapped: int
    """Pages of files: the kernel takes them back whenever it wants to."""


class Engine:
    """A server with the linkers that it is given; as a context, it is up inside."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        *,
        linkers: Mapping[str, str | None] | None = None,
        flags: Sequence[str] = (),
    ) -> None:
        """Start nothing yet.

        Args:
            model: the model's folder.
            folder: made for this engine's files.
            linkers: name to the kind of files that it keeps; None for kvlinker.
            flags: further ones of SGLang.
        """
        folder.mkdir()
        events = folder / "events.jsonl"
        self._numbers = count()
        self._events = EventFile(events)
        config: dict[str, object] = {
            "events": str(events),
            "capacity": CAPACITY,
            "variants": {
                name: {"files": files, "folder": str(folder / f"linker-{number}")}
                for number, (name, files) in enumerate((linkers or {}).items())
            },
        }
        linker = LinkerOptions(name="MeasuredLinker", module="measured_linker", extra_config=config)
        options = ServerOptions(
            model=model,
            page_size=PAGE_SIZE,
            max_total_tokens=MAX_TOKENS,
            linker=None if linkers is None else linker,
            flags=(*FLAGS, *flags),
            environment={"PYTHONPATH": os.pathsep.join([*map(str, FOLDERS), *_python_path()])},
        )
        self._server = Server(options, folder / "log")

    def __enter__(self) -> Self:
        """Start it.

        Raises:
            ServerDied: it did not come up.
        """
        self._server.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.kill()

    def ask(
        self,
        variant: str,
        prompt: Sequence[int],
        *,
        flush: bool,
        new_tokens: int = 1,
        is_alone: bool = False,
    ) -> Timed:
        """Have the prompt answered, and everything behind it done.

        Args:
            variant: the linker whose turn it is; another name is none's.
            prompt: token ids.
            flush: whether the engine forgets its own pages first.
            new_tokens: how many are answered.
            is_alone: whether the forward waits until the load is done.
        """
        name = RequestName(variant=variant, is_alone=is_alone, number=next(self._numbers))
        client = self._server.client
        if flush:
            client.flush_cache()
        self._take()
        start = time.perf_counter()
        answer = client.generate(prompt, new_tokens=new_tokens, request_id=str(name))
        seconds = time.perf_counter() - start
        return Timed(answer=answer, seconds=seconds, events=self._settled())

    def memory(self) -> Memory:
        """Add up what the kernel says of every process of the server."""
        own = mapped = 0
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(ProcessLookupError, PermissionError, FileNotFoundError):
                if os.getpgid(int(process.name)) == self._server.pid:
                    shares = _shares(process / "smaps_rollup")
                    own += shares["Pss_Anon"] + shares["Pss_Shmem"]
                    mapped += shares["Pss_File"]
        return Memory(own=own, mapped=mapped)

    def last_error(self) -> str:
        """Return the last line of its log that names an error."""
        lines = self._server.log_text().splitlines()
        return next((line for line in reversed(lines) if "Error: " in line), "no error is logged")

    def _settled(self) -> tuple[Event, ...]:
        events = self._take()
        deadline = time.monotonic() + SETTLE_SECONDS
        while pending_offloads(events):
            if time.monotonic() > deadline:
                msg = f"an offload does not end: {self._server.last_lines()}"
                raise RuntimeError(msg)
            time.sleep(0.005)
            events += self._take()
        return tuple(events)

    def _take(self) -> list[Event]:
        """Return what was noted since the last call.

        Raises:
            RuntimeError: something offloaded was not stored, so that a time that was taken is no offload's.
        """
        events = self._events.take()
        if any(event.what is What.LOST for event in events):
            msg = f"an offload was not stored: {self._server.last_lines()}"
            raise RuntimeError(msg)
        return events


def _python_path() -> list[str]:
    return [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]


def _shares(path: Path) -> dict[str, int]:
    """Return a process's proportional shares in bytes."""
    fields = (line.split() for line in path.read_text().splitlines()[1:])
    return {name.rstrip(":"): int(amount) * 1024 for name, amount, *_ in fields}
