"""Keys: the only place where a key is built, from tagged and length-framed fields."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvlinker.description import RankAxis
from kvlinker.errors import ContractError
from kvlinker.integers import as_integer
from kvlinker.transfers import PageKey

__all__ = [
    "NAMESPACE_BYTES",
    "OBJECT_KEY_BYTES",
    "KeyBuilder",
    "KeyNamespace",
    "check_keys",
    "checked_key",
    "checked_namespace",
    "digest_fields",
    "encode_fields",
]

NAMESPACE_BYTES = 12
"""An object key begins with the digest of its namespace, so that listing and clearing can stay within it."""
OBJECT_KEY_BYTES = 32
"""Length of an object key: 12 bytes of namespace, 20 bytes (160 bits) of everything."""
_MAX_INTEGER_BITS = 256
"""Ranks, sizes and layers are small; Python refuses to spell very long integers."""
_KEPT_KEYS = 8192
"""Object keys that a builder remembers, of one digest each: some 2 MB."""
_MAX_SECRET_BYTES = 64
"""Longest key that BLAKE2b takes (RFC 7693)."""


def checked_key(key: bytes) -> bytes:
    """Return an object key.

    Raises:
        ContractError: it has another length.
    """
    if len(key) != OBJECT_KEY_BYTES:
        msg = f"an object key has {OBJECT_KEY_BYTES} bytes, got {len(key)}; build it with a KeyBuilder"
        raise ContractError(msg)
    return key


def check_keys(keys: Sequence[bytes]) -> None:
    """Do nothing where all are object keys; see `checked_key`."""
    if not set(map(len, keys)) <= {OBJECT_KEY_BYTES}:
        for key in keys:
            checked_key(key)


def checked_namespace(namespace: bytes) -> bytes:
    """Return what the object keys of a namespace begin with.

    Raises:
        ContractError: it has another length.
    """
    if len(namespace) != NAMESPACE_BYTES:
        msg = f"a namespace has {NAMESPACE_BYTES} bytes, got {len(namespace)}; take those that its keys begin with"
        raise ContractError(msg)
    return namespace


def encode_fields(value: object) -> bytes:
    """Return an encoding that no other value has: a tag, a length, the bytes; tuples nest.

    The encoding never changes: every stored key depends on it.

    >>> encode_fields(("a", "b")) == encode_fields(("ab",))
    False

    Raises:
        ContractError: the value is not None, bool, int, str, bytes or a tuple of those.
    """
    if value is None:
        return b"n"
    if isinstance(value, bool):
        return b"b\x01" if value else b"b\x00"
    if isinstance(value, int):
        if value.bit_length() > _MAX_INTEGER_BITS:
            msg = f"a key field must be an integer of at most {_MAX_INTEGER_BITS} bits, got {value.bit_length()}"
            raise ContractError(msg)
        return _framed(b"i", str(value).encode("ascii"))
    if isinstance(value, str):
        return _framed(b"s", value.encode("utf-8", "surrogatepass"))
    if isinstance(value, bytes):
        return _framed(b"y", value)
    if isinstance(value, tuple):
        body = b"".join(encode_fields(item) for item in value)
        return b"t" + len(value).to_bytes(8, "little") + body
    msg = f"a key field must be None, bool, int, str, bytes or a tuple of those, got {type(value).__name__}"
    raise ContractError(msg)


def _framed(tag: bytes, body: bytes) -> bytes:
    return tag + len(body).to_bytes(8, "little") + body


def _encode_page_key(page_key: PageKey) -> bytes:
    """Return what `encode_fields` does, for the two types that a page key has: lookups encode thousands."""
    if isinstance(page_key, bytes) and page_key:
        return b"y" + len(page_key).to_bytes(8, "little") + page_key
    if isinstance(page_key, str) and page_key:
        return _framed(b"s", page_key.encode("utf-8", "surrogatepass"))
    msg = f"a page key must be non-empty text or bytes, got {page_key!r}"
    raise ContractError(msg)


def digest_fields(
    purpose: str, fields: tuple[object, ...], *, size: int, secret: bytes = b""
) -> bytes:
    """Return the BLAKE2b digest of the fields under a purpose, `size` bytes long."""
    body = encode_fields((purpose, fields))
    return hashlib.blake2b(body, digest_size=size, key=secret).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyNamespace:
    """Whose values these are: two namespaces never share an object."""

    model_id: str
    producer: str
    """Engine that computed the values; two engines may share a layout and not the values."""
    weights_version: str | None = None
    value_format: str | None = None
    """Rotation of index keys, RoPE order, fp8 variant, as far as the layout does not say it."""
    tenant: str | None = None
    secret: bytes = field(default=b"", repr=False)
    """Keys the digest, so that a tenant's object names cannot be guessed from its text; up to 64 B."""

    def __post_init__(self) -> None:
        for name, value in self.fields:
            if value is not None and not isinstance(value, str):
                msg = f"a namespace's {name} must be text, got {value!r}"
                raise ContractError(msg)
        if not self.model_id or not self.producer:
            msg = f"a namespace needs a model id and a producer, got {self.model_id!r} and {self.producer!r}"
            raise ContractError(msg)
        # The secret itself never stands in a message.
        if not isinstance(self.secret, bytes) or len(self.secret) > _MAX_SECRET_BYTES:
            msg = f"a namespace secret must be at most {_MAX_SECRET_BYTES} bytes; hash a longer one first"
            raise ContractError(msg)

    @property
    def fields(self) -> tuple[tuple[str, str | None], ...]:
        """The fields in a fixed order, each under its name; a missing one differs from an empty one."""
        return (
            ("model_id", self.model_id),
            ("weights_version", self.weights_version),
            ("producer", self.producer),
            ("value_format", self.value_format),
            ("tenant", self.tenant),
        )

    @property
    def digest(self) -> bytes:
        """12 bytes that every object key of this namespace begins with."""
        return digest_fields(
            "kvlinker.namespace/1", self.fields, size=NAMESPACE_BYTES, secret=self.secret
        )


