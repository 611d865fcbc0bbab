"""Servers whose worker is linked to a file store, which may be made to fail, and what that linker counted."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from urllib.request import ProxyHandler, build_opener

from engine_frame.client import Answer, Client
from engine_frame.models import VOCABULARY
from engine_frame.server import LinkerOptions, ServerOptions, free_port, search_path
from faulty_store import PATIENT, TOLD, install
from prometheus_client.parser import text_string_to_metric_families

__all__ = ["PAGE", "Counters", "Link", "answer_without_cache", "prompt_of", "wait_for"]

PAGE = 16
_LIMIT_SECONDS = 300.0
"""Far more than anything takes, also where others keep the cores busy: whatever gets there hangs."""


def prompt_of(length: int, *, seed: int = 0) -> list[int]:
    """Return a prompt of random tokens."""
    generator = random.Random(seed)  # noqa: S311 - to be the same in every run
    return [generator.randrange(3, VOCABULARY) for _ in range(length)]


def wait_for(
    condition: Callable[[], bool], what: str, *, limit_seconds: float = _LIMIT_SECONDS
) -> None:
    """Return once the condition holds; TimeoutError names what did not come."""
    limit = time.monotonic() + limit_seconds
    while not condition():
        if time.monotonic() > limit:
            raise TimeoutError(what)
        time.sleep(0.02)


def answer_without_cache(
    client: Client,
    prompt: Sequence[int],
    *,
    new_tokens: int = 8,
    extra: Mapping[str, object] | None = None,
) -> Answer:
    """Return the answer of the same server to a prompt that nobody ever asked: a salt of its own keeps it apart.

    `extra` is added to the body, as by `Client.generate`; its salt, if any, is replaced.
    """
    # Ends in a space: SGLang puts an adapter's id right behind the salt.
    salt = f"nobody {random.getrandbits(64)} "
    answer = client.generate(
        prompt, new_tokens=new_tokens, extra={**(extra or {}), "extra_key": salt}
    )
    assert answer.cached_tokens == 0
    return answer


@dataclass(frozen=True, slots=True)
class Counters:
    """What a linker counted up to one moment, by `metric` or `metric/label`."""

    values: Mapping[str, float]

    def __getitem__(self, name: str) -> float:
        return self.values.get(f"kvlinker_{name}", 0.0)

    def labels(self, metric: str) -> Mapping[str, float]:
        """Return a metric's values by their label."""
        start = f"kvlinker_{metric}/"
        return {n.removeprefix(start): v for n, v in self.values.items() if n.startswith(start)}

    @property
    def tokens_close(self) -> bool:
        """Whether every token that was looked up is in exactly one reason, or still open."""
        settled = sum(self.labels("tokens_total").values())
        return self["tokens_looked_up_total"] == settled + self["open_tokens"]

    @property
    def is_idle(self) -> bool:
        """Whether no load and no offload is open."""
        queues = self.labels("queued")
        return not queues["loads"] and not queues["offloads"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A linker's options, and where its metrics are."""

    store: Path
    capacity: str = "64MiB"
    options: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    """Further options of the linker."""
    faults: Path | None = None
    """An empty folder, for a store that goes wrong as `control` says."""
    port: int = field(default_factory=free_port)

    @property
    def control(self) -> Path:
        """What to give to `faulty_store.misbehave`."""
        assert self.faults is not None
        return self.faults / "control.json"

    def server(self, model: Path, **choices: object) -> ServerOptions:
        """Return a server of a model with this linker."""
        options = {"path": str(self.store), "capacity": self.capacity}
        plugin, linker = "file", LinkerOptions()
        if self.faults is not None:
            plugin, linker = "faulty", TOLD
            options |= {"control": str(self.control)}
            choices |= {"environment": search_path(install(self.faults / "plugins"))}
        config = {
            "store": {"plugin": plugin, "options": options},
            "metrics": {"enabled": True, "port": self.port},
            "min_hit_tokens": 1,
            "limits": dict(PATIENT),
            **self.options,
        }
        return ServerOptions(
            model=model,
            page_size=PAGE,
            linker=replace(linker, extra_config=config),
            **choices,  # type: ignore[arg-type]  # fields by name
        )

    def counters(self) -> Counters:
        """Return what the linker counted so far."""
        opener = build_opener(ProxyHandler({}))
        with opener.open(
            f"http://127.0.0.1:{self.port}/metrics", timeout=_LIMIT_SECONDS
        ) as response:
            text = response.read().decode()
        values = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = [v for n, v in sample.labels.items() if n not in {"model", "worker"}]
                values["/".join([sample.name, *labels])] = sample.value
        return Counters(values)

    def settle(self) -> Counters:
        """Wait until everything that was offered is stored or given up; return the counters."""
        wait_for(lambda: self.counters().is_idle, "the end of what the linker does")
        return self.counters()

    def forget(self, client: Client) -> None:
        """Let the server forget its pools, once everything is stored."""
        self.settle()
        client.flush_cache()
