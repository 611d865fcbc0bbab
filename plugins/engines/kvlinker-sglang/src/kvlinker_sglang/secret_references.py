"""Secret references: where a secret is read from, so that none ever stands in a configuration."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvlinker.errors import ContractError
from kvlinker.keys import digest_fields
from kvlinker.secret_references import RevealedSecret
from kvlinker_sglang.json_words import json_kind

__all__ = [
    "SecretReference",
    "check_without_secrets",
    "looks_like_secret",
    "resolve_secrets",
    "secret_digest",
]

_SECRET_NAME = re.compile(
    r"pass(word|wd|phrase)?$|secret|token$|api_?key|access_?key|private_?key|credential|auth$",
    re.IGNORECASE,
)
_URL_PASSWORD = re.compile(r"\w+://[^/\s:@]*:[^/\s@]+@")
_REFERENCE_IN_TEXT = re.compile(r"\$\{(?:env|file):[^{}]+\}")
"""How stores that read secrets themselves refer to them, such as in the password's place of an address."""
_DIGEST_BYTES = 12


class SecretReference(BaseModel):
    """An environment variable or a file that holds a secret."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", frozen=True, hide_input_in_errors=True, use_attribute_docstrings=True
    )

    env: Annotated[str, Field(min_length=1)] | None = None
    """Name of an environment variable."""
    file: Annotated[str, Field(min_length=1)] | None = None
    """Path of a file, where `~` is the user's home; line ends behind the secret are not part of it."""

    @model_validator(mode="after")
    def _names_one_place(self) -> Self:
        if (self.env is None) == (self.file is None):
            msg = 'a secret is {"env": NAME} or {"file": PATH}, one of them'
            raise ValueError(msg)
        return self

    def read(self) -> str:
        """Return the secret.

        Raises:
            ContractError: the variable or the file is absent or empty.
        """
        secret = os.environ.get(self.env, "") if self.env is not None else self._read_file()
        if not secret:
            place = f"environment variable {self.env}" if self.env else f"file {self.file}"
            msg = f"the {place} holds no secret; set it in the server's environment"
            raise ContractError(msg)
        return secret

    def _read_file(self) -> str:
        try:
            path = Path(str(self.file)).expanduser()
            return path.read_text(encoding="utf-8").rstrip("\r\n")
        except (OSError, RuntimeError, UnicodeDecodeError) as error:
            msg = f"the secret's file {self.file} cannot be read: {type(error).__name__}"
            raise ContractError(msg) from None


def looks_like_secret(name: str, value: str) -> bool:
    """Return whether a value must reach no log: by its name, or because it is an address with a password."""
    return bool(_SECRET_NAME.search(name) or _URL_PASSWORD.search(value))


def secret_digest(value: str) -> str:
    """Return what stands for a value that may be a secret, where texts are compared and logged."""
    fields = (value.encode(errors="surrogateescape"),)
    return f"digest {digest_fields('kvlinker-sglang.variable/1', fields, size=_DIGEST_BYTES).hex()}"


def check_without_secrets(options: Mapping[str, object], where: str) -> None:
    """Refuse options in which a secret stands as it is: the server logs them.

    Raises:
        ValueError: names the option, never its value.
    """
    for path, value in _leaves(options, where):
        if isinstance(value, Mapping):
            _check_reference(value, path)
        elif isinstance(value, str) and _shows_secret(path.rpartition(".")[2], value):
            msg = (
                f'{path} holds a secret, and the server logs its arguments; write {{"env": NAME}} or '
                f'{{"file": PATH}} instead'
            )
            raise ValueError(msg)


def _shows_secret(name: str, value: str) -> bool:
    rest = _REFERENCE_IN_TEXT.sub("", value)
    return bool(rest or not value) and looks_like_secret(name, rest)


def _check_reference(reference: Mapping[object, object], path: str) -> None:
    for kind, place in reference.items():
        if not isinstance(place, str) or not place:
            msg = f"{path}.{kind} must name where a secret is, got {json_kind(place)}"
            raise ValueError(msg)


def _leaves(value: object, path: str) -> Iterator[tuple[str, object]]:
    """Yield every value that is no list and no object but a reference, with its path."""
    if isinstance(value, Mapping) and not _is_reference(value):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item, path)
    else:
        yield path, value


def _is_reference(value: object) -> bool:
    """Whether a value stands for a secret; an object under its one name is the store `file` and its options."""
    if not isinstance(value, Mapping) or len(value) != 1:
        return False
    ((kind, place),) = value.items()
    return kind in {"env", "file"} and not isinstance(place, Mapping)


def resolve_secrets(options: Mapping[str, object]) -> dict[str, object]:
    """Return the options with every reference replaced by what it refers to; for the store plugin alone.

    Raises:
        ContractError: a referenced secret is absent or empty.
    """
    return {str(key): _resolved(value) for key, value in options.items()}


def _resolved(value: object) -> object:
    if _is_reference(value):
        return RevealedSecret(SecretReference.model_validate(value).read())
    if isinstance(value, Mapping):
        return resolve_secrets(value)
    if isinstance(value, list | tuple):
        return [_resolved(item) for item in value]
    return value
