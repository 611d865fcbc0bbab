"""`kvlinker plugins`: a row for each plugin, the reason for each that cannot be used, and an exit code."""

from __future__ import annotations

import sys

import pytest
from cli_fakes import install_model, install_store, run
from fake_site import MODEL, FakeSite

from kvlinker import __version__

ONLY = {"KVLINKER_PLUGINS": "windowed"}
FIELDS = {
    "name",
    "kind",
    "distribution",
    "version",
    "api_version",
    "status",
    "reason",
    "summary",
    "module",
    "location",
    "editable",
    "shadowed",
    "traceback",
}


def test_a_sound_plugin_is_a_row_and_no_problem(site: FakeSite) -> None:
    install_model(site)

    outcome = run("plugins", env=ONLY)

    (row,) = [line.split() for line in outcome.out.splitlines() if line.startswith("windowed")]
    assert row == ["windowed", "model", "fake-windowed", "1.0", "1", "loaded"]
    assert (outcome.code, outcome.err) == (0, "")


def test_a_broken_plugin_is_shown_with_its_reason_and_fails(site: FakeSite) -> None:
    install_model(site, "import no_such_module")
    install_store(site)

    outcome = run("plugins", env={"KVLINKER_PLUGINS": "windowed,boxes"})

    assert outcome.code == 1
    assert (
        "model plugin 'windowed' (fake-windowed 1.0) is broken: loading it raised "
        "ModuleNotFoundError: No module named 'no_such_module'"
    ) in outcome.out
    assert "boxes" in outcome.out


def test_a_name_that_two_distributions_claim_fails(site: FakeSite) -> None:
    install_model(site)
    site.install("other", {"windowed": "other_windowed"}, modules={"other_windowed": MODEL})

    outcome = run("plugins", env=ONLY)

    assert outcome.code == 1
    assert "claimed by fake-windowed 1.0 (fake_windowed), other 1.0" in outcome.out


def test_a_plugin_that_hangs_is_given_up_at_the_deadline(site: FakeSite) -> None:
    install_model(site, "import time; time.sleep(3600)")

    outcome = run("plugins", "--deadline", "0.5", env=ONLY)

    assert outcome.code == 1
    assert "did not finish within 0.5 s" in outcome.out


def test_a_disabled_plugin_is_no_problem(site: FakeSite) -> None:
    install_model(site, "import no_such_module")

    outcome = run("plugins", env={"KVLINKER_DISABLED_PLUGINS": "windowed", "KVLINKER_PLUGINS": ""})

    assert outcome.code == 0
    assert "(fake-windowed 1.0) is disabled" in outcome.out


def test_json_holds_every_field_and_nothing_else_is_printed(site: FakeSite) -> None:
    install_model(site)
    install_store(site, source="print('noise')\nraise ValueError('x')")

    outcome = run("plugins", "--json", env={"KVLINKER_PLUGINS": "windowed,boxes"})

    form = outcome.form
    assert (outcome.code, form["kvlinker"], form["api_version"]) == (1, __version__, 1)
    assert isinstance(form["plugins"], list)
    by_name = {plugin["name"]: plugin for plugin in form["plugins"]}
    assert all(set(plugin) == FIELDS for plugin in form["plugins"])
    assert by_name["windowed"]["status"] == "loaded"
    assert by_name["windowed"]["location"] == str(site.folder.resolve())
    assert by_name["boxes"]["reason"] == "loading it raised ValueError: x"
    assert "fake_boxes.py" in by_name["boxes"]["traceback"]


def test_a_list_with_an_unknown_name_is_refused_with_the_closest_one(site: FakeSite) -> None:
    install_model(site)

    outcome = run("plugins", env={"KVLINKER_PLUGINS": "windwed"})

    assert (outcome.code, outcome.out) == (2, "")
    assert "did you mean windowed?" in outcome.err


def test_a_deadline_that_is_no_time_is_refused() -> None:
    outcome = run("plugins", "--deadline", "0")

    assert outcome.code == 2
    assert outcome.err == "error: the deadline of a probe must be positive, got 0.0 s\n"


def test_without_any_plugin_it_says_what_to_install(
    site: FakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("plugins", "--deadline", "0")  # the command line imports more when it is first used
    monkeypatch.setattr(sys, "path", [str(site.folder)])

    outcome = run("plugins")

    assert outcome.code == 0
    assert outcome.out == ("no plugin is installed; try: pip install kvlinker-mha kvlinker-file\n")
