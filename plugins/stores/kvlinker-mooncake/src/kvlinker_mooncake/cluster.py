"""The master's metrics server, which is the only one that can count: the client lists nothing."""

from __future__ import annotations

import http.client
import re
from dataclasses import dataclass

from kvlinker.errors import StoreError, StoreTimeoutError
from kvlinker_mooncake.names import Names

__all__ = ["Cluster", "count_objects"]

_LISTED = 200_000
"""Up to so many objects are told apart by their names; more take more time than a figure is worth."""
_MAX_ANSWER = 64 << 20
_KEYS = re.compile(r"^master_key_count (\d+)", re.MULTILINE)
_BYTES = re.compile(r"^master_allocated_bytes (\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What a cluster holds now."""

    objects: int
    """Of one store, or of all where there are too many to tell."""
    used_bytes: int
    """Of everything in the cluster's memory, whoever wrote it."""
    is_exact: bool
    """Whether the objects are those of one store."""


def count_objects(address: str, names: Names, *, seconds: float) -> Cluster:
    """Ask a metrics server.

    Raises:
        StoreTimeoutError: it did not answer in time.
        StoreError: it cannot be reached, or answers something else.
    """
    figures = _ask(address, "/metrics", seconds)
    keys, used = _KEYS.search(figures), _BYTES.search(figures)
    if keys is None or used is None:
        msg = f"mooncake store: {address}/metrics counts no keys; is that the metrics server of the master?"
        raise StoreError(msg)
    total, used_bytes = int(keys[1]), int(used[1])
    if total > _LISTED:
        return Cluster(objects=total, used_bytes=used_bytes, is_exact=False)
    listed = _ask(address, "/get_all_keys", seconds).split("\n")
    own = sum(map(names.is_object, listed))
    return Cluster(objects=own, used_bytes=used_bytes, is_exact=True)


def _ask(address: str, path: str, seconds: float) -> str:
    connection = http.client.HTTPConnection(address, timeout=seconds)
    try:
        connection.request("GET", path)
        with connection.getresponse() as answer:
            text = answer.read(_MAX_ANSWER).decode("utf-8", "replace")
        if answer.status != http.client.OK:
            msg = f"mooncake store: {address}{path} answered {answer.status}; is that the master's metrics server?"
            raise StoreError(msg)
        return text
    except TimeoutError as error:
        msg = f"mooncake store: {address}{path} did not answer within {seconds} s"
        raise StoreTimeoutError(msg) from error
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, StoreError):
            raise
        msg = f"mooncake store: {address}{path} cannot be asked: {error}"
        raise StoreError(msg) from error
    finally:
        connection.close()
