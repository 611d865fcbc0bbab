"""The plugin without its engine: what it says of itself, and what it leaves to others."""

from __future__ import annotations

import sys

import pytest

import kvlinker_sglang
from kvlinker.description import DescribeRequest
from kvlinker.errors import UnsupportedOperationError
from kvlinker_sglang.compatibility import TESTED_VERSIONS


def test_it_states_the_version_of_the_plugin_api() -> None:
    assert kvlinker_sglang.describe_plugin().api_version == 1


def test_the_cache_of_another_engine_is_left_to_its_plugin() -> None:
    request = DescribeRequest(page_size=16)

    assert kvlinker_sglang.describe_kv_cache("transformers", object(), request) is None


def test_b106_an_sglang_without_what_the_linker_is_built_on_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "kvlinker_sglang.engine.linker", raising=False)
    monkeypatch.setitem(sys.modules, "sglang", None)

    with pytest.raises(UnsupportedOperationError) as caught:
        kvlinker_sglang.KVLinker  # noqa: B018  # what is tested

    assert "sglang" in str(caught.value)
    assert TESTED_VERSIONS[0] in str(caught.value)
