"""The client is obstore's for the URL's kind of storage, with its own credential chain, retries and timeouts."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from kvlinker.errors import ContractError, StoreError
from kvlinker.secret_references import RevealedSecret, SecretReference
from kvlinker_s3.failures import brief
from kvlinker_s3.options import S3StoreOptions

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

__all__ = ["open_client"]

_MAX_RETRIES = 100
"""The time ends retries, not their number."""
_FIRST_PAUSE = timedelta(milliseconds=50)
_MAX_PAUSE = timedelta(seconds=1)


def open_client(options: S3StoreOptions) -> ObjectStore:
    """Return a client with connections of its own, which asks nothing yet.

    Raises:
        ContractError: a setting is unknown, or settings do not fit together.
        StoreError: a secret is not where it should be, or a folder cannot be made.
    """
    if options.scheme == "file":
        return _local(options)
    return _remote(options, _resolved(options))


def _local(options: S3StoreOptions) -> ObjectStore:
    from obstore.exceptions import BaseError
    from obstore.store import LocalStore

    try:
        return LocalStore.from_url(options.url, mkdir=True)
    except (BaseError, OSError, ValueError) as error:
        msg = f"s3 store {options.place}: the folder cannot be used: {brief(error)}"
        raise StoreError(msg) from None


def _remote(options: S3StoreOptions, settings: Mapping[str, str | bool]) -> ObjectStore:
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    try:
        return from_url(  # type: ignore[call-overload,no-any-return]  # of whatever kind the URL is
            options.url,
            config=settings,
            client_options=_client_options(options, settings),
            retry_config=_retry_config(options),
        )
    except (BaseError, ValueError) as error:
        # What the library says may repeat a setting: what comes from references is cut out, and the chain with it.
        # Before anything is shortened: a part of a secret is one too.
        text = str(error)
        for name in _referred(options):
            if secret := str(settings[name]):
                text = text.replace(secret, f"<{name}>")
        msg = f"s3 store {options.place}: settings were refused: {brief(text)}; obstore's documentation names them"
        raise ContractError(msg) from None


def _referred(options: S3StoreOptions) -> list[str]:
    """Return the settings that hold secrets."""
    kinds = SecretReference | RevealedSecret
    return [name for name, value in options.settings.items() if isinstance(value, kinds)]


def _resolved(options: S3StoreOptions) -> Mapping[str, str | bool]:
    """Return the settings with secrets in the place of references."""
    return {
        name: value.read(f"s3 store: setting {name}")
        if isinstance(value, SecretReference)
        else (value if isinstance(value, bool) else str(value))
        for name, value in options.settings.items()
    }


def _client_options(options: S3StoreOptions, settings: Mapping[str, str | bool]) -> ClientConfig:
    config: ClientConfig = {
        "connect_timeout": timedelta(seconds=options.connect_seconds),
        "read_timeout": timedelta(seconds=options.answer_seconds),
        "timeout": timedelta(seconds=options.request_seconds),
        # Whoever writes http:// asks for it; without, nothing goes in plain text.
        "allow_http": any(str(value).startswith("http://") for value in settings.values()),
    }
    if options.ca_file is not None:
        config["root_certificate"] = options.ca_file.read_bytes()
    return config


def _retry_config(options: S3StoreOptions) -> RetryConfig:
    return {
        "max_retries": _MAX_RETRIES,
        "retry_timeout": timedelta(seconds=options.retry_seconds),
        "backoff": {"init_backoff": _FIRST_PAUSE, "max_backoff": _MAX_PAUSE, "base": 2},
    }
