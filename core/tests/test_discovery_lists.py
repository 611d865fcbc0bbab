"""Allow and deny lists: a typo is an error, a denied plugin is never imported, and no list widens another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from fake_site import MODEL, STORE, FakeSite

from kvlinker.discovery import PluginKind, PluginStatus, load_plugins
from kvlinker.errors import ContractError, DisabledPluginError, PluginNotFoundError


@pytest.fixture
def three(site: FakeSite) -> FakeSite:
    """Give a site with the plugins one, two and three, each in a distribution and a module of its own."""
    for name in ("one", "two", "three"):
        site.install(f"fake-{name}", {name: f"fake_{name}"}, modules={f"fake_{name}": MODEL})
    return site


def loaded(
    environ: Mapping[str, str],
    *,
    allow: Sequence[str] | None = None,
    deny: Sequence[str] | None = None,
) -> list[str]:
    registry = load_plugins(allow=allow, deny=deny, environ=environ)
    return [plugin.name for plugin in registry.models()]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("", []),
        ("one", ["one"]),
        ("one,two", ["one", "two"]),
        (" two , ,one,", ["one", "two"]),
        ("fake-one:one", ["one"]),
        ("Fake_One:one,two", ["one", "two"]),
    ],
)
def test_s6_p04_only_what_the_variable_allows_is_loaded(
    three: FakeSite, value: str, expected: list[str]
) -> None:
    names = loaded({"KVLINKER_PLUGINS": value})

    assert names == expected
    for name in ("one", "two", "three"):
        assert three.is_imported(f"fake_{name}") == (name in expected)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("", ["one", "three", "two"]),
        ("one", ["three", "two"]),
        ("one,two", ["three"]),
        ("fake-three:three", ["one", "two"]),
    ],
)
def test_s6_p04_what_the_variable_denies_is_not_loaded(
    three: FakeSite, value: str, expected: list[str]
) -> None:
    names = loaded({"KVLINKER_DISABLED_PLUGINS": value}, allow=["one", "two", "three"])

    assert names == expected
    for name in ("one", "two", "three"):
        assert three.is_imported(f"fake_{name}") == (name in expected)


def test_s6_p04_a_denied_plugin_is_not_imported_whatever_allows_it(site: FakeSite) -> None:
    marker = site.folder / "imported"
    source = f"open({str(marker)!r}, 'w').close()\n{MODEL}"
    site.install("fake-x", {"x": "fake_x"}, modules={"fake_x": source})

    assert loaded({"KVLINKER_PLUGINS": "x"}, allow=["x"], deny=["x"]) == []
    assert not marker.exists()
    assert loaded({"KVLINKER_PLUGINS": "x"}) == ["x"]
    assert marker.exists()


def test_s6_arguments_narrow_what_the_environment_admits_and_never_widen_it(
    three: FakeSite,
) -> None:
    environ = {"KVLINKER_PLUGINS": "one,two", "KVLINKER_DISABLED_PLUGINS": "two"}

    assert loaded(environ) == ["one"]
    assert loaded(environ, allow=["one", "two", "three"]) == ["one"]
    assert loaded(environ, allow=["three"]) == []
    assert loaded(environ, deny=[]) == ["one"]
    assert loaded(environ, deny=["one"]) == []
    assert not three.is_imported("fake_three")


def test_s6_the_process_s_own_environment_is_read_by_default(
    three: FakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLINKER_PLUGINS", "one,two")
    monkeypatch.setenv("KVLINKER_DISABLED_PLUGINS", "two")

    registry = load_plugins()

    assert [plugin.name for plugin in registry.models()] == ["one"]
    assert three.record(registry, "three").status is PluginStatus.DISABLED


@pytest.mark.parametrize(
    ("environ", "allow", "deny", "text"),
    [
        ({"KVLINKER_PLUGINS": "tree"}, None, None, "KVLINKER_PLUGINS lists 'tree', which no"),
        (
            {"KVLINKER_DISABLED_PLUGINS": "tree"},
            None,
            None,
            "KVLINKER_DISABLED_PLUGINS lists 'tree'",
        ),
        ({}, ["tree"], None, "the argument 'allow' lists 'tree'"),
        ({}, None, ["one", "tree"], "the argument 'deny' lists 'tree'"),
    ],
)
def test_s6_p03_a_name_that_nobody_provides_is_an_error_with_the_closest_match(
    three: FakeSite,
    environ: Mapping[str, str],
    allow: list[str] | None,
    deny: list[str] | None,
    text: str,
) -> None:
    with pytest.raises(PluginNotFoundError, match=text) as caught:
        load_plugins(allow=allow, deny=deny, environ=environ)

    assert "did you mean three?" in str(caught.value)
    assert not three.is_imported("fake_one")


@pytest.mark.parametrize("name", ["fake-three:tree", "fake-tree:three"])
def test_s6_p03_a_name_with_its_distribution_is_corrected_in_that_form(
    three: FakeSite, name: str
) -> None:
    with pytest.raises(PluginNotFoundError, match=f"the argument 'allow' lists '{name}'") as caught:
        load_plugins(allow=[name], environ={})

    assert "did you mean fake-three:three?" in str(caught.value)
    assert not three.is_imported("fake_one")


def test_s6_p03_a_name_that_two_distributions_have_is_corrected_to_both(three: FakeSite) -> None:
    three.install("fake-other", {"three": "fake_other"}, modules={"fake_other": ""})

    with pytest.raises(PluginNotFoundError) as caught:
        load_plugins(allow=["tree"], environ={})

    assert "did you mean fake-other:three or fake-three:three?" in str(caught.value)


def test_s6_a_list_is_called_what_its_owner_calls_it(three: FakeSite) -> None:
    with pytest.raises(PluginNotFoundError, match="the option 'names' lists 'tree', which no"):
        load_plugins(allow=["tree"], environ={}, allowed_by="the option 'names'")
    registry = load_plugins(allow=["one"], environ={}, allowed_by="the option 'names'")

    assert three.record(registry, "two").reason == "not allowed by the option 'names'"


def test_s6_p03_a_name_that_resembles_nothing_is_an_error_too(three: FakeSite) -> None:
    with pytest.raises(PluginNotFoundError, match="'qqqq'") as caught:
        load_plugins(allow=["one", "qqqq"], environ={})

    assert "did you mean" not in str(caught.value)
    assert len(three.installed("one")) == 1


def test_s6_a_single_text_is_no_list() -> None:
    with pytest.raises(ContractError, match=r"'allow' must be a list of plugin names, got .*'one'"):
        load_plugins(allow="one", environ={})
    with pytest.raises(ContractError, match=r"'deny' must be a list of plugin names, got .*'one'"):
        load_plugins(deny="one", environ={})


def test_s6_a_disabled_plugin_is_an_error_of_its_own_that_says_who_disabled_it(
    three: FakeSite,
) -> None:
    registry = load_plugins(allow=["one", "two"], environ={"KVLINKER_DISABLED_PLUGINS": "two"})

    with pytest.raises(DisabledPluginError, match=r"'two' .* denied by KVLINKER_DISABLED_PLUGINS"):
        registry.model("two")
    with pytest.raises(
        DisabledPluginError, match=r"'three' .* not allowed by the argument 'allow'"
    ):
        registry.model("three")
    assert three.record(registry, "one").status is PluginStatus.LOADED


def test_s6_a_plain_name_means_every_kind_of_that_name(site: FakeSite) -> None:
    site.install("fake-m", {"x": "fake_m"}, modules={"fake_m": MODEL})
    site.install("fake-s", {"x": "fake_s"}, kind=PluginKind.STORE, modules={"fake_s": STORE})

    registry = site.load("x")

    assert registry.model("x").record.distribution == "fake-m"
    assert registry.store("x").record.distribution == "fake-s"
