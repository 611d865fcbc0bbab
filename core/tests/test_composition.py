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
    StoreError,
    UnsupportedOperationError,
)
from kvlinker.selftest import self_test
from kvlinker.store import ReadStatus, WriteStatus
from kvlinker.stores.composition import compose
from kvlinker.stores.encrypted import EncryptedStore
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


def test_a_number_that_is_another_plugin_s_name_is_passed_over(site: FakeSite) -> None:
    for name in ("box", "box_2"):
        modules = {f"fake_{name}": _BOX}
        entries = {name: f"fake_{name}"}
        site.install(f"fake-{name}", entries, kind=PluginKind.STORE, modules=modules)
    found = load_plugins(kinds=(PluginKind.STORE,), allow=["box", "box_2"])

    store = compose("tiers", {"stores": [{"box": {}}, {"box_2": {}}, {"box": {}}]}).open(found)

    Shelf(store).stock(object_keys(1))
    counters = store.stats().counters
    written = sorted(name for name in counters if name.endswith("_written"))
    assert written == ["behind_box_box_2_written", "behind_box_box_3_written", "box_written"]
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


def test_a_compressed_store_can_be_encrypted_behind_that(registry: PluginRegistry) -> None:
    inner = {"encrypted": {"secret": "0F" * 32, "store": {"box": {}}}}
    tree = compose("compressed", {"level": 3, "item_bytes": 1, "store": inner})

    store = tree.open(registry)

    shelf, keys = Shelf(store), object_keys(2)
    shelf.stock(keys)
    assert tree.title == "compressed encrypted box"
    assert store.stats().counters["bytes_in"] == 2 * shelf.page_bytes
    assert shelf.read(keys) == (ReadStatus.OK,) * 2
    store.close()


def test_tiers_write_back_within_bounds(registry: PluginRegistry) -> None:
    options = {
        "stores": [{"box": {}}, {"crate": {}}],
        "write": "back",
        "write_back_bytes": "1KiB",
        "write_back_objects": 10,
    }
    store = compose("tiers", options).open(registry)

    shelf = Shelf(store)
    shelf.stock(object_keys(1))
    shelf.stock(object_keys(2, chain="more than a KiB"))
    assert isinstance(store, TieredStore)
    assert store.flush(60)
    counters = store.stats().counters
    assert (counters["written_back"], counters["written_through"]) == (1, 2)
    store.close()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"write": "behind"}, 'tiers.write must be "through" or "back"'),
        ({"write_back_bytes": "1GiB"}, 'mean nothing without "write": "back"'),
        ({"write": "back", "write_back_objects": 0}, "write_back_objects"),
        ({"write": "back", "write_back_bytes": 0}, "write_back_bytes must be at least 1; write"),
        ({"writes": "back"}, "did you mean 'write'"),
    ],
)
def test_what_tiers_are_told_of_writing_is_checked(options: dict[str, object], why: str) -> None:
    with pytest.raises(ContractError, match=why):
        compose("tiers", {"stores": [{"box": {}}, {"crate": {}}], **options})


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


POLICIES: Mapping[str, Mapping[str, object]] = {
    "admission": {"remember": 1000},
    "expiring": {"seconds": "24h"},
    "pinned": {"capacity": "1 MiB", "uses": 2, "namespaces": ["ab" * 12], "lease_seconds": "2m"},
    "quota": {"bytes": "1GiB", "namespaces": {"ab" * 12: "1MiB"}},
    "retrying": {"attempts": 2, "first_seconds": 0.01, "lookup_seconds": "1s", "share": 0.5},
}
TITLES = {
    "admission": "admitting box",
    "expiring": "expiring box",
    "pinned": "pinning box",
    "quota": "limited box",
    "retrying": "retrying box",
}


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_is_put_around_a_store_by_name(registry: PluginRegistry, name: str) -> None:
    tree = compose(name, {**POLICIES[name], "store": {"box": {}}})

    store = tree.open(registry)

    report = self_test(store)
    assert report.has_passed, report.problems
    assert (tree.name, tree.title, tree.plugins) == ("box", TITLES[name], ("box",))
    store.close()
    (inner,) = opened_by("box")
    with pytest.raises(StoreClosedError):
        inner.exists(object_keys(1))


