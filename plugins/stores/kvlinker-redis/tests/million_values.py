"""A million objects on a Redis server, set there by its own client as the frames that the store would write."""

from __future__ import annotations

import xxhash
from redis_server import RedisServer

from kvlinker.testing.many_objects import ManyObjects
from kvlinker.testing.verdicts import expect
from kvlinker_redis import RedisStore

__all__ = ["MillionValues"]


class MillionValues:
    """The objects, the store that is asked for them, and the client that set them."""

    def __init__(self, store: RedisStore, server: RedisServer, prefix: str) -> None:
        """Take a store on a server that holds nothing."""
        self._objects = ManyObjects()
        self._store = store
        self._server = server
        self._prefix = prefix

    def _name(self, key: bytes) -> str:
        return f"{self._prefix}:{{{key.hex()}}}"

    def store(self, count: int) -> None:
        """Set values of objects, once it is sure that they are those that the store itself writes.

        Raises:
            AssertionError: they are others.
        """
        with self._server.client() as client:
            for number, keys in enumerate(self._objects.calls(count)):
                values = self._objects.values(keys, checksum=xxhash.xxh3_64_intdigest)
                if not number:
                    self._objects.write(self._store, keys[:2])
                    written: object = client.mget([self._name(key) for key in keys[:2]])
                    expect("what the store wrote", written, values[:2])
                client.mset(
                    {self._name(key): value for key, value in zip(keys, values, strict=True)}
                )

    def count(self) -> int:
        """Return how many objects the store counts."""
        return self._store.stats().objects

    def found(self, count: int) -> int:
        """Return how many of the objects the store finds."""
        return sum(sum(self._store.exists(keys)) for keys in self._objects.calls(count))

    def check_some_bytes(self, count: int) -> None:
        """Read the objects of the first and the last call, and compare every byte."""
        calls = list(self._objects.calls(count))
        for keys in (calls[0], calls[-1]):
            self._objects.check(self._store, keys)

    def clear(self) -> int:
        """Remove all objects and return how many there were."""
        return self._store.clear(self._objects.namespace)
