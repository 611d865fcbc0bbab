"""Errors: every refusal has a type to catch, values to read and a next step in its text."""

from __future__ import annotations

__all__ = [
    "AmbiguousStrategyError",
    "BrokenPluginError",
    "ContractError",
    "DeviceCopyError",
    "DisabledPluginError",
    "DuplicatePluginError",
    "EventTimeoutError",
    "KVLinkerError",
    "PluginContractError",
    "PluginError",
    "PluginNotFoundError",
    "RegistrationError",
    "StalePoolError",
    "StoreBusyError",
    "StoreClosedError",
    "StoreContractError",
    "StoreError",
    "StoreFormatError",
    "StoreFullError",
    "StoreTimeoutError",
    "TransferRevokedError",
    "UnsupportedKVCacheError",
    "UnsupportedOperationError",
]


class KVLinkerError(Exception):
    """Any error that kvlinker raises on purpose."""


class ContractError(KVLinkerError, ValueError):
    """A value breaks a contract: it cannot be constructed, or an argument is refused."""


class StalePoolError(KVLinkerError, RuntimeError):
    """The memory behind a group moved or was given up: its plans must never be used again."""


class DeviceCopyError(KVLinkerError, RuntimeError):
    """A device failed a copy, or has no memory to copy through; the cause is chained."""


class PluginError(KVLinkerError):
    """Something is wrong with a plugin or with the way it was asked for."""


class PluginNotFoundError(PluginError, LookupError):
    """No installed distribution provides the plugin."""


class BrokenPluginError(PluginError, ImportError):
    """The plugin is installed, and loading it failed; the cause is chained."""


class DisabledPluginError(PluginError, LookupError):
    """The plugin is installed, and an allow or deny list keeps it from loading."""


class PluginContractError(PluginError, RuntimeError):
    """A plugin broke the plugin API: a wrong hook, API version or answer."""


class DuplicatePluginError(PluginError):
    """Two distributions claim one plugin name; choose one as `distribution:name`."""


class UnsupportedKVCacheError(KVLinkerError, LookupError):
    """No plugin understands the KV cache; the text says why each one declined."""


class AmbiguousStrategyError(KVLinkerError, LookupError):
    """Several plugins claim the KV cache and none specializes the others."""


class UnsupportedOperationError(KVLinkerError, NotImplementedError):
    """The selected plugin or store does not provide the operation."""


class StoreError(KVLinkerError, OSError):
    """A store could not do what it was asked; the engine sees a miss or a failed offload."""


class StoreTimeoutError(StoreError, TimeoutError):
    """A store did not answer within its deadline, or its circuit breaker is open."""


class StoreFullError(StoreError):
    """No space is left and nothing may be evicted."""


class StoreBusyError(StoreError):
    """Another process owns the store."""


class StoreFormatError(StoreError):
    """What lies in the store's place is not this store, or has another version."""


class StoreClosedError(StoreError):
    """The store was closed."""


class StoreContractError(KVLinkerError, RuntimeError):
    """A store broke its contract, such as answering with the wrong count."""


class RegistrationError(StoreError):
    """A store could not register device memory; every region registered before was rolled back."""


class EventTimeoutError(KVLinkerError, TimeoutError):
    """The engine's events did not come in time; the store is not to blame."""


class TransferRevokedError(KVLinkerError, RuntimeError):
    """The linker took the transfer back: pool memory may no longer be touched for it."""
