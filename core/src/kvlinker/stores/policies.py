"""Policies are the wrappers that a composition knows by name: what they are told, and what they make of a store."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from kvlinker.errors import ContractError
from kvlinker.secret_references import SecretReference
from kvlinker.store import Store
from kvlinker.stores.admitting import REMEMBERED, AdmittingStore
from kvlinker.stores.compressed import CompressedStore
from kvlinker.stores.encrypted import EncryptedStore
from kvlinker.stores.expiring import ExpiringStore
from kvlinker.stores.option_values import OptionValues
from kvlinker.stores.pinned import LEASE_SECONDS, PinningStore
from kvlinker.stores.quota import QuotaStore
from kvlinker.stores.read_only import ReadOnlyStore
from kvlinker.stores.retrying import RetryBounds, RetryingStore

__all__ = ["POLICIES", "OpenStore", "Policy", "Wrap"]

OpenStore: TypeAlias = Callable[[], Store]
Wrap: TypeAlias = Callable[[OpenStore], Store]
"""Opens a store and returns what is made of it; where that is refused, the store is closed."""
_T = TypeVar("_T")
_SECRET = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """One kind of wrapper."""

    title: str
    """In front of the store's own, where a start line names it."""
    options: tuple[str, ...]
    """Its own; `store` is everybody's."""
    read: Callable[[OptionValues], Wrap]
    """Takes the options, and refuses what is none of them with ContractError."""


def _around(open_store: OpenStore, make: Callable[[Store], Store]) -> Store:
    with ExitStack() as undo:
        store = open_store()
        undo.callback(store.close)
        made = make(store)
        undo.pop_all()
        return made


def _wrapping(make: Callable[[Store], Store]) -> Wrap:
    return lambda open_store: _around(open_store, make)


def _or(value: _T | None, default: _T) -> _T:
    return default if value is None else value


def _compressed(options: OptionValues) -> Wrap:
    level = _or(options.integer("level", at_least=1), 1)
    item_bytes = _or(options.integer("item_bytes", at_least=1), 2)
    return _wrapping(lambda store: CompressedStore(store, level=level, item_bytes=item_bytes))


def _encrypted(options: OptionValues) -> Wrap:
    secret = options.values.get("secret")
    if secret is None:
        msg = f"{options.where}.secret is needed: 64 hexadecimal digits, such as of `openssl rand -hex 32`"
        raise ContractError(msg)

    def wrap(open_store: OpenStore) -> Store:
        # Looked at when the store is opened: before, it may be a reference to where it is.
        found = _secret_bytes(_revealed(secret))
        return _around(open_store, lambda store: EncryptedStore(store, found))

    return wrap


def _revealed(secret: object) -> object:
    reference = SecretReference.of_value(secret)
    return secret if reference is None else reference.read("encrypted.secret")


def _secret_bytes(secret: object) -> bytes:
    if isinstance(secret, str) and _SECRET.fullmatch(secret):
        return bytes.fromhex(secret)
    msg = "encrypted.secret must be 64 hexadecimal digits, such as of `openssl rand -hex 32`, and is something else"
    raise ContractError(msg)


def _read_only(options: OptionValues) -> Wrap:  # noqa: ARG001  # it has none
    return _wrapping(ReadOnlyStore)


def _expiring(options: OptionValues) -> Wrap:
    seconds = options.required("seconds", options.seconds("seconds"), "86400 or '24h'")
    return _wrapping(lambda store: ExpiringStore(store, seconds=seconds))


def _admission(options: OptionValues) -> Wrap:
    count = _or(options.integer("remember", at_least=2), REMEMBERED)
    return _wrapping(lambda store: AdmittingStore(store, remember=count))


def _pinned(options: OptionValues) -> Wrap:
    capacity = options.required("capacity", options.size("capacity"), "'20GiB'")
    namespaces = options.namespaces("namespaces")
    uses = options.integer("uses", at_least=1)
    lease_seconds = _or(options.seconds("lease_seconds"), LEASE_SECONDS)
    if not namespaces and uses is None:
        msg = f"{options.where} pins nothing without namespaces or uses, such as 'uses': 3"
        raise ContractError(msg)
    return _wrapping(
        lambda store: PinningStore(
            store,
            max_bytes=capacity,
            namespaces=namespaces,
            uses=uses,
            lease_seconds=lease_seconds,
        )
    )


def _retrying(options: OptionValues) -> Wrap:
    usual = RetryBounds()
    bounds = RetryBounds(
        attempts=_or(options.integer("attempts", at_least=1), usual.attempts),
        first_seconds=_or(options.seconds("first_seconds"), usual.first_seconds),
        lookup_seconds=_or(options.seconds("lookup_seconds"), usual.lookup_seconds),
        transfer_seconds=_or(options.seconds("transfer_seconds"), usual.transfer_seconds),
        share=_or(options.number("share", at_most=1.0), usual.share),
    )
    return _wrapping(lambda store: RetryingStore(store, bounds))


def _quota(options: OptionValues) -> Wrap:
    size, named = options.size("bytes"), options.sizes_of_namespaces("namespaces")
    if size is None and not named:
        msg = (
            f"{options.where} limits nothing without bytes or namespaces, such as 'bytes': '50GiB'"
        )
        raise ContractError(msg)
    return _wrapping(lambda store: QuotaStore(store, max_bytes=size, namespaces=named))


POLICIES: Mapping[str, Policy] = {
    "admission": Policy(title="admitting", options=("remember",), read=_admission),
    "compressed": Policy(title="compressed", options=("level", "item_bytes"), read=_compressed),
    "encrypted": Policy(title="encrypted", options=("secret",), read=_encrypted),
    "expiring": Policy(title="expiring", options=("seconds",), read=_expiring),
    "pinned": Policy(
        title="pinning", options=("capacity", "namespaces", "uses", "lease_seconds"), read=_pinned
    ),
    "quota": Policy(title="limited", options=("bytes", "namespaces"), read=_quota),
    "read_only": Policy(title="read-only", options=(), read=_read_only),
    "retrying": Policy(
        title="retrying",
        options=("attempts", "first_seconds", "lookup_seconds", "transfer_seconds", "share"),
        read=_retrying,
    ),
}
"""By the names that they have in a configuration, which are no plugins'."""
