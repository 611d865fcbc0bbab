"""Options of an object store: where it is, as whom to speak to it, how much at once, and how long to wait."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from kvlinker.errors import ContractError
from kvlinker.integers import as_integer
from kvlinker.quantities import as_bytes
from kvlinker.secret_references import RevealedSecret, SecretReference
from kvlinker.store_options import as_seconds, check_names

__all__ = ["SCHEMES", "S3StoreOptions", "Setting"]

SCHEMES = ("s3", "s3a", "gs", "az", "abfs", "abfss", "file")
Setting = str | bool | SecretReference
"""A setting's value, or where it is to be read."""
_EXAMPLE = "s3://bucket/folder"
_PREFIX = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")
_MAX_PREFIX = 256
_SECRET = re.compile(r"key|secret|token|password|sas|credential", re.IGNORECASE)
_PUBLIC = frozenset(
    {
        "access_key_id",
        "application_credentials",
        "container_authorization_token_file",
        "container_credentials_full_uri",
        "container_credentials_relative_uri",
        "credential_type",
        "fabric_token_service_url",
        "federated_token_file",
        "sse_bucket_key_enabled",
        "sse_kms_key_id",
        "web_identity_token_file",
    }
)
"""Settings that sound like secrets and are none: names, paths and places."""
_VENDOR = re.compile(r"^(aws|azure|google)_")
_USER = re.compile(r"://[^/]*@")
_MAX_CONCURRENCY = 256
_MIN_BYTES = 1 << 20
_MAX_BYTES = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class S3StoreOptions:
    """How an object store is opened."""

    url: str
    """`s3://bucket/folder`, `gs://bucket/folder`, `az://container/folder`, or `file:///folder`."""
    prefix: str = "kvlinker"
    """The folder below the URL's that all objects are in; stores with different prefixes share no objects."""
    settings: Mapping[str, Setting] = field(default_factory=dict, repr=False)
    """The library's own, such as `region` or `endpoint`; secrets are written as `${env:NAME}` or `${file:/path}`."""
    ca_file: Path | None = None
    """Certificates that a server's may be signed with, besides the system's."""
    concurrency: int = 16
    """Requests at once, for loads and for offloads each."""
    connect_seconds: float = 2.0
    """How long one attempt to connect may take."""
    answer_seconds: float = 5.0
    """How long the server may be silent within an answer."""
    request_seconds: float = 30.0
    """How long a request and its answer may take in all, without the tries before it."""
    retry_seconds: float = 2.0
    """How long after its beginning a request is tried again."""
    pause_seconds: float = 10.0
    """How long a server is not asked again after a request was given up."""
    call_bytes: int = 64 << 20
    """Bytes that a load has in host memory at a time; an object that is longer goes alone."""
    write_bytes: int = 1 << 30
    """Bytes of objects that one write has in host memory until it may publish; what is more is not stored."""

    def __post_init__(self) -> None:
        _check_url(self.url)
        is_prefix = isinstance(self.prefix, str) and len(self.prefix) <= _MAX_PREFIX
        if not is_prefix or not _PREFIX.fullmatch(self.prefix):
            msg = (
                f"prefix must be 1 to {_MAX_PREFIX} letters, digits, '.', '_', '-' and '/', "
                f"and no part of it begins with '.', got {self.prefix!r}"
            )
            raise ContractError(msg)
        object.__setattr__(self, "settings", _settings(self.settings))
        if self.settings and self.scheme == "file":
            msg = f"settings are for object storage alone, {self.url} has none"
            raise ContractError(msg)
        self._check_file()
        self._check_numbers()

    @property
    def scheme(self) -> str:
        """What the URL begins with."""
        return urlsplit(self.url).scheme

    @property
    def place(self) -> str:
        """The URL with the prefix, for messages."""
        return f"{self.url.rstrip('/')}/{self.prefix}"

    def _check_file(self) -> None:
        value: object = self.ca_file
        if value is None:
            return
        if not isinstance(value, str | Path) or not Path(value).is_file():
            msg = f"ca_file must name a file, got {value!r}"
            raise ContractError(msg)
        if self.scheme == "file":
            msg = f"ca_file is for servers alone, {self.url} has none"
            raise ContractError(msg)
        object.__setattr__(self, "ca_file", Path(value))

    def _check_numbers(self) -> None:
        seconds = {
            "connect_seconds": self.connect_seconds,
            "answer_seconds": self.answer_seconds,
            "request_seconds": self.request_seconds,
            "retry_seconds": self.retry_seconds,
            "pause_seconds": self.pause_seconds,
        }
        for name, value in seconds.items():
            as_seconds(value, name)
        count = as_integer(self.concurrency, "concurrency", at_least=1, at_most=_MAX_CONCURRENCY)
        object.__setattr__(self, "concurrency", count)
        for name, value in (("call_bytes", self.call_bytes), ("write_bytes", self.write_bytes)):
            size = as_bytes(value, name, at_least=_MIN_BYTES, at_most=_MAX_BYTES)
            object.__setattr__(self, name, size)

    @classmethod
    def of_config(cls, config: Mapping[str, object]) -> Self:
        """Return the options that a configuration names.

        Raises:
            ContractError: an option is unknown, missing, or has a wrong value; no message repeats a secret.
        """
        known = [item.name for item in fields(cls)]
        check_names("s3 store", config, known, needed={"url": repr(_EXAMPLE)})
        try:
            return cls(**config)  # type: ignore[arg-type]  # __post_init__ checks every value
        except ContractError as error:
            msg = f"s3 store: {error}"
            raise ContractError(msg) from error


