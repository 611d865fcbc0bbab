"""The options of `linker_extra_config`: complete by default, refused by name, silent about secrets."""

from __future__ import annotations

import json

import pytest

from kvlinker.errors import ContractError
from kvlinker.linker_options import LinkerOptions
from kvlinker_sglang.options import parse_config

FILE = {"plugin": "file", "options": {"path": "/var/kv", "capacity": "1GiB"}}
SECRET = "hunter2-hunter2"  # noqa: S105  # what must not show


def test_a_store_is_all_that_must_be_said() -> None:
    config = parse_config({"store": FILE})

    assert config.store.plugin == "file"
    assert config.store.options == FILE["options"]
    assert config.linker_options() == LinkerOptions(min_read_bytes=8 << 20, min_hit_tokens=64)
    assert config.namespace.model_id is None
    assert config.plugins is None
    assert config.strategy is None


def test_metrics_are_off_and_for_this_host_alone() -> None:
    config = parse_config({"store": FILE})

    assert not config.metrics.enabled
    assert config.metrics.host == "127.0.0.1"


@pytest.mark.parametrize("given", [None, [], "file", 1])
def test_what_is_no_object_is_refused(given: object) -> None:
    with pytest.raises(ContractError, match="linker_extra_config must be a JSON object, got"):
        parse_config(given)


def test_a_missing_store_is_refused_by_name() -> None:
    with pytest.raises(ContractError, match="store is missing"):
        parse_config({})


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"stores": FILE}, "stores is unknown; did you mean store"),
        (
            {"store": {"plugin": "file", "option": {}}},
            "store.option is unknown; did you mean options",
        ),
        (
            {"store": FILE, "namespace": {"model": "m"}},
            "namespace.model is unknown; did you mean model_id",
        ),
        ({"store": FILE, "metrics": {"ports": 1}}, "metrics.ports is unknown; did you mean port"),
        (
            {"store": FILE, "limits": {"load_second": 1}},
            "limits.load_second is unknown; did you mean load_seconds",
        ),
        (
            {"store": FILE, "namespace": {"secret": {"envs": "X"}}},
            "namespace.secret.envs is unknown; did you mean env",
        ),
        ({"store": FILE, "zzz": 1}, "zzz is unknown; it takes store, namespace, strategy"),
    ],
)
def test_an_unknown_key_is_refused_with_the_closest_match(
    given: dict[str, object], text: str
) -> None:
    with pytest.raises(ContractError) as caught:
        parse_config(given)

    assert text in str(caught.value)


def test_every_problem_is_named_at_once() -> None:
    with pytest.raises(ContractError) as caught:
        parse_config({"store": {"options": {}}, "strateg": "x", "metrics": {"port": 0}})

    for text in ("store.plugin is missing", "strateg is unknown", "metrics.port: "):
        assert text in str(caught.value)


def test_limits_are_those_of_the_core() -> None:
    limits = {"load_seconds": 2.5, "max_queued_offloads": 7, "min_read_bytes": 1}

    config = parse_config({"store": FILE, "limits": limits, "min_hit_tokens": 96})

    expected = LinkerOptions(load_seconds=2.5, max_queued_offloads=7, min_hit_tokens=96)
    assert config.linker_options() == expected


@pytest.mark.parametrize("value", [0, -1])
def test_a_limit_that_is_not_above_0_is_refused(value: float) -> None:
    with pytest.raises(ContractError, match="lookup_seconds must be a number above 0"):
        parse_config({"store": FILE, "limits": {"lookup_seconds": value}})


@pytest.mark.parametrize(
    "options",
    [
        {"password": SECRET},
        {"auth": {"token": SECRET}},
        {"access_key": SECRET},
        {"nodes": [{"api_key": SECRET}]},
        {"url": f"redis://user:{SECRET}@host:6379"},
    ],
)
def test_a_secret_as_it_is_gets_refused_and_is_not_shown(options: dict[str, object]) -> None:
    with pytest.raises(ContractError, match="holds a secret") as caught:
        parse_config({"store": {"plugin": "redis", "options": options}})

    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


def test_a_namespace_secret_in_the_wrong_place_is_not_shown() -> None:
    with pytest.raises(ContractError) as caught:
        parse_config({"store": FILE, "namespace": {"secret": SECRET}})

    assert "namespace.secret" in str(caught.value)
    assert SECRET not in str(caught.value)


def test_nothing_that_is_shown_of_the_options_has_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_SECRET", SECRET)
    reference = {"env": "KV_SECRET"}
    given = {
        "store": {"plugin": "redis", "options": {"password": reference}},
        "namespace": {"secret": reference},
    }

    config = parse_config(given)

    assert SECRET not in repr(config)
    assert SECRET not in json.dumps(config.model_dump(mode="json"))
