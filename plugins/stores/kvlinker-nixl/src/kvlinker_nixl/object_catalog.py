"""The catalog of a bucket: which objects there are and how long they are, which NIXL itself cannot say.

Bytes of objects never come this way; obstore lists, measures and removes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from kvlinker.errors import StoreError, StoreTimeoutError
from kvlinker.keys import NAMESPACE_BYTES, OBJECT_KEY_BYTES
from kvlinker.named_values import digits_of_key, digits_of_namespace, parts_of
from kvlinker.store import ObjectKey
from kvlinker.store_lanes import StoreLane
from kvlinker_nixl.options import NixlStoreOptions

if TYPE_CHECKING:
    from obstore.store import S3Config, S3Store

__all__ = ["ObjectCatalog"]

_A = TypeVar("_A")
_T = TypeVar("_T")
_THREADS = 16
_LISTED = 1000
_MAX_TEXT = 400
_NAMESPACE = 2 * NAMESPACE_BYTES
_FOLDERS = _NAMESPACE + 2
_HEX = frozenset("0123456789abcdef")


class ObjectCatalog(StoreLane):
    """Questions about objects in one direction, several at once, each with a deadline."""

    def __init__(self, options: NixlStoreOptions, label: str) -> None:
        """Ask nothing yet.

        Raises:
            StoreError: obstore is not installed, refuses the options, or a secret is not where it should be.
        """
        super().__init__(label, pause_seconds=options.pause_seconds)
        self._folder = options.prefix
        self._client = _client_of(options)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvlinker-nixl-catalog")

    # ---- names ----------------------------------------------------------------------------------

    def name_of(self, key: ObjectKey) -> str:
        """Return an object's name: a folder for the namespace, and 256 in it."""
        digits = digits_of_key(key)
        rest = f"{digits[_NAMESPACE:_FOLDERS]}/{digits[_FOLDERS:]}"
        return f"{self._folder}/{digits[:_NAMESPACE]}/{rest}"

    def _is_object(self, name: str) -> bool:
        digits = name.removeprefix(f"{self._folder}/").replace("/", "")
        is_key = len(digits) == 2 * OBJECT_KEY_BYTES and _HEX.issuperset(digits)
        return is_key and name == self.name_of(bytes.fromhex(digits))

    # ---- questions ------------------------------------------------------------------------------

    def lengths(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        """Return how long objects are; None where there is none.

        Raises:
            StoreError: the server cannot be asked.
        """
        return self._each(self._length, [self.name_of(key) for key in keys])

    def _length(self, name: str) -> int | None:
        try:
            return self._client.head(name)["size"]
        except FileNotFoundError:
            return None

    def remove(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Remove objects; True where there was one.

        Raises:
            StoreError: the server cannot be asked; some may be gone.
        """
        there = [length is not None for length in self.lengths(keys)]
        first = {key: at for at, key in reversed(list(enumerate(keys)))}
        is_first = [
            is_there and first[key] == at
            for at, (key, is_there) in enumerate(zip(keys, there, strict=True))
        ]
        chosen = [key for key, is_one in zip(keys, is_first, strict=True) if is_one]
        self._remove([self.name_of(key) for key in chosen])
        return is_first

    def _remove(self, names: Sequence[str]) -> None:
        parts = [names[part] for part in parts_of(len(names), _LISTED)]
        self._each(self._remove_part, parts)

    def _remove_part(self, names: Sequence[str]) -> None:
        try:
            self._client.delete(list(names))
        except FileNotFoundError:
            for name in names:
                self._remove_one(name)

    def _remove_one(self, name: str) -> None:
        try:
            self._client.delete(name)
        except FileNotFoundError:
            return

    def clear(self, namespace: bytes) -> int:
        """Remove the objects of a namespace, and return how many.

        Raises:
            ContractError: that is no namespace.
            StoreError: the server cannot be asked; some may be gone.
        """
        removed = 0
        for page in self.pages(f"{self._folder}/{digits_of_namespace(namespace)}"):
            self._remove([name for name, _ in page])
            removed += len(page)
        return removed

    def pages(self, folder: str | None = None) -> Iterator[Sequence[tuple[str, int]]]:
        """Yield names and lengths of objects, in a folder or all, page by page.

        Raises:
            StoreError: the server cannot be asked.
        """
        (stream,) = self._each(
            lambda name: self._client.list(name, chunk_size=_LISTED), [folder or self._folder]
        )
        while (page := self._each(lambda one: next(one, None), [stream])[0]) is not None:
            yield [(item["path"], item["size"]) for item in page if self._is_object(item["path"])]

    def _each(self, ask: Callable[[_A], _T], asked: Sequence[_A]) -> list[_T]:
        """Ask the same for several things at once.

        Raises:
            StoreClosedError: the store was closed.
            StoreTimeoutError: the server cannot be reached, now or lately.
        """
        from obstore.exceptions import BaseError

        def answers() -> list[_T]:
            try:
                if len(asked) == 1:
                    return [ask(asked[0])]
                return list(self._threads.map(ask, asked))
            except (BaseError, OSError) as error:
                self.give_up()
                msg = f"{self}: the server cannot be asked: {_brief(error)}; look at bucket, endpoint, region and keys"
                raise StoreTimeoutError(msg) from None

        return self.guarded(answers)

    def close(self) -> None:
        """See StoreLane; what runs ends by itself, and touches no pool memory."""
        super().close()
        self._threads.shutdown(wait=False, cancel_futures=True)


def _client_of(options: NixlStoreOptions) -> S3Store:
    try:
        from obstore.store import S3Store as ObstoreClient
    except ImportError as error:
        msg = f"nixl store {options.place}: the backend OBJ needs obstore ({error}); pip install 'kvlinker-nixl[obj]'"
        raise StoreError(msg) from error
    config: S3Config = {
        "region": options.region,
        "virtual_hosted_style_request": not options.endpoint,
    }
    if options.endpoint:
        config["endpoint"] = options.endpoint
    name, key = options.read_keys()
    if name:
        config["access_key_id"] = name
    if key:
        config["secret_access_key"] = str(key)
    seconds = timedelta(seconds=options.connect_seconds)
    try:
        return ObstoreClient(
            options.bucket,
            config=config,
            client_options={
                "allow_http": options.endpoint.startswith("http://"),
                "connect_timeout": seconds,
                "timeout": seconds,
            },
            retry_config={"max_retries": 2, "retry_timeout": seconds},
        )
    except Exception as error:  # noqa: BLE001  # whatever it says may repeat a setting
        msg = (
            f"nixl store {options.place}: obstore refuses the options with a {type(error).__name__}"
        )
        raise StoreError(msg) from None


def _brief(error: Exception) -> str:
    text = str(error).split("Debug source:", maxsplit=1)[
        0
    ]  # behind it, the library shows its own structure
    return " ".join(text.split())[:_MAX_TEXT]
