"""Writes the layouts of the reference engine's pools, one file for each family and format, from its own pools."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvlinker.description import DescribeRequest
from kvlinker.description_json import description_to_json
from kvlinker_gpu_check.layouts import PAGES
from kvlinker_transformers.describe import describe_pools
from kvlinker_transformers.models import tiny_model

if TYPE_CHECKING:
    from kvlinker_transformers.pools import PagedPools


def engine_pools() -> dict[str, PagedPools]:
    """Return pools of every family and format that the engine has, in host memory."""
    from kvlinker_transformers.engine import pools_for_config

    llama, latent, sparse, shared, v4 = (
        tiny_model(kind).config
        for kind in ("llama", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "deepseek_v4")
    )
    return {
        "mha-token-major": pools_for_config(llama, pages=PAGES),
        "mha-head-major": pools_for_config(llama, pages=PAGES, head_major=True),
        "mla-bf16": pools_for_config(latent, pages=PAGES),
        "mla-packed": pools_for_config(latent, pages=PAGES, kv_format="fp8_packed_656"),
        "dsa-packed": pools_for_config(sparse, pages=PAGES, kv_format="fp8_packed_656"),
        "dsa-shared-index": pools_for_config(shared, pages=PAGES),
        "deepseek-v4": pools_for_config(v4, pages=PAGES),
    }


def main() -> None:
    """Write the layouts into the folder that is named."""
    folder = Path(sys.argv[1])
    for name, pools in engine_pools().items():
        described = describe_pools(pools, DescribeRequest(page_size=pools.page_size))
        (folder / f"{name}.json").write_text(description_to_json(described) + "\n")


if __name__ == "__main__":
    main()
