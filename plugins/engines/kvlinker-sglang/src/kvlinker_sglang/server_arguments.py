"""Server arguments: which of them the values in a KV cache depend on, as a part of the namespace.

Every argument does that is not known to be harmless: two servers that share a page must compute the same values, an
argument that is new in SGLang is one that nobody has looked at yet, and a key too many only costs a computation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum

from kvlinker_sglang.checkpoints import content_text
from kvlinker_sglang.secret_references import looks_like_secret, secret_digest

__all__ = ["ServerArgument", "is_loaded_from_files", "known_names", "value_arguments"]

_HARMLESS_GROUPS = frozenset(
    [
        "device",
        "disagg",
        "exec.graph",
        "exec.offload",
        "exec.overlap",
        "memory",
        "observability",
        "parallel",
        "schedule",
        "serving",
    ]
)
"""SGLang's groups of arguments that say where and when something is computed, and not what."""
_EXCEPTIONS = frozenset(
    [
        "c128_page_size",
        "debug_tensor_dump_input_file",
        "device",
        "disable_hybrid_swa_memory",
        "encoder_only",
        "forward_hooks",
        "language_model_only",
        "language_only",
        "swa_prefix_tails",
    ]
)
"""Arguments in those groups that do say what."""
_HARMLESS = frozenset(
    [
        "allowed_media_domains",
        "delete_ckpt_after_loading",
        "disable_flashinfer_autotune",
        "disable_outlines_disk_cache",
        "download_dir",
        "enable_broadcast_mm_inputs_process",
        "enable_custom_logit_processor",
        "enable_draft_weights_cpu_backup",
        "enable_eplb",
        "enable_lora_overlap_loading",
        "enable_memory_saver",
        "enable_mm_global_cache",
        "enable_prefix_mm_cache",
        "enable_return_hidden_states",
        "enable_return_indexer_topk",
        "enable_return_routed_experts",
        "enable_watermark",
        "enable_weights_cpu_backup",
        "engine_info_bootstrap_port",
        "eplb_algorithm",
        "eplb_min_rebalancing_utilization_threshold",
        "eplb_rebalance_layers_per_chunk",
        "eplb_rebalance_num_iterations",
        "expert_balancedness_report_mode",
        "expert_distribution_recorder_buffer_size",
        "expert_distribution_recorder_mode",
        "flashinfer_autotune_skip_ops",
        "grammar_backend",
        "init_expert_location",
        "int8_mamba_ckpt_size",
        "kt_cpuinfer",
        "kt_threadpool_count",
        "limit_mm_data_per_request",
        "lora_drain_wait_threshold",
        "lora_eviction_policy",
        "lora_paths",
        "mamba_max_states_per_path",
        "mamba_track_interval",
        "max_loaded_loras",
        "max_lora_chunk_size",
        "max_loras_per_batch",
        "media_url_max_file_size_mb",
        "mm_enable_dp_encoder",
        "mm_feature_transport",
        "mm_global_cache_backend",
        "mm_io_worker_num",
        "mm_preprocess_cache_size_mb",
        "mm_processor_worker_num",
        "model_checksum",
        "model_path",
        "modelopt_checkpoint_save_path",
        "modelopt_export_path",
        "mooncake_ib_device",
        "paged_experts_num_resident",
        "pre_warm_nccl",
        "remote_instance_weight_loader_backend",
        "remote_instance_weight_loader_seed_instance_ip",
        "remote_instance_weight_loader_seed_instance_service_port",
        "remote_instance_weight_loader_send_weights_group_ports",
        "remote_instance_weight_loader_start_seed_via_transfer_engine",
        "return_hidden_states_mode",
        "revision",
        "sampling_backend",
        "sampling_mask_max_tokens",
        "spec_trace_dir",
        "speculative_accept_threshold_acc",
        "speculative_accept_threshold_single",
        "speculative_adaptive",
        "speculative_adaptive_config",
        "speculative_draft_model_path",
        "speculative_draft_model_revision",
        "speculative_ngram_capacity",
        "speculative_ngram_external_corpus_max_tokens",
        "speculative_ngram_external_corpus_path",
        "speculative_ngram_external_sam_budget",
        "speculative_ngram_match_type",
        "speculative_ngram_max_bfs_breadth",
        "speculative_ngram_max_trie_depth",
        "speculative_ngram_min_bfs_breadth",
        "speculative_use_block_verification",
        "speculative_use_rejection_sampling",
        "startup_weight_load_mode",
        "watermark_config",
        "watermark_context_window",
        "watermark_default_enabled",
        "watermark_enforce_all",
        "watermark_key",
        "watermark_key_b",
        "watermark_max_probability",
        "watermark_mixing_probability",
        "weight_cache_socket",
        "weight_cache_timeout",
        "weight_loader_disable_mmap",
        "weight_loader_drop_cache_after_load",
        "weight_loader_prefetch_checkpoints",
        "weight_loader_prefetch_num_threads",
    ]
)
"""Arguments of the other groups that change no value; paths of checkpoints stand for themselves in the namespace."""
_PLACES = ("_config", "_file", "_map", "_path", "_profile")
"""Ends of the names of arguments whose value may be a file or a folder: what is in it counts, and not where it lies."""
_KEY = re.compile(r'"(\w+)"\s*:')
"""A key of an object in JSON, as which several arguments are given."""
_LOADS_FILES = frozenset(
    [
        "auto",
        "bitsandbytes",
        "fastsafetensors",
        "gguf",
        "instanttensor",
        "layered",
        "mistral",
        "npcache",
        "pt",
        "runai_streamer",
        "safetensors",
        "sharded_state",
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerArgument:
    """One argument of a server, as SGLang resolved it."""

    group: str
    """SGLang's, such as `exec.kernel`."""
    value: object


def is_loaded_from_files(load_format: object) -> bool:
    """Return whether a format loads weights from a checkpoint's files, and not random ones, or another server's."""
    value = load_format.value if isinstance(load_format, Enum) else load_format
    return value in _LOADS_FILES


def known_names() -> frozenset[str]:
    """Return the arguments that are known by name, which are SGLang's in the tested version."""
    return _HARMLESS | _EXCEPTIONS


def value_arguments(arguments: Mapping[str, ServerArgument]) -> dict[str, str]:
    """Return the arguments that values may depend on, by name, each as a text that is the same on every host.

    What may be a secret stands there by a digest, since the texts are logged.

    Raises:
        ContractError: a file or a folder that one of them names cannot be read.
    """
    return {
        name: _text(name, argument.value)
        for name, argument in sorted(arguments.items())
        if _may_change_values(name, argument.group)
    }


def _may_change_values(name: str, group: str) -> bool:
    return name in _EXCEPTIONS or not (group in _HARMLESS_GROUPS or name in _HARMLESS)


def _text(name: str, value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=_plain)
    if any(looks_like_secret(key, text) for key in (name, *_KEY.findall(text))):
        return secret_digest(text)
    if isinstance(value, str) and name.endswith(_PLACES):
        return content_text(name, value) or value
    return text


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, AbstractSet):
        return sorted(map(str, value))
    return str(value)
