"""Server environment: which variables the values in a KV cache depend on, as a part of the namespace.

Every variable of SGLang's does that is not known to be harmless, as with its arguments: most of them choose a kernel or
a format. Of the libraries below SGLang those count that choose one too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from kvlinker_sglang.checkpoints import content_text
from kvlinker_sglang.secret_references import looks_like_secret, secret_digest

__all__ = ["known_variables", "value_variables"]

_LOGS = """
    ENABLE_CUDA_GRAPH_CAPTURE_TRACE ENABLE_METRICS_DEVICE_TIMER ENABLE_METRICS_DP_ATTENTION
    ENABLE_NVTX_OPERATIONS ENABLE_NVTX_SCHEDULER EXPERT_LOCATION_UPDATER_LOG_INPUT EXPERT_LOCATION_UPDATER_LOG_METRICS
    EXPOSE_OWN_ENV_VARS GDN_DECODE_FUSION_LOG_LAYER_HITS JIT_LOG_LEVEL JIT_LOG_RESOURCE_USAGE LOGGING_CONFIG_PATH
    LOG_DECODE_GRAPH_KEY LOG_EXPERT_LOCATION_METADATA LOG_FORWARD_ITERS LOG_GC LOG_LAZY_COMPACTION_STATS
    LOG_LAZY_COMPACTION_STATS_INTERVAL_SEC LOG_MS LOG_PICKLE_IPC_OBJECTS LOG_REQUEST_EXCEEDED_MS LOG_REQUEST_HEADERS
    LOG_SCHEDULER_STATUS_INTERVAL LOG_SCHEDULER_STATUS_TARGET MEM_PROFILE_MAX_ENTRIES NSYS_PROFILING
    OTLP_EXPORTER_MAX_EXPORT_BATCH_SIZE OTLP_EXPORTER_SCHEDULE_DELAY_MILLIS PREFILL_DELAYER_DEBUG_LOG
    PROFILE_BY_STAGE_DECODE_MIN_BS PROFILE_RECORD_SHAPES PROFILE_V2 PROFILE_WITH_STACK RECORD_STEP_TIME
    RINGBUFFER_WARNING_INTERVAL ROUTING_KEY_POLICY_DEBUG_LOG TORCH_PROFILER_DIR TRACE_ASYNC
    TRACE_ASYNC_FLUSH_THRESHOLD TRACE_LEVEL
"""
"""Logs, traces, profiles and metrics."""
_PROCESSES = """
    AUTO_NUMA_BIND BACKUP_PORT_BASE BLOCK_NONZERO_RANK_CHILDREN CRASH_ON_NUMA_BIND_FAILURE CUDA_COREDUMP
    CUDA_COREDUMP_BEFORE_CRASH CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS CUDA_COREDUMP_DIR DISTRIBUTED_INIT_METHOD_OVERRIDE
    DP_RANK ENABLE_HEALTH_ENDPOINT_GENERATION ENABLE_REQUEST_DECOMPRESSION FORCE_SHUTDOWN GRPC_ENDPOINT GRPC_PORT
    GRPC_WORKER_THREADS HEALTH_CHECK_TIMEOUT HOST_IP HTTP_SERVER_APP_PATH IS_FIRST_RANK_ON_NODE
    KILLPG_ON_SCHEDULER_EXCEPTION LOCAL_IP_NIC NUMA_BIND_V2 OLLAMA_CHAT_ROUTE OLLAMA_GENERATE_ROUTE
    OLLAMA_ROOT_ROUTE OLLAMA_SHOW_ROUTE OLLAMA_TAGS_ROUTE ONE_VISIBLE_DEVICE_PER_PROCESS PORT
    PYSPY_DUMP_BEFORE_CRASH RAY_BUNDLE_INDICES ROLE_NAMESPACES ROLE_NAMESPACES_OUT RUN_ID SET_CPU_AFFINITY
    TCP_STORE_PORT TIMEOUT_KEEP_ALIVE USE_MESSAGE_QUEUE_BROADCASTER USE_PICKLE_IPC
    UVICORN_WORKER_HEALTHCHECK_TIMEOUT WAIT_PORT_TIMEOUT WAIT_WEIGHTS_READY_TIMEOUT WARMUP_TIMEOUT
    ZMQ_ALLOWED_PEERS ZMQ_SOURCE_IP
