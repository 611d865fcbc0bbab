"""The smoke tests of the kit: what they find in any installed plugin, and how they are started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import pytest
from fake_site import ENGINE, MODEL, STORE, FakeSite

from kvlinker.errors import KVLinkerError, PluginNotFoundError
from kvlinker.installed import PluginKind
from kvlinker.testing import smoke
from kvlinker.testing.smoke_checks import SmokeCheck, smoke_checks

GREEDY = MODEL.replace("return None", "return StrategyMatch(buffers=description.buffers)")
OVERWRITING = """
from pathlib import Path
from folder_store import FolderStore, describe_plugin
from kvlinker.errors import ContractError
from kvlinker.hookspecs import hookimpl

@hookimpl
def open_store(config):
    if unknown := config.keys() - {"path"}:
        raise ContractError(f"unknown options {sorted(unknown)}")
    return FolderStore(Path(config["path"]), capacity_bytes=32768)
"""


def findings(
    name: str, *, store_config: Mapping[str, object] | None = None, only: str = ""
) -> dict[str, str]:
    """Return what each check finds whose name begins so, empty where it finds nothing."""
    found = {}
    for check in smoke_checks(name, store_config=store_config):
        if not check.name.startswith(only):
            continue
        try:
            check.run()
        except (AssertionError, KVLinkerError) as error:
            found[check.name] = str(error)
        else:
            found[check.name] = ""
    return found


@pytest.mark.parametrize(
    ("kind", "source", "checks"),
    [
        (
            PluginKind.MODEL,
            MODEL,
            [
                "model-loads_in_a_process_of_its_own",
                "model-loads_no_engine_when_it_is_imported",
                "model-declines_an_unknown_family_and_touches_nothing",
            ],
        ),
        (
            PluginKind.ENGINE,
            ENGINE,
            [
                "engine-loads_in_a_process_of_its_own",
                "engine-loads_no_engine_when_it_is_imported",
                "engine-declines_what_is_not_its_own",
            ],
        ),
    ],
)
def test_a_sound_plugin_passes_the_checks_of_its_kind(
    site: FakeSite, kind: PluginKind, source: str, checks: list[str]
) -> None:
    site.install("kvlinker-sound", {"sound": "sound"}, kind=kind, modules={"sound": source})

    assert findings("kvlinker-sound:sound") == dict.fromkeys(checks, "")


def test_t5_a_store_is_opened_and_tried_where_its_options_are_given(
    site: FakeSite, tmp_path: Path
) -> None:
    modules = {"shelf_store": OVERWRITING}
    site.install("kvlinker-shelf", {"shelf": "shelf_store"}, kind=PluginKind.STORE, modules=modules)

    found = findings("shelf", store_config={"path": str(tmp_path)})

    assert set(found.values()) == {""}
    assert list(found)[-2:] == [
        "store-refuses_an_unknown_option",
        "store-takes_one_object_all_the_way",
    ]
    assert list(tmp_path.glob("*.object")) == []


@pytest.mark.parametrize(
    ("kind", "source", "check", "problem"),
    [
        (PluginKind.MODEL, "raise OSError('no disk')", "model-loads_in", "is broken: .*no disk"),
        (PluginKind.MODEL, f"import redis\n{MODEL}", "model-loads_no", "importing it loads redis"),
        (PluginKind.MODEL, GREEDY, "model-declines", "takes a cache of the family 'kvlinker_kit"),
        (
            PluginKind.MODEL,
            MODEL.replace("return None", "open(__file__).close()"),
            "model-declines",
            "touches more than the description: open",
        ),
        (
            PluginKind.ENGINE,
            ENGINE.replace("return None", "kv_cache.page_size"),
            "engine-declines",
            "raises for an object of 'wrong' that is no KV cache",
        ),
        (PluginKind.STORE, STORE, "store-refuses", "open_store raised ValueError"),
        (
            PluginKind.STORE,
            STORE.replace('raise ValueError(f"opened with {dict(config)}")', "return Memory()")
            + "\nfrom kvlinker.testing import MemoryStore as Memory\n",
            "store-refuses",
            "opens with the unknown option",
        ),
    ],
)
def test_a_wrong_plugin_is_told_what_is_wrong(
    site: FakeSite, kind: PluginKind, source: str, check: str, problem: str
) -> None:
    site.write("redis", "")
    site.install("kvlinker-wrong", {"wrong": "wrong"}, kind=kind, modules={"wrong": source})

    (found,) = findings("wrong", only=check).values()

    with pytest.raises(AssertionError, match=problem):
        raise AssertionError(found)


def test_a_plugin_of_two_kinds_is_checked_as_both(site: FakeSite) -> None:
    both = MODEL + ENGINE.partition("@hookimpl\ndef describe_kv_cache")[2].join(
        ["\n@hookimpl\ndef describe_kv_cache", ""]
    )
    text = "[kvlinker.models]\nboth = both\n[kvlinker.engines]\nboth = both\n"
    site.write("both", both)
    site.metadata("kvlinker-both", text)

    found = findings("both")

    assert {name.partition("-")[0] for name in found} == {"model", "engine"}
    assert set(found.values()) == {""}


def test_a_plugin_that_is_not_installed_is_named_with_the_closest_match(site: FakeSite) -> None:
    site.install("kvlinker-sound", {"sound": "sound"}, modules={"sound": MODEL})

    with pytest.raises(PluginNotFoundError, match=r"'sund', .*did you mean sound\?"):
        smoke_checks("sund")


# ---- as it is started -------------------------------------------------------------------------


def test_the_suite_runs_by_its_name_with_the_plugins_name(site: FakeSite, tmp_path: Path) -> None:
    modules = {"shelf_store": OVERWRITING}
    site.install("kvlinker-shelf", {"shelf": "shelf_store"}, kind=PluginKind.STORE, modules=modules)
    config = json.dumps({"path": str(tmp_path / "store")})
    options = ["--kvlinker-plugin=shelf", f"--kvlinker-store-config={config}"]
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider"]
    folders = os.pathsep.join([str(site.folder), str(Path(__file__).parent)])

    done = subprocess.run(
        [*command, "--pyargs", "kvlinker.testing.smoke", *options],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": folders},
        capture_output=True,
        text=True,
        check=False,
    )

    assert "test_it[store-takes_one_object_all_the_way] PASSED" in done.stdout, done.stdout
    assert "4 passed" in done.stdout


class Metafunc:
    """What pytest hands to a module that makes its own tests."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self.config = self
        self.options = options
        self.ids: list[str] = []

    def getoption(self, name: str, *, default: None) -> str | None:
        return self.options.get(name, default)

    def parametrize(self, argument: str, values: Sequence[SmokeCheck], *, ids: list[str]) -> None:
        assert argument == "check"
        assert [check.name for check in values] == ids
        self.ids = ids


