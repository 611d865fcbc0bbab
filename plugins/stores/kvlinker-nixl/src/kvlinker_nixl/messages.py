"""Messages between a peer server and its clients: a length of four bytes, and a JSON object; every wait has an end."""

from __future__ import annotations

import base64
import json
import socket
import time
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from kvlinker.errors import StoreContractError
from kvlinker.keys import OBJECT_KEY_BYTES
from kvlinker.store import ObjectKey

__all__ = [
    "Message",
    "bytes_of",
    "digits_of",
    "flags_of",
    "keys_as_text",
    "keys_of",
    "number_of",
    "numbers_of",
    "receive",
    "send",
    "text_of",
    "within",
]

Message: TypeAlias = Mapping[str, object]
_LENGTH_BYTES = 4
_MAX_BYTES = 64 << 20
"""Of a message: more keys than any request has."""
_DIGITS = 2 * OBJECT_KEY_BYTES


def send(connection: socket.socket, message: Message, *, deadline: float) -> None:
    """Send a message before a deadline of `time.monotonic`.

    Raises:
        OSError: the other side is gone, or does not take it in time.
    """
    raw = json.dumps(message).encode()
    connection.settimeout(_left(deadline))
    connection.sendall(len(raw).to_bytes(_LENGTH_BYTES, "big") + raw)


def receive(connection: socket.socket, *, deadline: float | None) -> Message:
    """Return the next message; without a deadline the wait for its beginning has no end.

    Raises:
        OSError: the other side is gone, or it is not there in time.
        StoreContractError: what comes is no message.
    """
    length = int.from_bytes(_read(connection, _LENGTH_BYTES, deadline), "big")
    if length > _MAX_BYTES:
        msg = f"a message of {length} B is longer than any; is the other side a kvlinker-nixl?"
        raise StoreContractError(msg)
    try:
        message: object = json.loads(_read(connection, length, deadline))
    except (ValueError, RecursionError) as error:
        msg = "a message is no JSON; is the other side a kvlinker-nixl?"
        raise StoreContractError(msg) from error
    if not isinstance(message, dict):
        msg = f"a message must be an object, got a {type(message).__name__}"
        raise StoreContractError(msg)
    return message


def _read(connection: socket.socket, size: int, deadline: float | None) -> bytes:
    raw = bytearray()
    while len(raw) < size:
        connection.settimeout(None if deadline is None else _left(deadline))
        part = connection.recv(size - len(raw))
        if not part:
            msg = "the other side has closed the connection"
            raise ConnectionResetError(msg)
        raw += part
    return bytes(raw)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        msg = "no answer in time"
        raise TimeoutError(msg)
    return left


# ---- fields -----------------------------------------------------------------------------------


def keys_as_text(keys: Sequence[ObjectKey]) -> str:
    """Return keys as a field of a message."""
    return b"".join(keys).hex()


def keys_of(message: Message) -> tuple[ObjectKey, ...]:
    """Return the keys of a message.

    Raises:
        StoreContractError: they are none.
    """
    raw = digits_of(message, "keys")
    if len(raw) % OBJECT_KEY_BYTES:
        raise _wrong("keys", "digits of keys")
    return tuple(raw[at : at + OBJECT_KEY_BYTES] for at in range(0, len(raw), OBJECT_KEY_BYTES))


def digits_of(message: Message, name: str) -> bytes:
    """Return bytes of a message, which come in hexadecimal digits.

    Raises:
        StoreContractError: they are none.
    """
    try:
        return bytes.fromhex(text_of(message, name))
    except ValueError as error:
        raise _wrong(name, "hexadecimal digits") from error


def text_of(message: Message, name: str) -> str:
    """Return a text of a message.

    Raises:
        StoreContractError: it is none.
    """
    value = message.get(name)
    if not isinstance(value, str):
        raise _wrong(name, "a text")
    return value


def bytes_of(message: Message, name: str) -> bytes:
    """Return bytes of a message, which come in base64.

    Raises:
        StoreContractError: they are none.
    """
    try:
        return base64.b64decode(text_of(message, name), validate=True)
    except ValueError as error:
        raise _wrong(name, "bytes in base64") from error


def within(numbers: Sequence[int], name: str, least: int, most: int) -> Sequence[int]:
    """Return numbers of a message that are neither less nor more than they may be.

    Raises:
        StoreContractError: one is.
    """
    if numbers and not least <= min(numbers) <= max(numbers) <= most:
        raise _wrong(name, f"{least} to {most}")
    return numbers


def number_of(message: Message, name: str) -> int:
    """Return a whole number of a message.

    Raises:
        StoreContractError: it is none.
    """
    value = message.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise _wrong(name, "a whole number")
    return value


def numbers_of(message: Message, name: str, count: int | None = None) -> list[int]:
    """Return whole numbers of a message, as many as are expected.

    Raises:
        StoreContractError: they are something else.
    """
    found = message.get(name)
    values = found if isinstance(found, list) else [None]
    numbers = [value for value in values if isinstance(value, int) and not isinstance(value, bool)]
    if len(numbers) != len(values) or count not in (None, len(numbers)):
        raise _wrong(name, "whole numbers" if count is None else f"{count} whole numbers")
    return numbers


def flags_of(message: Message, name: str, count: int) -> tuple[bool, ...]:
    """Return as many answers of yes or no as are expected.

    Raises:
        StoreContractError: they are something else.
    """
    found = message.get(name)
    values = found if isinstance(found, list) else [None]
    flags = tuple(value for value in values if isinstance(value, bool))
    if len(flags) != len(values) or len(flags) != count:
        raise _wrong(name, f"{count} times true or false")
    return flags


def _wrong(name: str, expected: str) -> StoreContractError:
    return StoreContractError(f"field {name!r} of a message must be {expected}")