"""
"""Names of a start and of a rank, ports, routes, crashes, times that somebody waits, and where processes run.

`CPU_OMP_THREADS_BIND` is none of them: as many threads as it names cores divide a sum among them.
"""
_SCHEDULE = """
    CACHE_HIT_RATE_WINDOW_SECONDS CLIP_MAX_NEW_TOKENS_ESTIMATION DETOKENIZER_MAX_STATES EMPTY_CACHE_INTERVAL
    ENABLE_WAITING_PREFIX_REFRESH FORCE_STREAM_INTERVAL GRAMMAR_MAX_POLL_ITERATIONS GRAMMAR_POLL_INTERVAL
    INIT_NEW_TOKEN_RATIO MAX_BATCH_REQS_PER_HTTP_REQ MAX_NEW_TOKENS_LIMIT MIN_NEW_TOKEN_RATIO_FACTOR
    NEW_TOKEN_RATIO_DECAY_STEPS PREFILL_DELAYER_MAX_DELAY_PASSES PREFILL_DELAYER_MAX_PREFILL_BS_WINDOW_SIZE
    PREFILL_DELAYER_TOKEN_USAGE_LOW_WATERMARK RADIX_FORCE_MISS REQUEST_STATE_WAIT_TIMEOUT REQ_RUNNING_TIMEOUT
    REQ_WAITING_TIMEOUT RETRACT_DECODE_STEPS SCHEDULER_MAX_RECV_PER_POLL SCHEDULER_RECV_SKIPPER_WEIGHT_DECODE
    SCHEDULER_RECV_SKIPPER_WEIGHT_DEFAULT SCHEDULER_RECV_SKIPPER_WEIGHT_NONE
    SCHEDULER_RECV_SKIPPER_WEIGHT_TARGET_VERIFY UNIFIED_RADIX_TREE_CORE_BACKEND
"""
"""Which request is computed when, and the trees that know what has been."""
_FILES = """
    CACHE_DIR CUTE_AOT_CACHE_DIR DG_CACHE_DIR DISABLE_OUTLINES_DISK_CACHE EXPERT_DISTRIBUTION_RECORDER_DIR
    FLASHINFER_AUTOTUNE_CACHE HICACHE_FILE_BACKEND_STORAGE_DIR HICACHE_NIXL_BACKEND_STORAGE_DIR IO_WORKERS
    JIT_CACHE_DEBUG JIT_CACHE_DIR JIT_CACHE_KEEP JIT_DEEPGEMM_FAST_WARMUP JIT_DEEPGEMM_PRECOMPILE
    JIT_FORCE_RECOMPILE LOAD_SNAPSHOT_USE_ZMQ PREFETCH_BLOCK_SIZE_MB QWEN4_PLE_FILE_DIR RUST_BUILD_MODE
    SORT_WEIGHT_FILES USE_CUSTOM_TRITON_KERNEL_CACHE USE_MODELSCOPE WEIGHT_CACHE_READY_TEMPLATE
    WEIGHT_CACHE_SOCKET_TEMPLATE
"""
"""Where files lie, and how fast they are read; what is in a checkpoint is in the namespace by itself.

The folders among them can be made anew, are only written to, are filled at each start, or are of a cache that is off
beside a linker. A file in SGLang's caches that says what to compute with is in the namespace by its content, below.
"""
_CHECKS = """
    CHECK_KV_PAGE_INVARIANTS DEBUG_MEMORY_POOL DETECT_SLOW_RANK ENABLE_RANK_CONSENSUS_CHECKER
    ENABLE_STRICT_MEM_CHECK_DURING_BUSY ENABLE_STRICT_MEM_CHECK_DURING_IDLE ENABLE_TP_MEMORY_INBALANCE_CHECK
    ENABLE_TREE_CACHE_SANITY_CHECK INVARIANT_CHECK PHASE_CHECKER_DEBUG SKIP_SGL_KERNEL_VERSION_CHECK
    TEST_CRASH_AFTER_STREAM_OUTPUTS TEST_MAX_RETRY TEST_METRICS_FILE TEST_REQUEST_TIME_STATS TEST_RETRACT
    TEST_RETRACT_INTERVAL TEST_RETRACT_NO_PREFILL_BS TEST_SKIP_CACHE_HIT_ASSERT TEST_STUCK_DETOKENIZER
    TEST_STUCK_DP_CONTROLLER TEST_STUCK_SCHEDULER_INIT TEST_STUCK_TOKENIZER
