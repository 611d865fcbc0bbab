"""A composition names stores and how they are put together, as a configuration writes it.

`{NAME: OPTIONS}` is the store of a plugin, a list is tiers from near to far, and so is `{"tiers": {"stores": [...]}}`
with options of its own. `{"encrypted": {"secret": ..., "store": ...}}` and `{"read_only": {"store": ...}}` have one
of all these in them.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from kvlinker.errors import ContractError
from kvlinker.integers import as_integer
from kvlinker.registry import PluginRegistry
from kvlinker.spelling import nearest_names
from kvlinker.store import Store
from kvlinker.stores.encrypted import EncryptedStore
from kvlinker.stores.read_only import ReadOnlyStore
from kvlinker.stores.tiered import PROMOTION_BYTES, tiered

__all__ = ["ENCRYPTED", "READ_ONLY", "TIERS", "StoreTree", "compose"]

TIERS = "tiers"
"""A name that is no plugin's: of stores in front of each other."""
ENCRYPTED = "encrypted"
"""A name that is no plugin's: of a store that sees no object as it is."""
READ_ONLY = "read_only"
"""A name that is no plugin's: of a store that is read and not written."""
_SECRET = re.compile(r"[0-9a-fA-F]{64}")


class StoreTree(ABC):
    """A store as it was asked for, checked and not open yet."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What it is called where there is only one like it."""

    @property
    @abstractmethod
    def title(self) -> str:
        """All of its stores in a few words."""

    @property
    @abstractmethod
    def plugins(self) -> tuple[str, ...]:
        """Names of the store plugins that it needs, each once."""

    @abstractmethod
    def open(self, registry: PluginRegistry) -> Store:
        """Open every store that is named, or none.

        Raises:
            PluginError: a plugin is absent, disabled, broken or doubly claimed, raised, or returned no store.
            KVLinkerError: whatever a store refuses with; those that were opened before are closed.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class _PluginStore(StoreTree):
    """A plugin's store with the plugin's own options."""

    plugin: str
    options: Mapping[str, object]

    @property
    def name(self) -> str:
        return self.plugin.rpartition(":")[2]

    @property
    def title(self) -> str:
        return self.plugin

    @property
    def plugins(self) -> tuple[str, ...]:
        return (self.plugin,)

    def open(self, registry: PluginRegistry) -> Store:
        return registry.store(self.plugin).open(self.options)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tiers(StoreTree):
    """Stores in front of each other, from near to far."""

    stores: tuple[StoreTree, ...]
    promotion_bytes: int

    @property
    def name(self) -> str:
        return TIERS

    @property
    def title(self) -> str:
        return " > ".join(store.title for store in self.stores)

    @property
    def plugins(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for store in self.stores for name in store.plugins))

    def open(self, registry: PluginRegistry) -> Store:
        with ExitStack() as undo:
            opened: list[tuple[str, Store]] = []
            for name, tree in zip(self._names(), self.stores, strict=True):
                store = tree.open(registry)
                undo.callback(store.close)
                opened.append((name, store))
            made = tiered(opened, promotion_bytes=self.promotion_bytes)
            undo.pop_all()
            return made

    def _names(self) -> list[str]:
        """Return a name for each store: of two alike, the second one is the `file_2`."""
        names: list[str] = []
        for store in self.stores:
            alike = sum(before.name == store.name for before in self.stores[: len(names)])
            names.append(f"{store.name}_{alike + 1}" if alike else store.name)
        return names


@dataclass(frozen=True, slots=True, kw_only=True)
class _Encrypted(StoreTree):
    """A store that sees no object as it is."""

    store: StoreTree
    secret: object = field(repr=False)
    """Looked at when the store is opened: before, it may be a reference to where it is."""

    @property
    def name(self) -> str:
        return self.store.name

    @property
    def title(self) -> str:
        return f"{ENCRYPTED} {self.store.title}"

    @property
    def plugins(self) -> tuple[str, ...]:
        return self.store.plugins

    def open(self, registry: PluginRegistry) -> Store:
        secret = _secret_bytes(self.secret)
        with ExitStack() as undo:
            store = self.store.open(registry)
            undo.callback(store.close)
            made = EncryptedStore(store, secret)
            undo.pop_all()
            return made


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReadOnly(StoreTree):
    """A store that is read and not written."""

    store: StoreTree

    @property
    def name(self) -> str:
        return self.store.name

    @property
    def title(self) -> str:
        return f"read-only {self.store.title}"

    @property
    def plugins(self) -> tuple[str, ...]:
        return self.store.plugins

    def open(self, registry: PluginRegistry) -> Store:
        return ReadOnlyStore(self.store.open(registry))


def _secret_bytes(secret: object) -> bytes:
    if isinstance(secret, str) and _SECRET.fullmatch(secret):
        return bytes.fromhex(secret)
    msg = f"{ENCRYPTED}.secret must be 64 hexadecimal digits, such as of `openssl rand -hex 32`, and is something else"
    raise ContractError(msg)


def compose(name: str, options: Mapping[str, object]) -> StoreTree:
    """Return the store of a name and its options.

    Args:
        name: of a store plugin, also as `distribution:name`, or `tiers`, `encrypted` or `read_only`.
        options: the plugin's own, which it checks when it is opened; of `tiers`: `stores`, a list of which each
            is `{NAME: OPTIONS}` or a list again, and `promotion_bytes`, as `TieredStore` takes it; of `encrypted`:
            `store`, such a one, and `secret`, 64 hexadecimal digits when it is opened; of `read_only`: `store`.

    Raises:
        ContractError: something is none of this; the text says where and what is meant.
    """
    return _named(name, options, where=name)


def _tree(config: object, where: str) -> StoreTree:
    if isinstance(config, Mapping) and len(config) == 1:
        ((name, options),) = config.items()
        return _named(name, options, where=f"{where}.{name}")
    if isinstance(config, Sequence) and not isinstance(config, str | bytes):
        return _tiers({"stores": config}, where)
    msg = f'{where} must be {{"NAME": {{OPTIONS}}}} or a list of such, got {_kind(config)}'
    raise ContractError(msg)


def _named(name: object, options: object, *, where: str) -> StoreTree:
    if not isinstance(name, str) or not name:
        msg = f"{where}: a store is asked for by the name of its plugin, got {_kind(name)}"
        raise ContractError(msg)
    if not isinstance(options, Mapping):
        msg = f"{where} must be an object with the store's options, got {_kind(options)}"
        raise ContractError(msg)
    if name == TIERS:
        return _tiers(options, where)
    if name == ENCRYPTED:
        return _encrypted(options, where)
    if name == READ_ONLY:
        _check_known(options, ("store",), where)
        return _ReadOnly(store=_tree(options.get("store"), f"{where}.store"))
    return _PluginStore(plugin=name, options={str(key): item for key, item in options.items()})


def _tiers(options: Mapping[object, object], where: str) -> StoreTree:
    _check_known(options, ("stores", "promotion_bytes"), where)
    stores = options.get("stores")
    is_list = isinstance(stores, Sequence) and not isinstance(stores, str | bytes)
    if not isinstance(stores, Sequence) or not is_list or not stores:
        msg = f"{where}.stores must be a list of stores from near to far, got {_kind(stores)}"
        raise ContractError(msg)
    size = options.get("promotion_bytes", PROMOTION_BYTES)
    return _Tiers(
        stores=tuple(_tree(item, f"{where}[{i}]") for i, item in enumerate(stores)),
        promotion_bytes=as_integer(size, f"{where}.promotion_bytes", at_least=0),
    )


def _encrypted(options: Mapping[object, object], where: str) -> StoreTree:
    _check_known(options, ("secret", "store"), where)
    if options.get("secret") is None:
        msg = f"{where}.secret is needed: 64 hexadecimal digits, such as of `openssl rand -hex 32`"
        raise ContractError(msg)
    return _Encrypted(store=_tree(options.get("store"), f"{where}.store"), secret=options["secret"])


def _check_known(options: Mapping[object, object], known: Sequence[str], where: str) -> None:
    for name in options:
        if name not in known:
            close = " or ".join(map(repr, nearest_names(str(name), known, cutoff=0.5)))
            hint = f"did you mean {close}?" if close else f"it takes {', '.join(known)}"
            msg = f"{where}: unknown option {name!r}; {hint}"
            raise ContractError(msg)


def _kind(value: object) -> str:
    """Return what a value is, and not the value: it may be a secret."""
    if isinstance(value, Mapping):
        return f"an object with {len(value)} names"
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return f"a list of {len(value)}"
    return "nothing" if value is None else f"a value of type {type(value).__name__}"
