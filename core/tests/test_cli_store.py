"""`kvlinker store`: which plugin is asked, and what its tools find."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_fakes import STORE_SOURCE, install_store, run
from fake_site import STORE, FakeSite

ONLY = {"KVLINKER_PLUGINS": "boxes"}
SPACE = "ab" * 12


@pytest.fixture
def folder(site: FakeSite, tmp_path: Path) -> Path:
    """Return the folder of a store with three objects, one of them damaged."""
    install_store(site)
    made = tmp_path / "store"
    made.mkdir()
    write_state(made)
    return made


def write_state(folder: Path, *, name: str = "boxes", **changes: object) -> None:
    state = {"namespaces": {SPACE: 3}, "capacity": 1 << 20, "damaged": 1, **changes}
    (folder / f"{name}.json").write_text(json.dumps(state))


def test_inspect_shows_objects_disk_and_namespaces(folder: Path) -> None:
    outcome = run("store", "inspect", folder, env=ONLY)

    lines = [" ".join(line.split()) for line in outcome.out.splitlines()]
    assert (outcome.code, lines[0]) == (0, str(folder))
    assert lines[1] == "3 objects, 4.0 KiB; 8.0 KiB of 1.0 MiB taken on disk"
    assert lines[-1].startswith(f"{SPACE} 3 6.0 KiB 19")


def test_the_home_of_a_user_is_known_where_no_shell_puts_it_in(folder: Path) -> None:
    outcome = run("store", "inspect", "~/store", env={**ONLY, "HOME": str(folder.parent)})

    assert (outcome.code, outcome.out.splitlines()[0]) == (0, str(folder))


def test_inspect_of_an_empty_store_without_a_capacity_is_two_lines(folder: Path) -> None:
    write_state(folder, namespaces={}, capacity=None)

    outcome = run("store", "inspect", folder, env=ONLY)

    assert outcome.out.splitlines()[1:] == ["0 objects, 4.0 KiB; 8.0 KiB taken on disk"]


def test_inspect_gives_the_same_as_json(folder: Path) -> None:
    outcome = run("store", "inspect", "--json", folder, env=ONLY)

    assert outcome.form == {
        "path": str(folder),
        "capacity_bytes": 1 << 20,
        "disk_bytes": 8192,
        "objects": 3,
        "payload_bytes": 4096,
        "namespaces": [{"namespace": SPACE, "objects": 3, "payload_bytes": 6144, "last_used": 0.0}],
    }


def test_what_a_plugin_prints_is_no_part_of_the_json(site: FakeSite, tmp_path: Path) -> None:
    install_store(site, source=f"print('loading')\n{STORE_SOURCE}")
    write_state(tmp_path)

    outcome = run("store", "inspect", "--json", tmp_path, env=ONLY)

    assert (outcome.form["objects"], outcome.err) == (3, "loading\n")


def test_verify_fails_for_a_damaged_object_and_says_how_to_remove_it(folder: Path) -> None:
    outcome = run("store", "verify", folder, env=ONLY)

    assert outcome.code == 1
    assert outcome.out.splitlines() == [
        "5 objects read, 10.0 KiB",
        "1 damaged: 1 with changed bytes, 0 that are something else",
        f"remove them: kvlinker store verify --drop {folder}",
    ]


def test_verify_can_remove_what_is_damaged(folder: Path) -> None:
    outcome = run("store", "verify", "--drop", folder, env=ONLY)

    assert (outcome.code, outcome.out.splitlines()[-1]) == (1, "1 removed")


def test_verify_of_a_sound_store_succeeds(folder: Path) -> None:
    write_state(folder, damaged=0)

    outcome = run("store", "verify", folder, env=ONLY)

    assert (outcome.code, outcome.out.splitlines()[-1]) == (0, "every one is what was written")


def test_verify_gives_the_same_as_json(folder: Path) -> None:
    outcome = run("store", "verify", "--json", folder, env=ONLY)

    assert (outcome.code, outcome.form) == (
        1,
        {
            "objects": 5,
            "intact": 4,
            "corrupt": 1,
            "foreign": 0,
            "dropped": 0,
            "payload_bytes": 10_240,
        },
    )


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        (["--to", "10MiB"], [10 << 20, None, None]),
        (["--older-than", "2d"], [None, 172_800.0, None]),
        (["--namespace", SPACE, "--older-than", "1h"], [None, 3600.0, SPACE]),
    ],
)
def test_prune_asks_for_what_the_options_say(
    folder: Path, arguments: list[str], asked: list[object]
) -> None:
    outcome = run("store", "prune", folder, *arguments, env=ONLY)

    assert json.loads((folder / "asked.json").read_text()) == asked
    assert (outcome.code, outcome.out) == (
        0,
        "3 objects removed, 6.0 KiB given back; 2 objects left on 2.0 KiB of disk\n",
    )


def test_prune_gives_the_same_as_json(folder: Path) -> None:
    outcome = run("store", "prune", folder, "--to", "0", "--json", env=ONLY)

    assert outcome.form == {"removed": 3, "objects": 2, "freed_bytes": 6144, "disk_bytes": 2048}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "nothing to prune by; give --to, --older-than or --namespace"),
        (["--to", "much"], "'much' is not a number of bytes such as 4096 or 20GiB"),
        (["--namespace", "xyz"], "--namespace takes hexadecimal digits"),
    ],
)
def test_prune_refuses_what_it_cannot_read(
    folder: Path, arguments: list[str], problem: str
) -> None:
    outcome = run("store", "prune", folder, *arguments, env=ONLY)

    assert (outcome.code, outcome.out) == (2, "")
    assert problem in outcome.err
    assert not (folder / "asked.json").exists()


def test_a_store_in_use_is_refused_in_one_line(folder: Path) -> None:
    write_state(folder, busy=True)

    outcome = run("store", "inspect", folder, env=ONLY)

    assert (outcome.code, outcome.err) == (2, "error: in use by process 1\n")


def test_a_path_that_is_no_folder_is_refused(folder: Path) -> None:
    outcome = run("store", "inspect", folder / "boxes.json", env=ONLY)

    assert outcome.code == 2
    assert outcome.err.endswith("boxes.json is no folder; name the folder of a store\n")


def test_a_folder_without_a_store_is_refused_with_who_was_asked(
    site: FakeSite, tmp_path: Path
) -> None:
    install_store(site)
    install_store(site, name="torn", source="raise ValueError('x')")
    install_store(site, name="plain", source=STORE)

    outcome = run("store", "inspect", tmp_path, env={"KVLINKER_PLUGINS": "boxes,torn,plain"})

    assert (outcome.code, outcome.out) == (2, "")
    assert "(asked: store plugin 'boxes' (fake-boxes 1.0); not asked: " in outcome.err
    assert "store plugin 'torn' (fake-torn 1.0)" in outcome.err
    assert "; install the plugin that made it" in outcome.err


def test_two_plugins_that_know_a_folder_are_told_apart_by_name(
    folder: Path, site: FakeSite
) -> None:
    install_store(site, name="crates")
    write_state(folder, name="crates", namespaces={})
    both = {"KVLINKER_PLUGINS": "boxes,crates"}

    tied = run("store", "inspect", folder, env=both)
    chosen = run("store", "inspect", folder, "--plugin", "crates", env=both)

    assert tied.code == 2
    assert "choose one: --plugin boxes or --plugin crates" in tied.err
    assert (chosen.code, chosen.out.splitlines()[1].split()[0]) == (0, "0")


def test_a_named_plugin_without_tools_is_an_unsupported_operation(
    folder: Path, site: FakeSite
) -> None:
    install_store(site, name="plain", source=STORE)

    outcome = run(
        "store", "inspect", folder, "--plugin", "plain", env={"KVLINKER_PLUGINS": "plain"}
    )

    assert outcome.code == 2
    assert "does not implement open_store_tools" in outcome.err