def _check_url(url: object) -> None:
    if not isinstance(url, str):
        msg = f"url must be a text, got a {type(url).__name__}"
        raise ContractError(msg)
    try:
        parts = urlsplit(url)
    except ValueError as error:
        msg = f"url names no place: {error}; write it like {_EXAMPLE!r}"
        raise ContractError(msg) from error
    if parts.scheme not in SCHEMES:
        msg = f"url must begin with one of {', '.join(f'{name}://' for name in SCHEMES)}, such as {_EXAMPLE!r}"
        raise ContractError(msg)
    if parts.query or parts.fragment or parts.password is not None:
        msg = f"url must be a place alone, such as {_EXAMPLE!r}; give all else as settings"
        raise ContractError(msg)
    if parts.username is not None and parts.scheme not in {"abfs", "abfss"}:
        msg = f"url must name no user; write it like {_EXAMPLE!r}"
        raise ContractError(msg)
    if bool(parts.netloc) is (parts.scheme == "file") or (
        parts.scheme == "file" and not parts.path.strip("/")
    ):
        msg = f"url must be like {_EXAMPLE!r} or 'file:///folder', got {url!r}"
        raise ContractError(msg)


def _settings(found: object) -> Mapping[str, Setting]:
    """Return settings with references in the place of texts that are some."""
    if not isinstance(found, Mapping):
        msg = f"settings must be names with values, got a {type(found).__name__}"
        raise ContractError(msg)
    return {str(name): _setting(name, value) for name, value in found.items()}


def _setting(name: object, value: object) -> Setting:
    reference = value if isinstance(value, SecretReference) else SecretReference.of_value(value)
    if reference is not None and isinstance(name, str):
        return reference
    if not isinstance(name, str) or not isinstance(value, str | bool):
        msg = (
            f"setting {name!r} must be a text, true or false, or a reference to a secret, "
            f"got a {type(value).__name__}"
        )
        raise ContractError(msg)
    if isinstance(value, str) and not isinstance(value, RevealedSecret) and _is_secret(name, value):
        msg = (
            f"setting {name!r} holds a secret in plain text, which process lists and logs would show; "
            "write ${env:NAME} or ${file:/path} in its place"
        )
        raise ContractError(msg)
    return value


def _is_secret(name: str, value: str) -> bool:
    is_named_so = bool(_SECRET.search(name)) and _VENDOR.sub("", name.lower()) not in _PUBLIC
    return is_named_so or bool(_USER.search(value))
