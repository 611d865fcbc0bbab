"""Probing: every plugin in a process of its own, so that one that hangs or kills it is reported and not suffered."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from fake_site import MODEL, FakeSite, load_twice

from kvlinker.discovery import PluginRecord, PluginStatus
from kvlinker.errors import ContractError, PluginNotFoundError
from kvlinker.probing import probe_plugins, report_plugin

LONG_S = 600.0
"""Longer than any test may take: a probe that waits for it fails."""


def probed(*names: str, deadline_s: float = LONG_S) -> dict[str, PluginRecord]:
    return {record.name: record for record in probe_plugins(deadline_s, allow=names, environ={})}


def test_s5_a_probe_reports_each_plugin_and_imports_none_of_them_here(site: FakeSite) -> None:
    site.install("fake-good", {"good": "fake_good"}, modules={"fake_good": MODEL})
    site.install("fake-bad", {"bad": "fake_bad"}, modules={"fake_bad": "raise RuntimeError('x')"})
    site.install("fake-out", {"out": "fake_out"}, modules={"fake_out": MODEL})

    found = probed("good", "bad")

    good, bad, out = (found[name] for name in ("good", "bad", "out"))
    assert (good.status, good.summary, good.api_version) == (PluginStatus.LOADED, "a fake", 1)
    assert (bad.status, bad.reason) == (PluginStatus.BROKEN, "loading it raised RuntimeError: x")
    assert (bad.api_version, "fake_bad.py" in bad.traceback) == (None, True)
    assert out.status is PluginStatus.DISABLED
    assert not any(site.is_imported(f"fake_{name}") for name in ("good", "bad", "out"))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import sys; sys.exit(3)", "loading it raised SystemExit: 3"),
        ("import os; os._exit(7)", "loading it ended the process with exit code 7"),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
            "loading it killed the process with SIGSEGV",
        ),
    ],
)
def test_p01_a_plugin_that_ends_the_process_is_reported(
    site: FakeSite, source: str, reason: str
) -> None:
    site.install("fake-bad", {"bad": "fake_bad"}, modules={"fake_bad": source})

    bad = probed("bad")["bad"]

    assert (bad.status, bad.reason) == (PluginStatus.BROKEN, reason)


def test_p01_a_plugin_that_hangs_when_it_is_imported_is_reported_and_ended(
    site: FakeSite,
) -> None:
    started = site.folder / "started"
    source = f"""
    import os, threading
    with open({str(started)!r}, "w") as file:
        file.write(str(os.getpid()))
    threading.Event().wait()
    """
    site.install("fake-bad", {"bad": "fake_bad"}, modules={"fake_bad": source})

    deadline_s = 2
    bad = probed("bad", deadline_s=deadline_s)["bad"]
    if not started.exists() or not started.read_text():  # a machine that did not come to the import
        deadline_s = 60
        bad = probed("bad", deadline_s=deadline_s)["bad"]

    assert bad.status is PluginStatus.BROKEN
    assert bad.reason == (
        f"loading it did not finish within {deadline_s} s; it hangs when it is imported"
    )
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


def test_p01_threads_that_a_plugin_starts_do_not_hold_the_probe_up(site: FakeSite) -> None:
    source = f"import threading\nthreading.Thread(target=threading.Event().wait).start()\n{MODEL}"
    site.install("fake-x", {"x": "fake_x"}, modules={"fake_x": source})

    assert probed("x")["x"].status is PluginStatus.LOADED


def test_s6_p04_a_denied_plugin_is_not_started(site: FakeSite) -> None:
    marker = site.folder / "imported"
    source = f"open({str(marker)!r}, 'w').close()\n{MODEL}"
    site.install("fake-x", {"x": "fake_x"}, modules={"fake_x": source})

    records = probe_plugins(LONG_S, allow=["x"], environ={"KVLINKER_DISABLED_PLUGINS": "x"})

    record = next(record for record in records if record.name == "x")
    assert record.status is PluginStatus.DISABLED
    assert not marker.exists()


def test_s7_a_probe_shows_a_name_that_is_claimed_twice(site: FakeSite) -> None:
    for owner in ("a", "b"):
        module = f"fake_{owner}"
        site.install(f"fake-{owner}", {"twin": module}, modules={module: MODEL})

    records = [r for r in probe_plugins(LONG_S, allow=["twin"], environ={}) if r.name == "twin"]

    assert [record.status for record in records] == [PluginStatus.DUPLICATE] * 2


def test_a_probe_needs_a_deadline() -> None:
    with pytest.raises(ContractError, match="deadline of a probe must be positive, got 0 s"):
        probe_plugins(0)


def test_s6_a_probe_reads_the_process_s_own_lists_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVLINKER_PLUGINS", "zzz")

    with pytest.raises(PluginNotFoundError, match="KVLINKER_PLUGINS lists 'zzz'"):
        probe_plugins(LONG_S)


def test_a_report_is_written_for_a_plugin_that_is_installed_alone(
    site: FakeSite, tmp_path: Path
) -> None:
    site.install("fake-x", {"x": "fake_x"}, modules={"fake_x": MODEL})
    key = '["model", "fake-x", "x", "fake_x"]'

    report_plugin(key, str(tmp_path / "there"))
    report_plugin(key.replace("fake-x", "fake-y"), str(tmp_path / "absent"))

    assert '"status": "loaded"' in (tmp_path / "there").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["site-packages", "there"]


# ---- other processes --------------------------------------------------------------------------


def test_s9_a_spawned_process_loads_anew_and_gets_the_same(site: FakeSite) -> None:
    site.install("fake-good", {"good": "fake_good"}, modules={"fake_good": MODEL})
    site.install("fake-bad", {"bad": "fake_bad"}, modules={"fake_bad": "raise RuntimeError('x')"})
    here = load_twice(sys.path, "good", "bad")

    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        there = pool.submit(load_twice, list(sys.path), "good", "bad").result()

    assert here == there == [["good", "loading it raised RuntimeError: x"]] * 2


FORK = """
import json, os, sys
sys.path[:] = json.loads(sys.argv[1])
from kvlinker.discovery import load_plugins
before = load_plugins(allow=["good", "bad"], environ={})
child = os.fork()
again = load_plugins(allow=["good", "bad"], environ={})
same = [(r.name, r.status) for r in before.records] == [(r.name, r.status) for r in again.records]
works = before.model("good").match(None) is None and again.model("good").match(None) is None
if not child:
    os._exit(0 if same and works else 1)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(same, works, code)
"""


def test_s9_a_registry_works_on_both_sides_of_a_fork_and_can_be_made_again(site: FakeSite) -> None:
    site.install("fake-good", {"good": "fake_good"}, modules={"fake_good": MODEL})
    site.install("fake-bad", {"bad": "fake_bad"}, modules={"fake_bad": "raise RuntimeError('x')"})

    done = subprocess.run(
        [sys.executable, "-c", FORK, json.dumps(sys.path)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )

    assert done.stdout.split() == ["True", "True", "0"]