"""
"""Checks that end a server or leave it alone, and tests of SGLang's own."""
_HARMLESS = frozenset(
    f"SGLANG_{name}" for name in f"{_LOGS} {_PROCESSES} {_SCHEDULE} {_FILES} {_CHECKS}".split()
)
_PREFIX = "SGLANG_"
"""SGLang itself renames what is set under its older prefix, `SGL_`, when it is imported."""
_CACHE = "SGLANG_CACHE_DIR"
_CACHE_DEFAULT = "~/.cache/sglang"
_KERNEL_LOCK = "kernels.lock"
"""A file in SGLang's caches that names the version of the kernels that it downloads for FlashAttention 3."""
_LIBRARY_PREFIXES = (
    "AITER_",
    "ASCEND_USE_",
    "CUBLASLT_",
    "CUBLAS_",
    "DNNL_",
    "FA_",
    "FLASHINFER_",
    "FLASH_ATTENTION_",
    "FLA_",
    "HIPBLASLT_",
    "ONEDNN_",
    "ROCM_QUICK_REDUCE_",
    "TORCHINDUCTOR_",
    "TRTLLM_",
)
"""Libraries that are asked by many variables which kernel to take, or which numbers to compute with."""
_LIBRARY_HARMLESS = (
    "_BASE",
    "_CACHE",
    "_DEBUG",
    "_DIR",
    "_HOME",
    "_LEVEL",
    "_PATH",
    "_VERBOSE",
    "_VERSION_CHECK",
)
"""Ends of the names of those libraries' variables that say where files lie, or what is logged or checked."""
_LIBRARY_NAMES = frozenset(
    [
        "ATEN_CPU_CAPABILITY",
        "CK_MOE",
        "DEEP_NORMAL_MODE_USE_INT8_QUANT",
        "IS_H200",
        "MINIMAX_NPU_PREFILL_BSQ",
        "MKL_CBWR",
        "NCCL_ALGO",
        "NCCL_MAX_NCHANNELS",
        "NCCL_MIN_NCHANNELS",
        "NCCL_NVLS_ENABLE",
        "NCCL_PROTO",
        "NVIDIA_TF32_OVERRIDE",
        "TIMM_FUSED_ATTN",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        "TORCH_BLAS_PREFER_CUBLASLT",
        "TORCH_BLAS_PREFER_HIPBLASLT",
        "TRITON_F32_DEFAULT",
        "TRITON_INTERPRET",
        "USE_ROCM_AITER_ROPE_BACKEND",
        "USE_TRITON_W8A8_FP8_KERNEL",
        "VIDEO_MAX_PIXELS",
        "XHS_VIDEO_JPEG_QUALITY",
    ]
)


def known_variables() -> frozenset[str]:
    """Return the variables of SGLang's that are known by name, which are the tested version's."""
    return _HARMLESS


def value_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that values may depend on, by name, each as a text that is the same on every host.

    A file or a folder is known by its content, and what may be a secret by a digest, since the texts are logged.

    Raises:
        ContractError: a file or a folder that one of them names cannot be read.
    """
    texts = {
        name: _text(name, value)
        for name, value in sorted(environment.items())
        if _may_change_values(name)
    }
    return texts | _locked_kernels(environment)


def _locked_kernels(environment: Mapping[str, str]) -> dict[str, str]:
    """Return which kernels SGLang's caches lock; nothing where they lock none."""
    folder = environment.get(_CACHE) or str(Path(_CACHE_DEFAULT).expanduser())
    content = content_text(_CACHE, str(Path(folder, _KERNEL_LOCK)))
    return {} if content is None else {_KERNEL_LOCK: content}


def _may_change_values(name: str) -> bool:
    if name.startswith(_PREFIX):
        return name not in _HARMLESS
    of_library = name.startswith(_LIBRARY_PREFIXES) and not name.endswith(_LIBRARY_HARMLESS)
    return of_library or name in _LIBRARY_NAMES


def _text(name: str, value: str) -> str:
    if looks_like_secret(name, value):
        return secret_digest(value)
    content = content_text(name, value)
    if content is None:
        return value
    # A word may be the name of a folder by chance, and means something else then.
    return content if os.sep in value else f"{value} {content}"
