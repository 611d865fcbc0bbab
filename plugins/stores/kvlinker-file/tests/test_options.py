"""Options are checked before anything on disk is touched, and every refusal says what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvlinker_file
from kvlinker.errors import ContractError
from kvlinker_file import Durability, FileStore, FileStoreOptions


def test_an_unknown_option_is_refused_with_the_closest_match(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="unknown option 'capasity'; did you mean 'capacity'"):
        kvlinker_file.open_store({"path": tmp_path / "s", "capasity": "1GiB"})
    with pytest.raises(ContractError, match=r"unknown option 'x'; known are \['capacity'"):
        kvlinker_file.open_store({"path": tmp_path / "s", "x": 1})

    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("missing", ["path", "capacity"])
def test_a_missing_option_is_named(tmp_path: Path, missing: str) -> None:
    config: dict[str, object] = {"path": tmp_path, "capacity": "1GiB"}
    del config[missing]

    with pytest.raises(ContractError, match=f"option '{missing}' is needed"):
        FileStoreOptions.of_config(config)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("capacity", "1MiB", "capacity must be at least 2097152 B"),
        ("capacity", 10**30, r"capacity must be at most 1152921504606846976 B \(1024 PiB\)"),
        ("capacity", "20 G", "capacity: '20 G' is not a number of bytes such as"),
        ("capacity", 1.5, "capacity must be a whole number of bytes or a text such as '20GiB'"),
        ("segment_size", None, "segment_size must be a whole number of bytes or a text such as"),
        ("segment_size", "1kB", "segment_size must be 0 or between 262144 B and the capacity"),
        ("segment_size", "2GiB", "segment_size must be 0 or between"),
        ("durability", "always", r"durability must be one of \['process', 'disk'\], got 'always'"),
        ("verify", 1, "verify must be true or false, got 1"),
        ("self_test", "yes", "self_test must be true or false, got 'yes'"),
        ("close_seconds", 0, "close_seconds must be a positive number"),
        ("close_seconds", float("inf"), "close_seconds must be a positive number"),
        ("close_seconds", float("nan"), "close_seconds must be a positive number"),
        ("close_seconds", 10**400, "close_seconds must be a positive number of seconds, at most a"),
        ("close_seconds", True, "close_seconds must be a positive number"),
        ("close_seconds", "3", "close_seconds must be a positive number"),
        ("path", "", "path must name a directory"),
        ("path", 3, "path must name a directory"),
        ("path", "a\0b", "path must name a directory, and .* holds a zero byte"),
        ("path", "~no such user/kv", "begins with the home of a user whom this machine does not"),
    ],
)
def test_wrong_values_are_refused(tmp_path: Path, option: str, value: object, message: str) -> None:
    config = {"path": tmp_path, "capacity": "1GiB", option: value}

    with pytest.raises(ContractError, match=message):
        FileStoreOptions.of_config(config)


def test_defaults_verify_and_cut_the_capacity_into_64_segments() -> None:
    options = FileStoreOptions.of_config({"path": "cache", "capacity": "1GiB"})

    assert options.path == Path("cache").absolute()
    assert (options.capacity, options.segment_size) == (1 << 30, 1 << 24)
    assert (options.verify, options.self_test) == (True, False)
    assert options.durability is Durability.PROCESS


def test_values_of_their_own_types_are_taken() -> None:
    options = FileStoreOptions.of_config(
        {
            "path": "~/cache",
            "capacity": 1 << 30,
            "segment_size": "1.0001MiB",
            "durability": "disk",
            "verify": False,
        }
    )

    assert options.path == Path("~/cache").expanduser()
    assert options.segment_size == 1 << 20  # whole pages
    assert options.durability is Durability.DISK


def test_the_plugin_opens_a_store_from_a_configuration(tmp_path: Path) -> None:
    info = kvlinker_file.describe_plugin()
    store = kvlinker_file.open_store({"path": tmp_path / "s", "capacity": "4MiB"})

    assert info.api_version == 1
    assert isinstance(store, FileStore)
    store.close()
