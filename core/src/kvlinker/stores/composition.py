"""A composition names stores and how they are put together, as a configuration writes it.

`{NAME: OPTIONS}` is the store of a plugin, a list is tiers from near to far, and so is `{"tiers": {"stores": [...]}}`
with options of its own. A policy, such as `{"encrypted": {"secret": ..., "store": ...}}`, has one of all these in it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain, count

from kvlinker.errors import ContractError, PluginNotFoundError
from kvlinker.registry import PluginRegistry
from kvlinker.spelling import nearest_names
from kvlinker.store import Store
from kvlinker.stores.option_values import OptionValues, kind_of
from kvlinker.stores.policies import POLICIES, Policy, Wrap
from kvlinker.stores.tiered import PROMOTION_BYTES, tiered
from kvlinker.stores.write_back import WriteBackLimits

__all__ = ["TIERS", "StoreTree", "compose"]

TIERS = "tiers"
"""A name that is no plugin's: of stores in front of each other."""
_MAX_DEPTH = 32
"""Of stores in each other: what is deeper is a mistake, and would end in Python's own limit."""
_WRITE_BACK = ("write_back_bytes", "write_back_objects")


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
        try:
            plugin = registry.store(self.plugin)
        except PluginNotFoundError as error:
            meant = nearest_names(self.plugin.replace("-", "_"), (TIERS, *POLICIES))
            if not meant:
                raise
            msg = f"{error}; of what needs no plugin, did you mean {' or '.join(meant)}?"
            raise PluginNotFoundError(msg) from error
        return plugin.open(self.options)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tiers(StoreTree):
    """Stores in front of each other, from near to far."""

    stores: tuple[StoreTree, ...]
    promotion_bytes: int
    write_back: WriteBackLimits | None

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
            made = tiered(opened, promotion_bytes=self.promotion_bytes, write_back=self.write_back)
            undo.pop_all()
            return made

    def _names(self) -> list[str]:
        """Return a name for each store: of two alike, the second one is the `file_2`."""
        names: list[str] = []
        for store in self.stores:
            numbered = (f"{store.name}_{number}" for number in count(2))
            names.append(next(name for name in chain([store.name], numbered) if name not in names))
        return names


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wrapped(StoreTree):
    """A store with a policy around it."""

    policy: Policy
    store: StoreTree
    wrap: Wrap = field(repr=False)
    """Knows the options, a secret among them."""

    @property
    def name(self) -> str:
        return self.store.name

    @property
    def title(self) -> str:
        return f"{self.policy.title} {self.store.title}"

    @property
    def plugins(self) -> tuple[str, ...]:
        return self.store.plugins

    def open(self, registry: PluginRegistry) -> Store:
        return self.wrap(lambda: self.store.open(registry))


def compose(name: str, options: Mapping[str, object]) -> StoreTree:
    """Return the store of a name and its options.

    Args:
        name: of a store plugin, also as `distribution:name`, or `tiers`, or one of `kvlinker.stores.policies`.
        options: the plugin's own, which it checks when it is opened; of `tiers`: `stores`, a list of which each
            is `{NAME: OPTIONS}` or a list again, `promotion_bytes`, as `TieredStore` takes it, `write`, which is
            "through" or "back", and for "back" `write_back_bytes` and `write_back_objects`; of a policy: `store`,
            such a one, and the policy's own.

    Raises:
        ContractError: something is none of this; the text says where and what is meant.
    """
    return _named(name, options, where=name)


def _tree(config: object, where: str, depth: int) -> StoreTree:
    if depth > _MAX_DEPTH:  # also where something lies in itself
        msg = f"stores lie in each other more than {_MAX_DEPTH} deep, from {where[:80]}... on; take wrappers away"
        raise ContractError(msg)
    if isinstance(config, Mapping) and len(config) == 1:
        ((name, options),) = config.items()
        return _named(name, options, where=f"{where}.{name}", depth=depth)
    if isinstance(config, Sequence) and not isinstance(config, str | bytes):
        return _tiers({"stores": config}, where, depth)
    msg = f'{where} must be {{"NAME": {{OPTIONS}}}} or a list of such, got {kind_of(config)}'
    raise ContractError(msg)


def _named(name: object, options: object, *, where: str, depth: int = 0) -> StoreTree:
    if not isinstance(name, str) or not name:
        msg = f"{where}: a store is asked for by the name of its plugin, got {kind_of(name)}"
        raise ContractError(msg)
    if not isinstance(options, Mapping):
        msg = f"{where} must be an object with the store's options, got {kind_of(options)}"
        raise ContractError(msg)
    if name == TIERS:
        return _tiers(options, where, depth)
    policy = POLICIES.get(name)
    if policy is not None:
        return _wrapped(policy, options, where, depth)
    return _PluginStore(plugin=name, options={str(key): item for key, item in options.items()})


def _tiers(options: Mapping[object, object], where: str, depth: int) -> StoreTree:
    values = OptionValues(values=options, where=where)
    values.check_known(("stores", "promotion_bytes", "write", *_WRITE_BACK))
    stores = options.get("stores")
    is_list = isinstance(stores, Sequence) and not isinstance(stores, str | bytes)
    if not isinstance(stores, Sequence) or not is_list or not stores:
        msg = f"{where}.stores must be a list of stores from near to far, got {kind_of(stores)}"
        raise ContractError(msg)
    size = values.size("promotion_bytes")
    return _Tiers(
        stores=tuple(_tree(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(stores)),
        promotion_bytes=PROMOTION_BYTES if size is None else size,
        write_back=_write_back(values),
    )


def _write_back(values: OptionValues) -> WriteBackLimits | None:
    write = values.values.get("write", "through")
    size = values.size("write_back_bytes")
    objects = values.integer("write_back_objects", at_least=1)
    if write not in ("through", "back"):
        msg = f'{values.where}.write must be "through" or "back", got {kind_of(write)}'
        raise ContractError(msg)
    if size == 0:
        msg = f'{values.where}.write_back_bytes must be at least 1; write "through" instead'
        raise ContractError(msg)
    if write == "back":
        usual = WriteBackLimits()
        return WriteBackLimits(
            max_bytes=usual.max_bytes if size is None else size,
            max_objects=usual.max_objects if objects is None else objects,
        )
    if size is not None or objects is not None:
        msg = f'{values.where}: {" and ".join(_WRITE_BACK)} mean nothing without "write": "back"'
        raise ContractError(msg)
    return None


def _wrapped(policy: Policy, options: Mapping[object, object], where: str, depth: int) -> StoreTree:
    values = OptionValues(values=options, where=where)
    values.check_known((*policy.options, "store"))
    wrap = policy.read(values)
    store = _tree(options.get("store"), f"{where}.store", depth + 1)
    return _Wrapped(policy=policy, wrap=wrap, store=store)
