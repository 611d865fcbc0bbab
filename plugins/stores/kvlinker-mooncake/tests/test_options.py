"""Options: what is not known is refused by name."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

import kvlinker_mooncake
from kvlinker.errors import ContractError
from kvlinker.testing.fresh_process import heavy_imports
from kvlinker_mooncake import MooncakeStoreOptions

MASTER = "mooncake-master:50051"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "option 'master' is needed, such as"),
        ({"master": MASTER, "replica": 2}, "unknown option 'replica'; did you mean 'replicas'"),
        ({"master": MASTER, "zzz": 2}, "unknown option 'zzz'; known are"),
        ({"master": "mooncake-master"}, "master must be host:port"),
        ({"master": "http://master:50051"}, "master must be host:port"),
        ({"master": "master:70000"}, "master must be host:port"),
        ({"master": 50051}, "master must be host:port"),
        ({"master": MASTER, "metrics": "9003"}, "metrics must be host:port"),
        ({"master": MASTER, "host": ""}, "host must be a name without spaces"),
        ({"master": MASTER, "devices": None}, "devices must be a text"),
        ({"master": MASTER, "protocol": "udp"}, "protocol must be one of tcp, rdma"),
        ({"master": MASTER, "reads": "layers"}, "reads must be one of auto, ranged, whole"),
        ({"master": MASTER, "staged": "yes"}, "staged must be true or false"),
        ({"master": MASTER, "staged": True, "reads": "ranged"}, "'whole' or 'auto' where staged"),
        ({"master": MASTER, "prefix": "a/b"}, "prefix must be 1 to 64 letters"),
        ({"master": MASTER, "prefix": ".*"}, "prefix must be 1 to 64 letters"),
        ({"master": MASTER, "replicas": 0}, "replicas must be at least 1, got 0"),
        ({"master": MASTER, "replicas": True}, "replicas must be an integer, got True"),
        ({"master": MASTER, "call_bytes": 1}, "call_bytes must be at least 1048576"),
        ({"master": MASTER, "answer_seconds": 0}, "answer_seconds must be a positive number"),
        ({"master": MASTER, "lease_seconds": "10"}, "lease_seconds must be a positive number"),
        ({"master": MASTER, "pause_seconds": float("nan")}, "pause_seconds must be a positive"),
        ({"master": MASTER, "segments": "node:1"}, "segments must be a list of names"),
        ({"master": MASTER, "segments": [""]}, "segments must be a list of names"),
    ],
)
def test_an_option_that_is_not_known_or_has_no_meaning_is_refused(
    options: Mapping[str, object], reason: str
) -> None:
    with pytest.raises(ContractError, match=reason.replace(".", r"\.")):
        MooncakeStoreOptions.of_config(options)


def test_options_of_a_configuration_are_taken() -> None:
    options = MooncakeStoreOptions.of_config(
        {"master": "[::1]:50051", "segments": ["a:1", "b:2"], "lease_seconds": 5, "replicas": 2}
    )

    assert options.segments == ("a:1", "b:2")
    assert options.lease_seconds == 5.0
    assert options.label == "mooncake store [::1]:50051/kvlinker"


def test_importing_the_plugin_imports_no_client() -> None:
    assert "mooncake" not in heavy_imports("kvlinker_mooncake")
    assert kvlinker_mooncake.describe_plugin().api_version == 1


def test_bytes_may_have_a_unit() -> None:
    config = {"master": MASTER, "segment_bytes": "1GiB", "buffer_bytes": "32MiB"}
    options = MooncakeStoreOptions.of_config(config)

    assert (options.segment_bytes, options.buffer_bytes) == (1 << 30, 32 << 20)


def test_a_wrong_value_names_the_store() -> None:
    with pytest.raises(ContractError, match="mooncake store: replicas must be at least 1"):
        MooncakeStoreOptions.of_config({"master": MASTER, "replicas": 0})
