"""Which plugins a worker loads, and that a wrong name is put down to the key that holds it."""

from __future__ import annotations

import pytest

from kvlinker.errors import DisabledPluginError, PluginNotFoundError
from kvlinker_sglang.options import parse_config
from kvlinker_sglang.worker import load_registry


def refusal(**config: object) -> str:
    with pytest.raises(PluginNotFoundError) as caught:
        load_registry(parse_config({"store": {"plugin": "file"}, **config}))
    return str(caught.value)


def test_a_plugin_that_nobody_provides_is_put_down_to_plugins() -> None:
    text = refusal(plugins=["mah"])

    assert text.startswith(
        "plugins in linker_extra_config lists 'mah', which no installed distribution provides; did you mean mha?"
    )


@pytest.mark.parametrize("more", [{}, {"plugins": ["mha"]}])
def test_a_store_that_nobody_provides_is_put_down_to_its_own_key(more: dict[str, object]) -> None:
    text = refusal(store={"plugin": "fiel"}, **more)

    assert text.startswith(
        "store.plugin in linker_extra_config is 'fiel', which no installed distribution provides; "
        "did you mean file?"
    )


def test_a_tier_that_nobody_provides_is_put_down_to_the_store() -> None:
    text = refusal(store=[{"file": {}}, {"fiel": {}}])

    assert "is 'fiel', which no installed distribution provides; did you mean file?" in text


def test_every_store_of_tiers_may_be_loaded() -> None:
    tiers = [{"file": {"path": "/fast"}}, {"file": {"path": "/large"}}]

    registry = load_registry(parse_config({"store": tiers, "plugins": ["mla"]}))

    assert registry.store("file").name == "file"


def test_a_strategy_that_may_not_be_loaded_is_put_down_to_plugins() -> None:
    registry = load_registry(parse_config({"store": {"plugin": "file"}, "plugins": ["mla"]}))

    with pytest.raises(DisabledPluginError, match="not allowed by plugins in linker_extra_config"):
        registry.model("mha")
    assert registry.store("file").name == "file"
