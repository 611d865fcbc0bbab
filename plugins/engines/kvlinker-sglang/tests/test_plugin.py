"""The plugin without its engine: what it says of itself, and what it leaves to others."""

from __future__ import annotations

import kvlinker_sglang
from kvlinker.description import DescribeRequest


def test_it_states_the_version_of_the_plugin_api() -> None:
    assert kvlinker_sglang.describe_plugin().api_version == 1


def test_the_cache_of_another_engine_is_left_to_its_plugin() -> None:
    request = DescribeRequest(page_size=16)

    assert kvlinker_sglang.describe_kv_cache("transformers", object(), request) is None
