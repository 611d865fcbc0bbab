"""SGLang's own linkers, over the pools that kvlinker's model plugins lay out.

`--unified-cache-external-linker-config` names one as `"linker"`, and this module as `"linker_module_path"`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType

from kvlinker_sglang import install

__all__ = ["MooncakeDirectLinker", "UMBPDirectLinker"]  # noqa: F822  # see `__getattr__`

_MODULES: Mapping[str, str] = MappingProxyType(
    {
        "MooncakeDirectLinker": "sglang.srt.mem_cache.storage.mooncake_store.mooncake_direct_linker",
        "UMBPDirectLinker": "sglang.srt.mem_cache.storage.umbp.umbp_direct_linker",
    }
)


def __getattr__(name: str) -> type:
    """Return one of SGLang's linkers, installed for: see `kvlinker_sglang.install`."""
    if name not in _MODULES:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    install()
    linker: type = vars(importlib.import_module(_MODULES[name]))[name]
    return linker
