"""Metadata: one distribution counts once, two that claim one name are refused, and nothing is cached or imported."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_site import MODEL, FakeSite

from kvlinker.discovery import PluginKind, PluginStatus, available, load_plugins
from kvlinker.errors import DuplicatePluginError


def install_twins(site: FakeSite) -> None:
    """Install two distributions that both give `twin`, and a third plugin beside them."""
    for owner in ("a", "b"):
        module = f"fake_{owner}"
        site.install(f"fake-{owner}", {"twin": module}, modules={module: MODEL})
    site.install("fake-c", {"other": "fake_c"}, modules={"fake_c": MODEL})


# ---- two distributions, one name --------------------------------------------------------------


def test_s7_p06_a_name_that_two_distributions_claim_is_refused_with_both(site: FakeSite) -> None:
    install_twins(site)

    registry = site.load("twin", "other")

    assert [plugin.name for plugin in registry.models()] == ["other"]
    statuses = [record.status for record in registry.records if record.name == "twin"]
    assert statuses == [PluginStatus.DUPLICATE, PluginStatus.DUPLICATE]
    with pytest.raises(DuplicatePluginError) as caught:
        registry.model("twin")
    assert str(caught.value) == (
        "model plugin 'twin' is claimed by fake-a 1.0 (fake_a), fake-b 1.0 (fake_b); ask for 'fake-a:twin' "
        "or 'fake-b:twin', or list the other one in KVLINKER_DISABLED_PLUGINS"
    )


@pytest.mark.parametrize("owner", ["fake-a", "fake-b"])
def test_s7_p06_distribution_and_name_choose_one_of_two(site: FakeSite, owner: str) -> None:
    install_twins(site)
    asked = f"{owner}:twin"
    other = {"fake-a": "fake-b", "fake-b": "fake-a"}[owner]

    by_lookup = site.load("twin").model(asked)
    by_allow = site.load(asked).model("twin")
    by_deny = load_plugins(
        allow=["twin"], environ={"KVLINKER_DISABLED_PLUGINS": f"{other}:twin"}
    ).model("twin")

    chosen = {plugin.record.distribution for plugin in (by_lookup, by_allow, by_deny)}
    assert chosen == {owner}


def test_s7_a_broken_twin_does_not_make_the_other_one_right(site: FakeSite) -> None:
    install_twins(site)
    site.write("fake_b", "raise RuntimeError('boom')")

    registry = site.load("twin")

    assert registry.models() == ()
    with pytest.raises(DuplicatePluginError, match=r"fake-a 1\.0 .*fake-b 1\.0"):
        registry.model("twin")


def test_s7_strict_loading_raises_for_a_name_that_is_claimed_twice(site: FakeSite) -> None:
    install_twins(site)

    with pytest.raises(DuplicatePluginError, match="'twin' is claimed by"):
        site.load("twin", strict=True)


def test_s7_one_name_twice_in_one_distribution_is_refused(site: FakeSite) -> None:
    site.write("fake_a", MODEL)
    site.write("fake_b", MODEL)
    site.metadata("fake-x", "[kvlinker.models]\nx = fake_a\nx = fake_b\n")

    registry = site.load("x")

    with pytest.raises(DuplicatePluginError) as caught:
        registry.model("fake-x:x")
    assert str(caught.value) == (
        "model plugin 'x' is claimed by fake-x 1.0 (fake_a), fake-x 1.0 (fake_b); "
        "its entry points must give the name once"
    )


def test_s7_the_same_line_twice_is_one_plugin(site: FakeSite) -> None:
    site.write("fake_a", MODEL)
    site.metadata("fake-x", "[kvlinker.models]\nx = fake_a\nx = fake_a\n")

    assert len(site.installed("x")) == 1


# ---- one distribution, several places ---------------------------------------------------------


def test_s7_one_distribution_on_two_paths_counts_once(
    site: FakeSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "later").mkdir()
    later = FakeSite(tmp_path / "later")
    site.install("fake-x", {"x": "fake_x"}, version="2.0", modules={"fake_x": MODEL})
    later.install("Fake_X", {"x": "fake_x"}, version="1.0")
    monkeypatch.setattr(sys, "path", [*sys.path, str(later.folder)])

    (record,) = site.installed("x")

    assert record.version == "2.0"
    assert record.location == str(site.folder.resolve())
    assert record.shadowed == (str(later.folder.resolve()),)
    assert site.load("x").model("x").record.version == "2.0"


def test_s7_lib64_that_is_a_link_to_lib_is_not_a_second_place(
    site: FakeSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.install("fake-x", {"x": "fake_x"}, modules={"fake_x": MODEL})
    (tmp_path / "lib64").symlink_to(site.folder)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "lib64"), *sys.path])

    (record,) = site.installed("x")

    assert record.shadowed == ()


@pytest.mark.parametrize("stale_group", ["", "[kvlinker.models]\nx = fake_old\n"])
def test_p11_s7_an_egg_info_left_behind_does_not_hide_the_installed_distribution(
    site: FakeSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stale_group: str
) -> None:
    stale = tmp_path / "source" / "fake_x.egg-info"
    stale.mkdir(parents=True)
    (stale / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: fake-x\nVersion: 0.1\n")
    (stale / "entry_points.txt").write_text(stale_group)
    metadata = site.install("fake-x", {"x": "fake_x"}, modules={"fake_x": MODEL})
    site.make_editable(metadata)
    monkeypatch.setattr(sys, "path", [str(stale.parent), *sys.path])

    (record,) = site.installed("x")

    assert (record.version, record.module, record.editable) == ("1.0", "fake_x", True)
    assert record.shadowed == (str(stale.parent.resolve()),)
    assert site.load("x").model("x").record == site.record(site.load("x"), "x")


def test_p11_an_entry_that_the_newer_metadata_dropped_is_not_read_from_the_older(
    site: FakeSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "later").mkdir()
    later = FakeSite(tmp_path / "later")
    site.metadata("fake-x", "[console_scripts]\nx = fake_x:main\n", version="2.0")
    later.install("fake-x", {"x": "fake_x"}, version="1.0")
    monkeypatch.setattr(sys, "path", [*sys.path, str(later.folder)])

    assert site.installed("x") == []


def test_p11_what_an_installer_left_of_a_removed_distribution_is_no_plugin(site: FakeSite) -> None:
    metadata = site.install("fake-x", {"x": "fake_x"}, modules={"fake_x": MODEL})
    metadata.rename(metadata.with_name("~ake_x-1.0.dist-info"))

    assert site.installed("x") == []


@pytest.mark.parametrize("origin", ["{}", "not json", '{"dir_info": 3}', "[]"])
def test_p11_an_install_is_editable_only_where_its_origin_says_so(
    site: FakeSite, origin: str
) -> None:
    metadata = site.install("fake-x", {"x": "fake_x"})
    (metadata / "direct_url.json").write_text(origin)

    (record,) = site.installed("x")

    assert not record.editable


# ---- damaged metadata -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "entry_points"),
    [
        ("Name: fake-bad\nVersion: 1\n", b"[kvlinker.models]\nbad = \xff\n"),
        ("Name: \nVersion: 1\n", b"[kvlinker.models]\nbad = fake_bad\n"),
        ("Name: fake-bad\nVersion: \n", b"[kvlinker.models]\nbad = fake_bad\n"),
    ],
    ids=["undecodable", "nameless", "unversioned"],
)
def test_p01_damaged_metadata_of_one_distribution_is_reported_and_hides_no_other(
    site: FakeSite, caplog: pytest.LogCaptureFixture, metadata: str, entry_points: bytes
) -> None:
    site.install("fake-good", {"good": "fake_good"}, modules={"fake_good": MODEL})
    damaged = site.metadata("fake-bad", "")
    (damaged / "METADATA").write_text(f"Metadata-Version: 2.1\n{metadata}")
    (damaged / "entry_points.txt").write_bytes(entry_points)
    caplog.set_level(logging.WARNING, logger="kvlinker")

    registry = site.load("good")

    assert registry.model("good").name == "good"
    assert [record.name for record in registry.records if record.name in {"good", "bad"}] == [
        "good"
    ]
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("cannot read the metadata of a distribution (")


# ---- cost and freshness -----------------------------------------------------------------------


def test_p07_s5_listing_500_distributions_imports_none_of_them(site: FakeSite) -> None:
    for number in range(500):
        module = f"fake_{number}"
        site.install(f"fake-{number}", {f"p{number}": module}, modules={module: MODEL})
    before = set(sys.modules)

    found = [record for record in available() if record.distribution.startswith("fake-")]

    assert len(found) == 500
    assert {record.status for record in found} == {PluginStatus.AVAILABLE}
    assert not [name for name in set(sys.modules) - before if name.startswith("fake_")]


def test_p07_importing_the_package_looks_for_no_plugin() -> None:
    program = (
        "import sys, json, kvlinker\n"
        "looks = [m for m in sys.modules if m in ('pluggy', 'importlib_metadata', 'kvlinker.discovery')]\n"
        "print(json.dumps(looks))"
    )

    done = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE)

    assert json.loads(done.stdout) == []


def test_b107_no_module_of_core_imports_a_plugin_or_torch() -> None:
    program = (
        "import importlib, json, pkgutil, sys, kvlinker\n"
        "for module in pkgutil.walk_packages(kvlinker.__path__, 'kvlinker.'):\n"
        "    if not module.name.endswith('__main__'): importlib.import_module(module.name)\n"
        "print(json.dumps(sorted(sys.modules)))"
    )

    done = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE)

    names: list[str] = json.loads(done.stdout)
    assert "kvlinker.selection" in names
    assert [n for n in names if n.partition(".")[0].startswith("kvlinker_")] == []
    assert {"torch", "transformers", "redis", "boto3"}.isdisjoint(names)


def test_p08_an_edit_of_an_entry_point_is_seen_at_once(site: FakeSite) -> None:
    metadata = site.install("fake-x", {"before": "fake_x"}, modules={"fake_x": MODEL})
    assert len(site.installed("before")) == 1

    (metadata / "entry_points.txt").write_text("[kvlinker.models]\nafter = fake_x\n")

    assert site.installed("before") == []
    assert len(site.installed("after")) == 1
    assert site.load("after").model("after").name == "after"


def test_p08_what_is_installed_or_removed_within_one_tick_of_the_clock_is_seen_at_once(
    site: FakeSite,
) -> None:
    os.utime(site.folder, ns=(0, 0))
    assert site.installed("x") == []

    metadata = site.install("fake-x", {"x": "fake_x"})
    os.utime(site.folder, ns=(0, 0))
    assert len(site.installed("x")) == 1

    metadata.rename(site.folder.parent / "removed")
    os.utime(site.folder, ns=(0, 0))
    assert site.installed("x") == []


def test_plugins_are_listed_by_name_and_distribution(site: FakeSite) -> None:
    for distribution, name in (("fake-b", "m"), ("fake-a", "m"), ("fake-c", "l")):
        site.install(distribution, {name: "fake_x"})
    site.install("fake-d", {"m": "fake_x"}, kind=PluginKind.STORE)

    found = [record.qualified_name for record in site.installed("l", "m")]

    assert found == ["fake-c:l", "fake-a:m", "fake-b:m", "fake-d:m"]
