"""The object store: the contract's methods, each a few lines over the state of the open store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kvlinker.framed_store import FramedStore
from kvlinker.named_values import parts_of
from kvlinker.store import ObjectKey, StoreStats, WriteBatch
from kvlinker_s3.figures import ListedFigures
from kvlinker_s3.half_written import sweep
from kvlinker_s3.options import S3StoreOptions
from kvlinker_s3.requests import delete, size_of
from kvlinker_s3.state import StoreState
from kvlinker_s3.writing import MAX_OBJECT_BYTES, S3Write

if TYPE_CHECKING:
    from obstore import ListStream, ObjectMeta
    from obstore.store import ObjectStore

__all__ = ["S3Store"]

_LISTED = 1000
"""Names in one answer of a listing, and in one request to remove."""


class S3Store(FramedStore):
    """Objects of a bucket, a container or a directory, which nothing is evicted from."""

    def __init__(self, options: S3StoreOptions) -> None:
        """Look whether objects can be listed; in a directory, remove files that were never finished.

        Raises:
            ContractError: a setting is unknown, or settings do not fit together.
            StoreTimeoutError: the server cannot be reached.
            StoreError: it refuses, has no such bucket, or a secret is not where it should be.
        """
        self._state = state = StoreState(options)
        super().__init__(
            reads=state.reads,
            writes=state.writes,
            values=state.read_values,
            framed=state.framed,
            max_object_bytes=MAX_OBJECT_BYTES,
        )
        self._figures = ListedFigures(self._sizes)
        try:
            next(self._list(options.prefix), None)
            if options.scheme == "file":
                sweep(options.url, options.prefix)
        except BaseException:
            self.close()
            raise

    # ---- looking ------------------------------------------------------------------------------

    def exists(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """See Store; the server is asked once for each key.

        Raises:
            StoreError: the server cannot be asked.
        """
        sizes = self._state.reads.run(
            [size_of(name) for name in self._state.names.of_objects(keys)]
        )
        return tuple(bool(size) for size in sizes)

    def stats(self) -> StoreStats:
        """See Store; objects are listed, and figures of more than 10,000 are kept for five minutes.

        Up to 200,000 are listed; the counter `uncounted` is 1 where there are more.

        Raises:
            StoreError: the server cannot be asked.
        """
        figures = self._figures.read()
        counters = dict(self._state.framed.counters)
        if not figures.is_complete:
            counters["uncounted"] = 1
        return StoreStats(
            objects=figures.objects,
            used_bytes=figures.used_bytes,
            capacity_bytes=None,
            counters=counters,
        )

    def _sizes(self) -> Iterator[Sequence[int]]:
        for page in self._list(self._state.options.prefix):
            yield [size for _, size in page]

    # ---- moving -------------------------------------------------------------------------------

    def begin_write(self, batches: Sequence[WriteBatch]) -> S3Write:
        """See FramedStore."""
        self._state.writes.check_up()
        return S3Write(self._state, batches)

    # ---- removing -----------------------------------------------------------------------------

    def delete(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """See Store; of two that remove an object at once, both may hear that it was there.

        Raises:
            StoreError: the server cannot be asked; some may have been removed.
        """
        names = self._state.names.of_objects(keys)
        # Most servers say of an absent object that it was removed.
        sizes = self._state.reads.run([size_of(name) for name in names])
        there = [size is not None for size in sizes]
        self._remove([name for name, is_there in zip(names, there, strict=True) if is_there])
        first = {name: at for at, name in reversed(list(enumerate(names)))}
        return tuple(is_there and first[names[at]] == at for at, is_there in enumerate(there))

    def clear(self, namespace: bytes) -> int:
        """See Store; the namespace's objects are listed.

        Raises:
            ContractError: that is no namespace.
            StoreError: the server cannot be asked; some objects may have been removed.
        """
        removed = 0
        for page in self._list(self._state.names.folder_of(namespace)):
            self._remove([name for name, _ in page])
            removed += len(page)
        return removed

    def _remove(self, names: Sequence[str]) -> None:
        """Remove objects, as many in a request as the server takes."""
        names = list(dict.fromkeys(names))
        parts = [names[part] for part in parts_of(len(names), _LISTED)]
        done = self._state.reads.run([delete(part) for part in parts])
        # Where one that was gone already is an error, the others are removed one by one.
        left = [
            name for part, is_done in zip(parts, done, strict=True) if not is_done for name in part
        ]
        self._state.reads.run([delete([name]) for name in left])

    def _list(self, folder: str) -> Iterator[Sequence[tuple[str, int]]]:
        """Yield names and lengths of objects, page by page."""
        lane = self._state.reads

        def begin(client: ObjectStore) -> ListStream[Sequence[ObjectMeta]]:
            return client.list(folder, chunk_size=_LISTED)

        def go_on(_: ObjectStore) -> Sequence[ObjectMeta] | None:
            return next(stream, None)

        (stream,) = lane.run([begin])
        while (page := lane.run([go_on])[0]) is not None:
            yield [
                (item["path"], item["size"])
                for item in page
                if self._state.names.is_object(item["path"])
            ]
