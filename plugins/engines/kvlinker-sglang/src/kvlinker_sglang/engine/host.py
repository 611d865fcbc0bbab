"""Host: what the linker takes from the SGLang that it runs in, and what that says of its model."""

from __future__ import annotations

import os
from operator import attrgetter
from typing import Protocol, runtime_checkable

import sglang
from sglang.srt.arg_groups.arg_utils import namespace_of
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import (
    UnifiedCacheLinker,
    UnifiedCacheLinkerWrapper,
)
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import (
    get_context,
    get_exec,
    get_lora,
    get_model,
    get_parallel,
    get_serving,
    get_spec,
    process_model_config,
)
from sglang.srt.server_args import ServerArgs

from kvlinker.description import Fact
from kvlinker.errors import KVLinkerError, UnsupportedOperationError
from kvlinker_sglang.compatibility import TESTED_VERSIONS, Host
from kvlinker_sglang.describe.classes import class_name
from kvlinker_sglang.describe.requests import ATTENTION_CHUNK_SIZE, SHARED_INDEX_LAYERS
from kvlinker_sglang.describe.sparse import POOL as SPARSE_POOL
from kvlinker_sglang.describe.sparse import SparsePool, shared_index_layers
from kvlinker_sglang.identity import Checkpoint, ModelFacts
from kvlinker_sglang.server_arguments import (
    ServerArgument,
    is_loaded_from_files,
    value_arguments,
)
from kvlinker_sglang.server_environment import value_variables

__all__ = [
    "check_arguments",
    "chunk_facts",
    "engine_weights_version",
    "installed_host",
    "model_facts",
    "shared_index_facts",
]


@runtime_checkable
class _HasChunks(Protocol):
    """SGLang's `ModelConfig`."""

    attention_chunk_size: int | None


def installed_host() -> Host:
    """Return the parts of the installed SGLang that the linker relies on."""
    return Host(
        version=sglang.__version__,
        linker=UnifiedCacheLinker,
        transfer=PoolTransfer,
        parameters=CacheInitParams,
        policies=PoolHitPolicy,
        pools=PoolName,
        updater=SchedulerWeightUpdaterManager,
        tree=UnifiedRadixCache,
        wrapper=UnifiedCacheLinkerWrapper,
        page_hash=get_storage_hash_str,
        make_key=RadixKey,
    )


def check_arguments() -> None:
    """Refuse arguments of the server that a linker cannot live with.

    Raises:
        UnsupportedOperationError: memory is to be given away under addresses that stay, or a pipeline has stages that
            would act on answers of their own.
    """
    if get_exec().features.enable_memory_saver:
        msg = (
            "--enable-memory-saver gives the pools' memory away under addresses that stay, while pages may still be "
            "read from it; run SGLang without it, or without a linker"
        )
        raise UnsupportedOperationError(msg)
    # SGLang makes the ranks of one stage agree on what a lookup found and on whether a load landed. It asks no other
    # stage, which may have lost a page, or failed, alone.
    stages = get_parallel().pp_size
    if stages > 1:
        msg = (
            f"--pp-size {stages} with a linker: SGLang lets each stage of a pipeline decide by itself how much of a "
            f"prompt is restored, and stages that differ compute wrong values; run it with --pp-size 1 and more of "
            f"--tp-size, or without a linker"
        )
        raise UnsupportedOperationError(msg)


def engine_weights_version() -> str | None:
    """Return what the engine calls its weights now."""
    version: str | None = get_serving().weight_version
    return version


def model_facts() -> ModelFacts:
    """Return what the server says of its model.

    Raises:
        UnsupportedOperationError: this SGLang has not all of it.
        ContractError: a file that an argument or a variable names cannot be read.
    """
    try:
        return _model_facts()
    except KVLinkerError:
        raise
    except (AttributeError, ValueError) as error:
        msg = (
            f"sglang {sglang.__version__} says otherwise what its arguments are than {' and '.join(TESTED_VERSIONS)}, "
            f"which kvlinker-sglang was tested with: {error}; install a version that was tested, or a newer "
            f"kvlinker-sglang"
        )
        raise UnsupportedOperationError(msg) from error


def _model_facts() -> ModelFacts:
    model, draft = get_model(), get_spec()
    return ModelFacts(
        engine_version=sglang.__version__,
        model=Checkpoint(path=model.model_path, revision=model.revision),
        weights_version=engine_weights_version(),
        draft=_draft(draft.speculative_draft_model_path, draft.speculative_draft_model_revision),
        adapters={
            str(adapter.lora_name): Checkpoint(path=str(adapter.lora_path))
            for adapter in get_lora().lora_paths or ()
        },
        values=value_arguments(_arguments()) | value_variables(os.environ),
        download_dir=model.download_dir,
        weights_in_files=_are_in_files(),
    )


def _arguments() -> dict[str, ServerArgument]:
    """Return every argument of the server, as SGLang resolved it."""
    found = {}
    for name, group in namespace_of(ServerArgs).items():
        top, *below = group.split(".")
        value: object = attrgetter(".".join((*below, name)))(get_context().config_bag(top))
        found[name] = ServerArgument(group=group, value=value)
    return found


def _are_in_files() -> bool:
    model, draft = get_model(), get_spec()
    formats = [model.load_format]
    if draft.speculative_draft_load_format is not None:
        formats.append(draft.speculative_draft_load_format)
    return model.weight_cache_mode == "off" and all(map(is_loaded_from_files, formats))


def chunk_facts() -> dict[str, Fact]:
    """Return the slots of a chunk that layers attend within; nothing where the model has no chunks.

    SGLang makes a window of a chunk, and only the model's configuration tells that it does not slide.
    """
    config: object = process_model_config()
    if not isinstance(config, _HasChunks) or not config.attention_chunk_size:
        return {}
    return {ATTENTION_CHUNK_SIZE: config.attention_chunk_size}


def shared_index_facts(kv_cache: object) -> dict[str, Fact]:
    """Return which layers of sparse attention use another layer's index; nothing for other pools.

    Beside a linker SGLang gives those layers an index buffer all the same, and only the model's configuration tells
    that nobody reads it.
    """
    if class_name(kv_cache) != SPARSE_POOL or not isinstance(kv_cache, SparsePool):
        return {}
    start, end = kv_cache.start_layer, kv_cache.start_layer + kv_cache.layer_num
    config: object = process_model_config().hf_config
    return {SHARED_INDEX_LAYERS: shared_index_layers(config, start=start, end=end)}


def _draft(path: str | None, revision: str | None) -> Checkpoint | None:
    return None if path is None else Checkpoint(path=path, revision=revision)