def test_policies_lie_in_each_other_and_around_tiers(registry: PluginRegistry) -> None:
    far = {"retrying": {"store": {"quota": {"bytes": "1MiB", "store": {"crate": {}}}}}}
    near = {"pinned": {"capacity": 4096, "uses": 1, "store": {"box": {}}}}
    options = {"seconds": 60, "store": {"admission": {"store": [near, far]}}}
    tree = compose("expiring", options)
    store = tree.open(registry)
    shelf, keys = Shelf(store), object_keys(2)

    first, second = shelf.write(keys), shelf.write(keys)

    assert tree.title == "expiring admitting pinning box > retrying limited crate"
    assert first == (WriteStatus.NOT_ADMITTED,) * 2
    assert second == (WriteStatus.WRITTEN,) * 2
    assert shelf.read(keys) == (ReadStatus.OK,) * 2
    counters = store.stats().counters
    assert (counters["not_admitted"], counters["crate_written"]) == (2, 2)
    store.close()


def test_two_policies_of_a_kind_count_together(registry: PluginRegistry) -> None:
    options = {"bytes": 640, "store": {"quota": {"bytes": 1280, "store": {"box": {}}}}}
    store = compose("quota", options).open(registry)
    shelf = Shelf(store)

    shelf.write(object_keys(3))

    assert store.stats().counters["over_quota"] == 2
    inside = compose(
        "quota", {"bytes": 640, "store": {"quota": {"bytes": 0, "store": {"box": {}}}}}
    )
    both = inside.open(registry)
    Shelf(both).write(object_keys(3))
    assert both.stats().counters["over_quota"] == 3
    for one in (store, both):
        one.close()


def test_a_policy_that_a_store_cannot_have_is_refused_and_the_store_closed(
    registry: PluginRegistry,
) -> None:
    options = {"capacity": 4000, "uses": 1, "store": {"box": {"capacity": 4096}}}

    with pytest.raises(ContractError, match="three quarters"):
        compose("pinned", options).open(registry)

    (inner,) = opened_by("box")
    with pytest.raises(StoreClosedError):
        inner.exists(object_keys(1))


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_shows_none_of_its_values(name: str) -> None:
    options = POLICIES[name]
    for option in options:
        with pytest.raises(ContractError) as caught:
            compose(name, {**options, option: "hunter2", "store": {"box": {}}})
        assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("secret", ["hunter2", "0f" * 31, {"X": "env"}, 64 * " ", 5])
def test_a_secret_that_is_none_is_refused_at_the_opening_and_not_shown(
    registry: PluginRegistry, secret: object
) -> None:
    tree = compose("encrypted", {"secret": secret, "store": {"box": {}}})

    with pytest.raises(ContractError, match="64 hexadecimal digits") as caught:
        tree.open(registry)

    assert "hunter2" not in str(caught.value) + repr(tree)
    assert not opened_by("box")


@pytest.mark.parametrize("reference", [{"env": "KV_SECRET"}, "${env:KV_SECRET}"])
def test_a_secret_may_be_a_reference_without_an_engine_that_resolves_it(
    registry: PluginRegistry, monkeypatch: pytest.MonkeyPatch, reference: object
) -> None:
    tree = compose("encrypted", {"secret": reference, "store": {"box": {}}})
    monkeypatch.setenv("KV_SECRET", "0f" * 32)

    store = tree.open(registry)

    assert isinstance(store, EncryptedStore)
    store.close()
    assert "0f0f" not in repr(tree)


@pytest.mark.parametrize(("name", "meant"), [("read-only", "read_only"), ("encryptd", "encrypted")])
def test_a_policy_in_another_spelling_is_refused_with_the_one_that_was_meant(
    registry: PluginRegistry, name: str, meant: str
) -> None:
    with pytest.raises(PluginNotFoundError, match=f"did you mean {meant}") as caught:
        compose(name, {"store": {"box": {}}}).open(registry)

    assert "installed: box, crate" in str(caught.value)


