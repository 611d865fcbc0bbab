"""A reference to a secret says where it is to be read, so that configurations, logs and process lists show none."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from kvlinker.errors import StoreError

__all__ = ["SecretReference"]

_REFERENCE = re.compile(r"\$\{(?P<kind>env|file):(?P<name>[^{}]+)\}")


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
            msg = f"{what}'s environment variable {self.name} is not set"
            raise StoreError(msg)
        return os.environ[self.name]
