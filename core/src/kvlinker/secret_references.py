"""A reference to a secret says where it is to be read, so that configurations, logs and process lists show none."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from kvlinker.errors import StoreError

__all__ = ["RevealedSecret", "SecretReference"]

_REFERENCE = re.compile(r"\$\{(?P<kind>env|file):(?P<name>[^{}]+)\}")


class RevealedSecret(str):
    """A secret that was read from where a reference said: whoever refuses secrets in plain text takes it."""

    __slots__ = ()

    def __repr__(self) -> str:
        """Return a text that shows nothing of it."""
        return "<secret>"


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretReference:
    """Where a secret is to be read: an environment variable or a file."""

    kind: str
    """`env` or `file`."""
    name: str
    """Of the variable, or path of the file."""

    @classmethod
    def of_text(cls, text: str) -> Self | None:
        """Return what `${env:NAME}` or `${file:/path}` refers to, or None for any other text."""
        match = _REFERENCE.fullmatch(text)
        return None if match is None else cls(kind=match["kind"], name=match["name"])

    @classmethod
    def of_value(cls, value: object) -> Self | None:
        """Return what a text, see `of_text`, or `{"env": NAME}` or `{"file": PATH}` refers to, or None for others."""
        if isinstance(value, str):
            return cls.of_text(value)
        if not isinstance(value, Mapping) or len(value) != 1:
            return None
        ((kind, name),) = value.items()
        is_reference = kind in {"env", "file"} and isinstance(name, str) and name
        return cls(kind=str(kind), name=str(name)) if is_reference else None

    def read(self, what: str) -> str:
        """Return the secret as it is now; a file's last line end does not count.

        Args:
            what: names the secret in messages, such as "redis store: the password".

        Raises:
            StoreError: the variable is not set, or the file cannot be read.
        """
        if self.kind == "file":
            try:
                return Path(self.name).read_text(encoding="utf-8").rstrip("\r\n")
            except (OSError, UnicodeDecodeError) as error:
                reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
                msg = f"{what}'s file {self.name} cannot be read: {reason}"
                raise StoreError(msg) from None
        if self.name not in os.environ:
            msg = f"{what}'s environment variable {self.name} is not set; export it where the process starts"
            raise StoreError(msg)
        return os.environ[self.name]
