"""Asks a model plugin in a new process, which sees what the plugin touches beside the description."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvlinker.description import KVCacheDescription
from kvlinker.description_json import description_from_json, description_to_json
from kvlinker.errors import KVLinkerError
from kvlinker.plugins import one_line
from kvlinker.testing.cache_examples import CacheExample
from kvlinker.testing.strategies import ModelHooks
from kvlinker.testing.verdicts import fail

__all__ = ["FreshAnswers", "answer_afresh", "ask_afresh", "heavy_imports"]

_CHILD = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from kvlinker.testing.fresh_process import answer_afresh
answer_afresh(sys.argv[2])
"""
_IMPORTER = """
import importlib, json, sys
sys.path[:] = json.loads(sys.argv[1])
importlib.import_module(sys.argv[2])
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""
_OUTSIDE = (
    "import",
    "open",
    "os.",
    "pathlib.",
    "shutil.",
    "socket.",
    "sqlite3.",
    "subprocess.",
    "tempfile.",
    "urllib.",
)
"""Beginnings of the audit events of whatever reads or changes the world."""
_HEAVY = (
    "cupy",
    "jax",
    "mooncake",
    "nixl",
    "obstore",
    "redis",
    "sglang",
    "torch",
    "transformers",
    "vllm",
)
_DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshAnswers:
    """What a plugin did in a process of its own."""

    fingerprints: Mapping[str, str]
    """Name of the cache to its layout's fingerprint, or to what was raised instead."""
    events: tuple[str, ...]
    """What the hooks touched beside the description."""
    heavy_modules: tuple[str, ...]
    """Engines, tensor libraries and store clients that were loaded."""


def ask_afresh(module: str, caches: Sequence[CacheExample]) -> FreshAnswers:
    """Return what the plugin answers in a new process, with another hash seed.

    Args:
        module: name under which the plugin can be imported.
        caches: what it is asked about, at made-up addresses.

    Raises:
        AssertionError: the process failed; the text has its last words.
    """
    forms = {cache.name: description_to_json(cache.made_up()) for cache in caches}
    found = json.loads(_run(_CHILD, module, text=json.dumps(forms)))
    return FreshAnswers(
        fingerprints=found["fingerprints"],
        events=tuple(found["events"]),
        heavy_modules=tuple(found["heavy_modules"]),
    )


def heavy_imports(module: str) -> tuple[str, ...]:
    """Return the engines, tensor libraries and store clients that importing a module loads.

    Raises:
        AssertionError: it cannot be imported; the text has the process's last words.
    """
    loaded = json.loads(_run(_IMPORTER, module))
    return tuple(name for name in loaded if name in _HEAVY)


def _run(program: str, module: str, *, text: str = "") -> str:
    """Return the last line that a program writes in a new process, with another hash seed."""
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(sys.path), module],
        env={**os.environ, "PYTHONHASHSEED": seed},
        input=text,
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
        check=False,
    )
    if done.returncode:
        fail(f"the plugin {module!r} cannot be used in a new process:\n{done.stderr[-2000:]}")
    return done.stdout.splitlines()[-1]


class _Watch:
    """An audit hook that listens while the plugin's hooks run."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.is_on = False

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.is_on and event.startswith(_OUTSIDE):
            self.events.append(" ".join([event, *(repr(item) for item in arguments[:1])]))


def answer_afresh(module: str) -> None:
    """Read descriptions from standard input and write what the plugin makes of them, as the child of `ask_afresh`."""
    forms = json.loads(sys.stdin.read())
    descriptions = {name: description_from_json(form) for name, form in forms.items()}
    plugin: ModelHooks = importlib.import_module(module)
    watch = _Watch()
    sys.addaudithook(watch)
    fingerprints = {}
    for name, description in descriptions.items():
        watch.is_on = True
        try:
            answer = _layout(plugin, description)
        except KVLinkerError as error:
            answer = one_line(error)
        watch.is_on = False
        fingerprints[name] = answer
    loaded = {name.partition(".")[0] for name in sys.modules}
    answers = {
        "fingerprints": fingerprints,
        "events": watch.events,
        "heavy_modules": sorted(loaded.intersection(_HEAVY)),
    }
    sys.stdout.write(f"{json.dumps(answers)}\n")


def _layout(plugin: ModelHooks, description: KVCacheDescription) -> str:
    if plugin.match_kv_cache(description) is None:
        return "declined"
    return plugin.build_direct_linker_pool_group(description).fingerprint.hex()
