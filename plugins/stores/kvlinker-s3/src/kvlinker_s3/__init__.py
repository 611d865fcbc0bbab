"""The store plugin `s3`: pages as objects of S3, Google Cloud Storage, Azure or a directory."""

from __future__ import annotations

from collections.abc import Mapping

from kvlinker.hookspecs import PluginInfo, hookimpl
from kvlinker.store import Store
from kvlinker_s3.options import S3StoreOptions
from kvlinker_s3.store import S3Store

__all__ = ["S3Store", "S3StoreOptions", "describe_plugin", "open_store"]


@hookimpl
def describe_plugin() -> PluginInfo:
    """See kvlinker.hookspecs."""
    return PluginInfo(api_version=1, summary="objects of S3, Google Cloud Storage or Azure")


@hookimpl
def open_store(config: Mapping[str, object]) -> Store:
    """See kvlinker.hookspecs; the options are those of S3StoreOptions."""
    return S3Store(S3StoreOptions.of_config(config))