def test_a_reference_to_no_secret_says_where_it_looked(
    registry: PluginRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = compose("encrypted", {"secret": {"env": "KV_SECRET"}, "store": {"box": {}}})
    monkeypatch.delenv("KV_SECRET", raising=False)

    with pytest.raises(StoreError, match="variable KV_SECRET is not set; export it"):
        tree.open(registry)

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
        ("expiring", {"store": {"box": {}}}, "expiring.seconds is needed, such as 86400 or '24h'"),
        ("expiring", {"seconds": "soon"}, "expiring.seconds must be a number of seconds or a text"),
        ("expiring", {"seconds": True}, "got a value of type bool"),
        ("expiring", {"seconds": -5}, "expiring.seconds must be"),
        ("expiring", {"seconds": 10**400}, "expiring.seconds must be"),
        ("retrying", {"share": 10**400}, "retrying.share must be a number from 0 to 1"),
        ("expiring", {"seconds": "1h"}, "expiring.store must be .* got nothing"),
        ("expiring", {"second": 5}, "unknown option 'second'; did you mean 'seconds'"),
        ("admission", {"remember": 1}, "admission.remember must be at least 2, got 1"),
        ("admission", {"remember": "many"}, "admission.remember must be an integer"),
        ("pinned", {"uses": 3}, "pinned.capacity is needed, such as '20GiB'"),
        (
            "pinned",
            {"capacity": "1 GiG", "uses": 3},
            "a text such as '20GiB', got a value of type str",
        ),
        ("pinned", {"capacity": 5}, "pins nothing without namespaces or uses"),
        ("pinned", {"capacity": 5, "uses": 0}, "pinned.uses must be at least 1"),
        ("pinned", {"capacity": 5, "namespaces": "ab"}, "must be a list of namespaces"),
        ("pinned", {"capacity": 5, "namespaces": ["ab"]}, "24 hexadecimal digits of a namespace"),
        ("pinned", {"capacity": 5, "namespaces": [24 * "x"]}, "24 hexadecimal digits"),
        ("quota", {}, "limits nothing without bytes or namespaces"),
        ("quota", {"bytes": -1}, "quota.bytes must be at least 0"),
        ("quota", {"namespaces": [24 * "a"]}, "an object of namespaces and their bytes"),
        ("quota", {"namespaces": {24 * "a": None}}, f"quota.namespaces.{24 * 'a'} is needed"),
        ("quota", {"byte": 1}, "unknown option 'byte'; did you mean 'bytes'"),
        ("retrying", {"attempts": 0}, "retrying.attempts must be at least 1"),
        ("retrying", {"attempts": 1000}, "attempts must be at most 100"),
        ("retrying", {"share": 2}, "retrying.share must be a number from 0 to 1"),
        ("retrying", {"share": "0.1"}, "retrying.share must be a number from 0 to 1"),
        ("retrying", {"lookup_seconds": "2h"}, "lookup_seconds must be from 0 to 3600"),
        ("tiers", {"stores": [{"box": {}}], "promotion_bytes": "one"}, "must be a number of bytes"),
    ],
)
def test_what_is_no_composition_is_refused_by_place(
    name: str, options: Mapping[str, object], text: str
) -> None:
    with pytest.raises(ContractError, match=text):
        compose(name, options)


def nested(kind: str, depth: int) -> Mapping[str, object]:
    """Return stores in each other, so many deep."""
    inside: object = {"box": {}}
    for _ in range(depth - 1):
        inside = {kind: {"store": inside}} if kind == "read_only" else [inside]
    return {"store": inside}


@pytest.mark.parametrize("kind", ["read_only", "list"])
def test_stores_lie_in_each_other_to_a_depth_and_never_in_themselves(kind: str) -> None:
    endless: list[object] = []
    endless.append({kind: {"store": endless}} if kind == "read_only" else endless)

    assert compose("read_only", nested(kind, 32)).plugins == ("box",)
    for options in (nested(kind, 33), nested(kind, 5000), {"store": endless}):
        with pytest.raises(ContractError, match="in each other more than 32 deep, from read_only"):
            compose("read_only", options)


@pytest.mark.parametrize("stores", [[{"box": "hunter2"}], ["hunter2"], "hunter2"])
def test_a_value_in_the_wrong_place_is_not_shown(stores: Sequence[object]) -> None:
    with pytest.raises(ContractError) as caught:
        compose("tiers", {"stores": stores})

    assert "hunter2" not in str(caught.value)
