"""Compositions: stores that a configuration names, put together and opened."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence

import pytest
from fake_site import FakeSite

from kvlinker.discovery import PluginKind, PluginRegistry, load_plugins
from kvlinker.errors import (
    ContractError,
    PluginNotFoundError,
    StoreClosedError,
    UnsupportedOperationError,
)
from kvlinker.store import ReadStatus, WriteStatus
from kvlinker.stores.composition import compose
from kvlinker.stores.tiered import TieredStore
from kvlinker.testing import MemoryStore
from kvlinker.testing.shelves import Shelf, object_keys

_BOX = """
from kvlinker.errors import ContractError
from kvlinker.hookspecs import PluginInfo, hookimpl
from kvlinker.testing import MemoryStore

opened = []

@hookimpl
def describe_plugin():
    return PluginInfo(api_version=1, summary="a box in memory")

@hookimpl
def open_store(config):
    if config.get("refuse"):
        raise ContractError("no box today")
    opened.append(MemoryStore(capacity_bytes=config.get("capacity")))
    return opened[-1]
"""


@pytest.fixture
def registry(site: FakeSite) -> PluginRegistry:
    """Give the plugins `box` and `crate`."""
    for name in ("box", "crate"):
        modules = {f"fake_{name}": _BOX}
        site.install(f"fake-{name}", {name: f"fake_{name}"}, kind=PluginKind.STORE, modules=modules)
    return load_plugins(kinds=(PluginKind.STORE,), allow=["box", "crate"])


def opened_by(name: str) -> list[MemoryStore]:
    """Return the stores that a plugin has opened."""
    opened: list[MemoryStore] = importlib.import_module(f"fake_{name}").opened
    return opened


def test_a_name_and_options_are_the_plugin_s_store(registry: PluginRegistry) -> None:
    tree = compose("box", {"capacity": 4096})

    store = tree.open(registry)

    assert isinstance(store, MemoryStore)
    assert store.stats().capacity_bytes == 4096
    assert (tree.title, tree.plugins) == ("box", ("box",))


def test_tiers_are_opened_from_near_to_far(registry: PluginRegistry) -> None:
    stores = [{"box": {"capacity": 640}}, {"crate": {"capacity": 6400}}]
    tree = compose("tiers", {"stores": stores})

    store = tree.open(registry)

    shelf, keys = Shelf(store), object_keys(3)
    for key in keys:
        shelf.stock([key])
    counters = store.stats().counters
    assert isinstance(store, TieredStore)
    assert tree.title == "box > crate"
    assert counters["box_evicted"] == 2
    assert counters["crate_written"] == 3
    assert shelf.read(keys) == (ReadStatus.OK,) * 3
    store.close()


def test_tiers_of_one_plugin_are_told_apart(registry: PluginRegistry) -> None:
    tree = compose("tiers", {"stores": [{"box": {}}, {"fake-box:box": {}}, {"box": {}}]})

    store = tree.open(registry)

    Shelf(store).stock(object_keys(1))
    counters = store.stats().counters
    assert tree.plugins == ("box", "fake-box:box")
    assert counters["box_written"] == 1
    assert counters["behind_box_box_2_written"] == 1
    assert counters["behind_box_box_3_written"] == 1
    store.close()


def test_what_was_opened_is_closed_when_the_next_one_is_refused(registry: PluginRegistry) -> None:
    with pytest.raises(ContractError, match="no box today"):
        compose("tiers", {"stores": [{"box": {}}, {"crate": {"refuse": True}}]}).open(registry)

    (near,) = opened_by("box")
    with pytest.raises(StoreClosedError):
        near.exists(object_keys(1))


def test_a_list_within_a_list_is_tiers_too(registry: PluginRegistry) -> None:
    tree = compose("tiers", {"stores": [{"box": {}}, [{"crate": {}}, {"box": {}}]]})

    store = tree.open(registry)

    assert tree.title == "box > crate > box"
    assert tree.plugins == ("box", "crate")
    store.close()


def test_an_unknown_plugin_is_refused_with_the_closest_match(registry: PluginRegistry) -> None:
    tree = compose("tiers", {"stores": [{"box": {}}, {"crat": {}}]})

    with pytest.raises(PluginNotFoundError, match="did you mean crate"):
        tree.open(registry)


def test_promotion_can_be_switched_off(registry: PluginRegistry) -> None:
    options = {"stores": [{"box": {}}, {"crate": {}}], "promotion_bytes": 0}
    store = compose("tiers", options).open(registry)
    (near,) = opened_by("box")
    shelf, keys = Shelf(store), object_keys(2)
    shelf.stock(keys)
    near.delete(keys)

    shelf.read(keys)

    assert near.exists(keys) == (False, False)
    assert store.stats().counters["promotion_dropped"] == 2
    store.close()


def test_an_encrypted_store_can_be_a_tier(registry: PluginRegistry) -> None:
    far = {"encrypted": {"secret": "0f" * 32, "store": {"crate": {}}}}
    tree = compose("tiers", {"stores": [{"box": {}}, far]})

    store = tree.open(registry)

    shelf, keys = Shelf(store), object_keys(1)
    shelf.stock(keys)
    (near,), (sealed,) = opened_by("box"), opened_by("crate")
    assert (tree.title, tree.plugins) == ("box > encrypted crate", ("box", "crate"))
    assert near.payload(keys[0]) == shelf.payload(keys[0])
    assert shelf.payload(keys[0])[:64] not in sealed.payload(keys[0])
    assert store.stats().counters["crate_written"] == 1
    store.close()


def test_tiers_can_be_encrypted_as_one(registry: PluginRegistry) -> None:
    options = {"secret": "0F" * 32, "store": [{"box": {}}, {"crate": {}}]}
    store = compose("encrypted", options).open(registry)

    shelf, keys = Shelf(store), object_keys(1)
    shelf.stock(keys)

    (near,), (far,) = opened_by("box"), opened_by("crate")
    plain = shelf.payload(keys[0])[:64]
    assert not any(plain in store.payload(keys[0]) for store in (near, far))
    assert shelf.read(keys) == (ReadStatus.OK,)
    store.close()


def test_a_read_only_store_serves_what_is_there_and_takes_nothing(
    registry: PluginRegistry,
) -> None:
    tree = compose("read_only", {"store": {"box": {}}})
    store = tree.open(registry)
    (inner,) = opened_by("box")
    keys, new = object_keys(2), object_keys(1, chain="new")
    Shelf(inner).stock(keys)
    shelf = Shelf(store)

    statuses = shelf.write([*new, *keys])

    assert statuses == (WriteStatus.FULL, WriteStatus.EXISTS, WriteStatus.EXISTS)
    assert shelf.read([*keys, *new]) == (ReadStatus.OK, ReadStatus.OK, ReadStatus.MISS)
    assert store.delete(keys) == (False, False)
    with pytest.raises(UnsupportedOperationError, match="not cleared"):
        store.clear(keys[0][:12])
    assert inner.exists(keys) == (True, True)
    assert (tree.title, tree.plugins) == ("read-only box", ("box",))
    store.close()


def test_a_read_only_store_behind_another_keeps_writes_out_of_both(
    registry: PluginRegistry,
) -> None:
    options = {"stores": [{"box": {}}, {"read_only": {"store": {"crate": {}}}}]}
    store = compose("tiers", options).open(registry)
    (near,), (far,) = opened_by("box"), opened_by("crate")
    keys, new = object_keys(2), object_keys(1, chain="new")
    Shelf(far).stock(keys)
    shelf = Shelf(store)

    statuses = shelf.write(new)

    assert statuses == (WriteStatus.FULL,)
    assert shelf.read(keys) == (ReadStatus.OK, ReadStatus.OK)
    assert isinstance(store, TieredStore)
    assert store.wait_for_promotions(60)
    assert near.exists([*keys, *new]) == (True, True, False)
    assert far.exists(new) == (False,)
    store.close()


@pytest.mark.parametrize("secret", ["hunter2", "0f" * 31, {"env": "X"}, 64 * " ", 5])
def test_a_secret_that_is_none_is_refused_at_the_opening_and_not_shown(
    registry: PluginRegistry, secret: object
) -> None:
    tree = compose("encrypted", {"secret": secret, "store": {"box": {}}})

    with pytest.raises(ContractError, match="64 hexadecimal digits") as caught:
        tree.open(registry)

    assert "hunter2" not in str(caught.value) + repr(tree)
    assert not opened_by("box")


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("", {}, "by the name of its plugin, got a value of type str"),
        ("tiers", {}, "tiers.stores must be a list of stores from near to far, got nothing"),
        ("tiers", {"stores": []}, "got a list of 0"),
        ("tiers", {"stores": "box"}, "got a value of type str"),
        ("tiers", {"stores": {"box": {}}}, "got an object with 1 names"),
        ("tiers", {"stores": ["box"]}, r"tiers\[0\] must be"),
        (
            "tiers",
            {"stores": [{"box": {}, "crate": {}}]},
            r"tiers\[0\] must .* object with 2 names",
        ),
        ("tiers", {"stores": [{"box": 3}]}, r"tiers\[0\].box must be an object"),
        ("tiers", {"stores": [{3: {}}]}, "by the name of its plugin"),
        ("tiers", {"stores": [[]]}, r"tiers\[0\].stores must be a list"),
        ("read_only", {}, "read_only.store must be .* got nothing"),
        ("read_only", {"stor": {}}, "unknown option 'stor'; did you mean 'store'"),
        ("encrypted", {"store": {"box": {}}}, "encrypted.secret is needed"),
        ("encrypted", {"secret": "x"}, "encrypted.store must be .* got nothing"),
        ("encrypted", {"secrets": "x"}, "unknown option 'secrets'; did you mean 'secret'"),
        ("tiers", {"store": []}, "unknown option 'store'; did you mean 'stores'"),
        ("tiers", {"zzz": []}, "unknown option 'zzz'; it takes stores, promotion_bytes"),
        ("tiers", {"stores": [{"box": {}}], "promotion_bytes": -1}, "must be at least 0, got -1"),
        ("tiers", {"stores": [{"box": {}}], "promotion_bytes": "1"}, "must be an integer"),
    ],
)
def test_what_is_no_composition_is_refused_by_place(
    name: str, options: Mapping[str, object], text: str
) -> None:
    with pytest.raises(ContractError, match=text):
        compose(name, options)


@pytest.mark.parametrize("stores", [[{"box": "hunter2"}], ["hunter2"], "hunter2"])
def test_a_value_in_the_wrong_place_is_not_shown(stores: Sequence[object]) -> None:
    with pytest.raises(ContractError) as caught:
        compose("tiers", {"stores": stores})

    assert "hunter2" not in str(caught.value)
