"""An address is a Redis URL taken apart; its password is a reference, read when a connection is made.

A password in plain text is refused: URLs end up in process lists, logs and reports.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self
from urllib.parse import parse_qs, unquote, urlsplit

from kvlinker.errors import ContractError
from kvlinker.secret_references import SecretReference

__all__ = ["Address"]

_URL = re.compile(
    r"(?P<scheme>redis|rediss|unix)://"
    r"(?:(?P<user>[^:@/]*)(?::(?P<secret>\$\{(?:env|file):[^{}]+\}|[^@]*))?@)?"
    r"(?P<place>[^@]*)"
)
_EXAMPLE = "redis://cache.example:6379/0"
_PORT = 6379


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A Redis server, and as whom to speak to it."""

    host: str
    """Empty where the server is reached through a socket file."""
    port: int
    socket_path: str
    database: int
    username: str | None
    password: SecretReference | None
    has_tls: bool

    @classmethod
    def of_url(cls, url: str) -> Self:
        """Take a URL apart: `redis://`, `rediss://` with TLS, or `unix://` and the path of a socket.

        Raises:
            ContractError: it is none, or holds a password in plain text; no message repeats the password.
        """
        match = _URL.fullmatch(url)
        if match is None:
            msg = f"url must begin with redis://, rediss:// or unix://, such as {_EXAMPLE!r}"
            raise ContractError(msg)
        is_socket = match["scheme"] == "unix"
        try:
            place = urlsplit(f"//{'' if is_socket else match['place']}")
            port = _PORT if place.port is None else place.port
        except ValueError:
            # What is wrong is not repeated: a URL without its host has the password where the port belongs.
            msg = f"url names no server with a port up to 65535; write it like {_EXAMPLE!r}"
            raise ContractError(msg) from None
        path, database = _socket(match["place"]) if is_socket else ("", _database(place.path))
        if not is_socket and (not place.hostname or place.query or place.fragment):
            msg = f"url must be a host, a port and a database such as {_EXAMPLE!r}; give all else as options"
            raise ContractError(msg)
        return cls(
            host=place.hostname or "",
            port=port,
            socket_path=path,
            database=database,
            username=unquote(match["user"]) if match["user"] else None,
            password=_secret(match["secret"]),
            has_tls=match["scheme"] == "rediss",
        )

    def __str__(self) -> str:
        """Return the place alone, for messages: who speaks is nobody's business."""
        if self.socket_path:
            return f"unix://{self.socket_path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'rediss' if self.has_tls else 'redis'}://{host}:{self.port}/{self.database}"


def _secret(text: str | None) -> SecretReference | None:
    if not text:
        return None
    reference = SecretReference.of_text(text)
    if reference is None:
        msg = (
            "url holds a password in plain text, which process lists and logs would show; "
            "write ${env:NAME} or ${file:/path} in its place"
        )
        raise ContractError(msg)
    return reference


def _socket(place: str) -> tuple[str, int]:
    path, _, query = place.partition("?")
    names = parse_qs(query, keep_blank_values=True)
    if not path.startswith("/") or names.keys() - {"db"}:
        msg = (
            "url must be unix:///path/of/socket, with ?db=NUMBER at most; give all else as options"
        )
        raise ContractError(msg)
    return path, _database(names["db"][-1] if names else "")


def _database(path: str) -> int:
    text = path.removeprefix("/")
    if text and not (text.isascii() and text.isdigit()):
        msg = (
            f"url must end with the number of a database, got {text!r}; write it like {_EXAMPLE!r}"
        )
        raise ContractError(msg)
    return int(text or 0)
