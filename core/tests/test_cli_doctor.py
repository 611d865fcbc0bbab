"""`kvlinker doctor`: what it looks at, and what it takes for a problem."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import pytest
from cli_fakes import STORE_SOURCE, install_model, install_store, run
from fake_site import FakeSite

from kvlinker import __version__
from kvlinker.cli.doctor_command import store_findings
from kvlinker.cli.findings import (
    Level,
    disk_finding,
    environment_findings,
    limit_finding,
    plugin_findings,
    torch_finding,
)
from kvlinker.store import StoreStats

LONG_S = 600.0
"""Longer than any test may take."""
ONLY = {"KVLINKER_PLUGINS": "boxes"}
FULL = STORE_SOURCE.replace("    return MemoryStore(", "    return Full(").replace(
    "@hookimpl\ndef open_store(",
    "from kvlinker.store import WriteStatus\n\n"
    "class Full(MemoryStore):\n"
    "    def write(self, batches, memory, *, may_publish):\n"
    "        return tuple((WriteStatus.FULL,) * len(batch.keys) for batch in batches)\n\n"
    "@hookimpl\ndef open_store(",
)
WRONG_READ = STORE_SOURCE.replace("    return MemoryStore(", "    return Forgetful(").replace(
    "@hookimpl\ndef open_store(",
    "class Forgetful(MemoryStore):\n"
    "    def exists(self, keys):\n"
    "        return (False,) * len(keys)\n\n"
    "@hookimpl\ndef open_store(",
)


def topics(out: str) -> dict[str, list[str]]:
    """Return JSON findings as topic to levels."""
    found: dict[str, list[str]] = {}
    for finding in json.loads(out)["findings"]:
        found.setdefault(finding["topic"], []).append(finding["level"])
    return found


def findings_of(out: str) -> list[dict[str, str]]:
    """Return JSON findings."""
    found: list[dict[str, str]] = json.loads(out)["findings"]
    return found


@pytest.fixture(autouse=True)
def light_torch(site: FakeSite) -> None:
    """Put a torch in front of the real one, which takes seconds to import."""
    site.metadata("torch", "", version="9.9")
    write_torch(site, torch_module(built_for=None, devices=[]))


def write_torch(site: FakeSite, source: str) -> None:
    """Write a module that other processes import as torch; this one may have the real one, which stays."""
    (site.folder / "torch.py").write_text(source)


def torch_module(*, built_for: str | None, devices: list[str]) -> str:
    return (
        "class version: cuda = " + repr(built_for) + "\n"
        "class cuda:\n"
        f"    is_available = staticmethod(lambda: {bool(devices)})\n"
        f"    device_count = staticmethod(lambda: {len(devices)})\n"
        f"    get_device_name = staticmethod({devices}.__getitem__)\n"
        "__version__ = '9.9'\n"
    )


# ---- the command ------------------------------------------------------------------------------


def test_t5_p11_a_sound_environment_and_store_are_shown_without_a_problem(
    site: FakeSite, tmp_path: Path
) -> None:
    install_store(site)

    outcome = run(
        "doctor",
        *("--store", "boxes", "--option", f"path={tmp_path}", "--option", "capacity=4096"),
        env=ONLY,
    )

    lines = [" ".join(line.split()) for line in outcome.out.splitlines()]
    assert outcome.code == 0
    assert f"ok python {sys.version.split()[0]} at {sys.executable}" in lines
    assert any(line.startswith(f"ok store boxes fake-boxes 1.0 in {site.folder}") for line in lines)
    assert "ok test of boxes 0 objects, 0 B of 4.0 KiB taken" in lines
    assert any(line.startswith("ok test of boxes self-test passed: ") for line in lines)
    assert any(line.startswith("ok disk ") and line.endswith("4.0 KiB wanted") for line in lines)
    assert lines[-1] == "no problem found"


def test_tiers_are_tested_as_one_store(site: FakeSite) -> None:
    install_store(site)
    install_store(site, name="crates")
    stores = '[{"boxes": {"capacity": 4096}}, {"crates": {"capacity": 8192}}]'

    outcome = run(
        *("doctor", "--store", "tiers", "--option", f"stores={stores}"),
        env={"KVLINKER_PLUGINS": "boxes,crates"},
    )

    lines = [" ".join(line.split()) for line in outcome.out.splitlines()]
    assert outcome.code == 0
    assert "ok test of tiers 0 objects, 0 B of 12.0 KiB taken" in lines
    assert any(line.startswith("ok test of tiers self-test passed: ") for line in lines)


@pytest.mark.parametrize(
    ("name", "option"), [("admission", "remember=100"), ("expiring", "seconds=24h")]
)
def test_a_store_with_a_policy_is_tested_through_it(site: FakeSite, name: str, option: str) -> None:
    install_store(site)
    store = 'store={"boxes": {"capacity": 4096}}'

    outcome = run(
        *("doctor", "--store", name, "--option", option, "--option", store),
        env={"KVLINKER_PLUGINS": "boxes"},
    )

    lines = [" ".join(line.split()) for line in outcome.out.splitlines()]
    assert outcome.code == 0
    assert any(line.startswith(f"ok test of {name} self-test passed: ") for line in lines)


def test_json_holds_findings_and_plugins(site: FakeSite) -> None:
    install_store(site)

    outcome = run("doctor", "--json", env=ONLY)

    assert outcome.code == 0
    assert topics(outcome.out)["store boxes"] == ["ok"]
    plugins = {plugin["name"]: plugin for plugin in json.loads(outcome.out)["plugins"]}
    assert plugins["boxes"]["status"] == "loaded"


def test_a_broken_plugin_is_a_problem(site: FakeSite) -> None:
    install_store(site, source="raise ValueError('x')")

    outcome = run("doctor", env=ONLY)

    assert outcome.code == 1
    assert "is broken" not in outcome.err
    assert "broken: loading it raised ValueError: x" in outcome.out
    assert outcome.out.splitlines()[-1] == "1 problem"


def test_t5_a_store_without_room_is_a_problem_in_bytes_with_the_next_step(site: FakeSite) -> None:
    install_store(site, source=FULL)

    outcome = run("doctor", "--json", "--store", "boxes", "--option", "capacity=4096", env=ONLY)

    assert outcome.code == 1
    (found,) = [item for item in findings_of(outcome.out) if item["level"] == "problem"]
    assert found["text"] == (
        "the self-test failed at 'put': StoreFullError: no room for an object of 1024 B, "
        "with 0 of 4096 B taken; free space where the store keeps its objects"
    )


def test_t5_a_store_that_fails_its_self_test_is_a_problem_that_names_the_step(
    site: FakeSite,
) -> None:
    install_store(site, source=WRONG_READ)

    outcome = run("doctor", "--json", "--store", "boxes", env=ONLY)

    assert outcome.code == 1
    assert topics(outcome.out)["test of boxes"] == ["ok", "problem"]
    assert "the self-test failed at 'exists'" in outcome.out


def test_a_store_that_cannot_be_opened_is_a_problem_with_its_reason(site: FakeSite) -> None:
    install_store(site)

    outcome = run(
        "doctor",
        *("--store", "boxes", "--option", "refuse=true", "--option", "capacity=20GiB"),
        env=ONLY,
    )

    assert outcome.code == 1
    assert "cannot be opened: refused with {'refuse': True, 'capacity': '20GiB'}" in outcome.out


def test_a_store_that_breaks_while_it_is_asked_is_a_problem(site: FakeSite) -> None:
    broken = WRONG_READ.replace(
        "    def exists(self, keys):\n        return (False,) * len(keys)\n",
        "    def stats(self):\n        raise OSError('the disk is gone')\n",
    )
    install_store(site, source=broken)

    outcome = run("doctor", "--store", "boxes", env=ONLY)

    assert outcome.code == 1
    assert "the disk is gone" in outcome.out


@pytest.mark.parametrize(
    ("method", "step"), [("stats(self)", "looking at its figures"), ("close(self)", "closing")]
)
def test_t6_a_store_that_hangs_is_a_problem_that_names_the_step(
    site: FakeSite, monkeypatch: pytest.MonkeyPatch, method: str, step: str
) -> None:
    hanging = WRONG_READ.replace(
        "    def exists(self, keys):\n        return (False,) * len(keys)\n",
        f"    def {method}:\n        import threading\n        threading.Event().wait()\n",
    )
    install_store(site, source=hanging)
    monkeypatch.setenv("KVLINKER_PLUGINS", ONLY["KVLINKER_PLUGINS"])

    last = list(store_findings("boxes", {}, seconds=0.5))[-1]

    assert last.level is Level.PROBLEM
    assert last.text == f"{step} has not ended within 1 s; is its server up?"


def test_a_store_plugin_that_breaks_its_contract_is_a_problem_and_no_traceback(
    site: FakeSite,
) -> None:
    broken = WRONG_READ.replace(
        "    def exists(self, keys):\n        return (False,) * len(keys)\n",
        "    def stats(self):\n        raise TypeError('of another client')\n",
    )
    install_store(site, source=broken)

    outcome = run("doctor", "--store", "boxes", env=ONLY)

    assert outcome.code == 1
    assert "TypeError: of another client; its store plugin is at" in outcome.out


def test_several_problems_are_counted(site: FakeSite) -> None:
    install_store(site, source="raise ValueError('x')")

    outcome = run("doctor", "--store", "boxes", env=ONLY)

    assert (outcome.code, outcome.out.splitlines()[-1]) == (1, "2 problems")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--option", "path=x"], "--option path=x needs --store NAME"),
        (["--store", "boxes", "--option", "path"], "--option takes NAME=VALUE, got 'path'"),
        (["--store", "boxes", "--option", "=1"], "--option takes NAME=VALUE, got '=1'"),
    ],
)
def test_options_that_make_no_sense_are_refused(arguments: list[str], problem: str) -> None:
    outcome = run("doctor", *arguments)

    assert (outcome.code, outcome.out, outcome.err) == (2, "", f"error: {problem}\n")


# ---- what it looks at -------------------------------------------------------------------------


def test_an_older_kvlinker_that_lies_about_is_a_problem(site: FakeSite) -> None:
    site.metadata("kvlinker", "", version="0.0.1")

    findings = list(environment_findings())

    (problem,) = [finding for finding in findings if finding.level is Level.PROBLEM]
    assert problem.topic == "kvlinker"
    assert problem.text.startswith(f"metadata of 0.0.1 lies in {site.folder}")
    assert any(finding.text.startswith(__version__) for finding in findings)


def test_p11_stale_metadata_of_a_plugin_is_a_note_with_both_places(
    site: FakeSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = FakeSite(tmp_path / "stale")
    stale.metadata("fake-windowed", "", version="0.9")
    monkeypatch.syspath_prepend(str(tmp_path / "stale"))
    monkeypatch.syspath_prepend(str(site.folder))
    install_model(site)
    site.make_editable(next(site.folder.glob("fake_windowed*.dist-info")))

    found, note = plugin_findings(site.installed("windowed"))

    assert (found.level, note.level) == (Level.GOOD, Level.NOTE)
    assert found.text == f"fake-windowed 1.0 in {site.folder.resolve()}, editable"
    assert note.text == (
        f"other metadata of fake-windowed lies in {(tmp_path / 'stale').resolve()} and is not used; remove it"
    )


@pytest.mark.parametrize(
    ("built_for", "devices", "level", "text"),
    [
        (None, [], Level.GOOD, "9.9, CPU alone"),
        ("13.0", ["H", "H"], Level.GOOD, "9.9, CUDA devices: H, H"),
        ("13.0", [], Level.NOTE, "9.9 is built for CUDA 13.0 and sees no device"),
    ],
)
def test_torch_is_shown_with_what_it_sees(
    site: FakeSite,
    built_for: str | None,
    devices: list[str],
    level: Level,
    text: str,
) -> None:
    write_torch(site, torch_module(built_for=built_for, devices=devices))

    finding = torch_finding(LONG_S)

    assert (finding.level, finding.text) == (level, text)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "raise OSError('libcudart.so.13: cannot open')",
            "importing it failed: OSError: libcudart.so.13: cannot open",
        ),
        ("import os; os._exit(9)", "importing it failed: exit code 9"),
    ],
)
def test_a_torch_that_cannot_be_imported_is_a_problem(
    site: FakeSite, source: str, text: str
) -> None:
    write_torch(site, source)

    finding = torch_finding(LONG_S)

    assert (finding.level, finding.text) == (Level.PROBLEM, text)


def test_a_torch_that_hangs_is_a_problem(site: FakeSite) -> None:
    write_torch(site, "import time; time.sleep(3600)")

    finding = torch_finding(0.5)

    assert finding.level is Level.PROBLEM
    assert finding.text == "importing it did not finish within 0.5 s"


def test_no_torch_is_worth_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])

    finding = torch_finding(LONG_S)

    assert (finding.level, finding.text.split(";")[0]) == (Level.NOTE, "not installed")


@pytest.mark.parametrize(("soft", "level"), [(256, Level.PROBLEM), (1024, Level.GOOD)])
def test_few_open_files_are_a_problem(
    monkeypatch: pytest.MonkeyPatch, soft: int, level: Level
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _what: (soft, 4096))

    finding = limit_finding()

    assert finding.level is level
    assert ("try: ulimit -n 1024" in finding.text) is (level is Level.PROBLEM)


@pytest.mark.parametrize(
    ("capacity", "level", "end"),
    [
        (1 << 60, Level.PROBLEM, "but the store may take 1024.0 PiB more; lower its capacity"),
        (4096, Level.GOOD, "0 B wanted"),
        (None, Level.GOOD, ""),
    ],
)
def test_a_disk_smaller_than_the_store_may_become_is_a_problem(
    tmp_path: Path, capacity: int | None, level: Level, end: str
) -> None:
    used = 0 if capacity != 4096 else 4096
    stats = StoreStats(objects=0, used_bytes=used, capacity_bytes=capacity)

    finding = disk_finding(tmp_path, stats)

    assert finding.level is level
    assert finding.text.endswith(end)
    assert f"free at {tmp_path}" in finding.text
