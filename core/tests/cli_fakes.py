"""What the tests of the command line share: a way to run it, and plugins to run it with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fake_site import ENGINE, FakeSite
from typer.testing import CliRunner

from kvlinker.cli.app import make_app
from kvlinker.description import KVCacheDescription, LayerFacts, LogicalPool, PoolKind
from kvlinker.description_json import description_to_json
from kvlinker.discovery import PluginKind
from kvlinker.testing.strategies import MadeUpMemory

__all__ = [
    "DEMO_SOURCE",
    "MODEL_SOURCE",
    "STORE_SOURCE",
    "Cache",
    "Outcome",
    "install_engine",
    "install_model",
    "install_store",
    "run",
    "write_cache",
]

MODEL_SOURCE = """
from kvlinker.entries import DevicePoolEntry
from kvlinker.errors import UnsupportedKVCacheError
from kvlinker.hookspecs import PluginInfo, StrategyMatch, hookimpl
from kvlinker.pools import DevicePoolGroup

@hookimpl
def describe_plugin():
    return PluginInfo(api_version=1, summary="keys, windows and states")

@hookimpl
def match_kv_cache(description):
    if description.family != "windowed":
        return None
    if description.page_size != 16:
        raise UnsupportedKVCacheError(f"pages of {description.page_size} slots are not laid out here")
    empty = {s.label: "it has no rows" for spans in description.buffers.values() for s in spans if not s.rows}
    return StrategyMatch(buffers=frozenset(description.buffers), omitted=empty)

@hookimpl
def build_direct_linker_pool_group(description):
    entries = []
    for role, pool in (("kv", "kv"), ("window", "swa"), ("state", "mamba")):
        if role not in description.buffers:
            continue
        spans = [span for span in description.buffers[role] if span.rows]
        entries.append(
            DevicePoolEntry(
                name=role,
                indices_from_pool=pool,
                components=[spans],
                layer_mapping={layer: layer for layer in range(len(spans))},
                page_size=1 if pool == "mamba" else description.page_size,
                rows_are_pages=pool == "mamba",
            )
        )
    return DevicePoolGroup(entries, len(description.layers), description.page_size, layout="windowed/1")
"""

STORE_SOURCE = """
import json
from kvlinker.errors import ContractError, StoreBusyError
from kvlinker.hookspecs import PluginInfo, hookimpl
from kvlinker.store_tools import StoreTools
from kvlinker.testing import MemoryStore
from types import SimpleNamespace

class Tools(StoreTools):
    def __init__(self, path):
        self.path = path
        self.state = json.loads((path / "NAME.json").read_text())

    def inspect(self):
        if self.state.get("busy"):
            raise StoreBusyError("in use by process 1")
        spaces = [SimpleNamespace(namespace=bytes.fromhex(n), objects=c, payload_bytes=c * 2048, last_used=0.0)
                  for n, c in self.state["namespaces"].items()]
        return SimpleNamespace(path=self.path, capacity_bytes=self.state["capacity"], disk_bytes=8192,
                               objects=sum(s.objects for s in spaces), payload_bytes=4096, namespaces=spaces)

    def verify(self, *, drop=False):
        damaged = self.state["damaged"]
        return SimpleNamespace(objects=5, intact=5 - damaged, foreign=0, corrupt=damaged,
                               dropped=damaged if drop else 0, payload_bytes=5 * 2048)

    def prune(self, *, to_bytes=None, older_than=None, namespace=None):
        asked = [to_bytes, older_than, None if namespace is None else namespace.hex()]
        (self.path / "asked.json").write_text(json.dumps(asked))
        return SimpleNamespace(removed=3, objects=2, freed_bytes=6144, disk_bytes=2048)

@hookimpl
def describe_plugin():
    return PluginInfo(api_version=1, summary="a store in a json file")

@hookimpl
def open_store(config):
    if config.get("refuse"):
        raise ContractError(f"refused with {dict(config)}")
    return MemoryStore(capacity_bytes=config.get("capacity"))

@hookimpl
def open_store_tools(path):
    return Tools(path) if (path / "NAME.json").is_file() else None
"""

DEMO_SOURCE = (
    ENGINE
    + """
@hookimpl
def run_demo(request):
    (request.folder / "seen.txt").write_text(f"quick={request.quick}")
    print("demo in", request.folder)
    return EQUAL
"""
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one command printed, and how it ended."""

    code: int
    out: str
    err: str

    @property
    def form(self) -> dict[str, object]:
        """The JSON on standard output, which holds nothing else."""
        parsed: object = json.loads(self.out)
        assert isinstance(parsed, dict)
        return parsed


def run(*arguments: str | Path, env: Mapping[str, str] | None = None) -> Outcome:
    """Run the command in this process; an error that it does not report is a failure of the test."""
    result = CliRunner().invoke(
        make_app(),
        [str(argument) for argument in arguments],
        env={"COLUMNS": "200", **(env or {})},
        catch_exceptions=False,
        prog_name="kvlinker",
    )
    return Outcome(code=result.exit_code, out=result.stdout, err=result.stderr)


def install_model(site: FakeSite, source: str = MODEL_SOURCE, *, name: str = "windowed") -> None:
    """Install a model plugin that lays out keys, windows and states."""
    site.install(f"fake-{name}", {name: f"fake_{name}"}, modules={f"fake_{name}": source})


def install_store(site: FakeSite, *, name: str = "boxes", source: str | None = None) -> None:
    """Install a store plugin whose stores lie in a folder with a file of the plugin's name."""
    text = (source or STORE_SOURCE).replace("NAME", name)
    site.install(
        f"fake-{name}",
        {name: f"fake_{name}"},
        kind=PluginKind.STORE,
        modules={f"fake_{name}": text},
    )


def install_engine(site: FakeSite, *, name: str, source: str = ENGINE) -> None:
    """Install an engine plugin."""
    site.install(
        f"fake-{name}",
        {name: f"fake_{name}"},
        kind=PluginKind.ENGINE,
        modules={f"fake_{name}": source},
    )


@dataclass(frozen=True, kw_only=True)
class Cache:
    """A described cache of three layers: keys of every token, a window of 40 slots, a state."""

    page_size: int = 16
    window: int | None = 40
    has_states: bool = True
    spare: int = 5
    """State buffers without rows, which are omitted."""
    memory: MadeUpMemory = field(default_factory=MadeUpMemory)

    def describe(self) -> KVCacheDescription:
        """Return the description."""
        rows, span = self.page_size * 8, self.memory.span
        buffers = {
            "kv": tuple(span(rows, 64) for _ in range(3)),
            "window": tuple(span(rows, 32) for _ in range(3)),
        }
        pools = [
            LogicalPool(name="kv", page_size=self.page_size),
            LogicalPool(name="swa", page_size=self.page_size, window=self.window),
        ]
        if self.has_states:
            spare = (span(0, 1000) for _ in range(self.spare))
            buffers["state"] = (*(span(4, 1000) for _ in range(3)), *spare)
            pools.append(LogicalPool(name="mamba", kind=PoolKind.SLOT, page_size=1))
        return KVCacheDescription(
            family="windowed",
            page_size=self.page_size,
            buffers=buffers,
            layers=tuple(LayerFacts(layer=i, global_layer=i) for i in range(3)),
            logical_pools=tuple(pools),
        )


def write_cache(folder: Path, cache: Cache | None = None) -> Path:
    """Write the JSON form of a cache, and return the file."""
    path = folder / "cache.json"
    path.write_text(description_to_json((cache or Cache()).describe()))
    return path