class KeyBuilder:
    """Builds the object keys of one pool's shard under one namespace and layout."""

    def __init__(
        self,
        namespace: KeyNamespace,
        *,
        fingerprint: bytes,
        layer_range: tuple[int, int],
        pool: str,
        rank_axes: Sequence[RankAxis] = (),
        part: int = 0,
    ) -> None:
        """Keep everything but the page key.

        Args:
            namespace: whose values these are.
            fingerprint: of the group's layout.
            layer_range: global layers [start, end) of the pipeline stage.
            pool: physical pool.
            rank_axes: axes that the pool is sharded over; none for a replicated one.
            part: number of the component where a page is several objects.

        Raises:
            ContractError: a missing pool or fingerprint, an empty layer range, an axis named twice.
        """
        axes = tuple(sorted((axis.name, axis.rank, axis.size) for axis in rank_axes))
        if not pool or not isinstance(fingerprint, bytes) or not fingerprint:
            msg = f"keys of pool {pool!r} need its name and the group's fingerprint, got {fingerprint!r}"
            raise ContractError(msg)
        if len({name for name, _, _ in axes}) != len(axes):
            msg = f"keys of pool {pool!r}: an axis is named twice in {axes}"
            raise ContractError(msg)
        where = f"keys of pool {pool!r}"
        start = as_integer(layer_range[0], f"{where}: first global layer", at_least=0)
        end = as_integer(layer_range[1], f"{where}: end of global layers", at_least=start + 1)
        number = as_integer(part, f"{where}: part", at_least=0)
        fields = (namespace.fields, fingerprint, pool, axes, (start, end), number)
        prefix = encode_fields(("kvlinker.object/1", fields))
        self._namespace = namespace.digest
        # A page is asked for in a lookup, loaded, and looked up again with the next turn.
        self._kept: dict[PageKey, bytes] = {}
        self._state = hashlib.blake2b(
            prefix, digest_size=OBJECT_KEY_BYTES - NAMESPACE_BYTES, key=namespace.secret
        )

    def object_key(self, page_key: PageKey) -> bytes:
        """Return the 32-byte object key of a page.

        Raises:
            ContractError: the page key is empty, or neither text nor bytes.
        """
        state = self._state.copy()
        state.update(_encode_page_key(page_key))
        return self._namespace + state.digest()

    def object_keys(self, page_keys: Sequence[PageKey]) -> tuple[bytes, ...]:
        """Return the object keys of several pages, in order.

        Raises:
            ContractError: see `object_key`.
        """
        try:
            return tuple(map(self._kept.__getitem__, page_keys))
        except KeyError:
            found = tuple(map(self._kept_key, page_keys))
        except TypeError:
            return tuple(map(self.object_key, page_keys))  # one cannot be hashed, and is refused
        if len(self._kept) + len(found) > _KEPT_KEYS:
            self._kept.clear()
        if len(found) <= _KEPT_KEYS:
            self._kept.update(zip(page_keys, found, strict=True))
        return found

    def _kept_key(self, page_key: PageKey) -> bytes:
        return self._kept.get(page_key) or self.object_key(page_key)