def make_tests(**options: str) -> list[str]:
    """Return the names of the tests that a command line asks for."""
    metafunc = Metafunc({f"--kvlinker-{k.replace('_', '-')}": v for k, v in options.items()})
    smoke.pytest_generate_tests(cast("pytest.Metafunc", metafunc))
    return metafunc.ids


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "name the plugin: pytest --pyargs kvlinker.testing.smoke --kvlinker-plugin=NAME"),
        ({"plugin": "sund"}, "'sund', which no installed distribution provides"),
        ({"plugin": "sound", "store_config": "{"}, "--kvlinker-store-config must be JSON"),
        ({"plugin": "sound", "store_config": "[]"}, r"must be a JSON object, got \[\]"),
    ],
)
def test_a_wrong_command_line_says_what_is_missing(
    site: FakeSite, options: dict[str, str], problem: str
) -> None:
    site.install("kvlinker-sound", {"sound": "sound"}, modules={"sound": MODEL})

    with pytest.raises(pytest.UsageError, match=problem):
        make_tests(**options)


def test_a_store_is_opened_only_where_its_options_are_given(site: FakeSite) -> None:
    modules = {"sound": STORE}
    site.install("kvlinker-sound", {"sound": "sound"}, kind=PluginKind.STORE, modules=modules)

    opened = "store-takes_one_object_all_the_way"
    assert opened in make_tests(plugin="sound", store_config="{}")
    assert opened not in make_tests(plugin="sound")
