"""What docs/stores.md tells an operator is what the stores do: names, commands, configurations and promises."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
from repository import ROOT, distributions, table

from kvlinker.cli.doctor_command import option_values, store_findings
from kvlinker.discovery import load_plugins
from kvlinker.stores.composition import compose
from kvlinker_sglang.options import parse_config

DOCUMENT = (ROOT / "docs" / "stores.md").read_text(encoding="utf-8")
JSON_BLOCKS = re.findall(r"^```json\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)
README_BLOCKS = [
    block
    for readme in sorted((ROOT / "plugins" / "stores").glob("*/README.md"))
    for block in re.findall(
        r"^```json\n(.*?)^```", readme.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    if '"Rules"' not in block  # a bucket's, which no configuration has
]
CONSOLE_BLOCKS = re.findall(r"^```console\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)
LOCAL = {"memory": Path("/dev/shm"), "file": None}  # noqa: S108  # folders in it get names that nobody can guess
"""Stores that need no server, and where a folder for them is made; None for where temporary files are."""


def provided_stores() -> list[str]:
    """Return the names of all store plugins of the repository."""
    return sorted(
        name
        for found in distributions()
        if (found.folder / "README.md").is_file()  # until then it is not there for anybody
        for name in table(table(found.project.get("entry-points", {})).get("kvlinker.stores", {}))
    )


def sections() -> Mapping[str, str]:
    """Return the text of each store's own section by its name."""
    part = DOCUMENT.partition("\n## The stores\n")[2].partition("\n## ")[0]
    _, *pieces = re.split(r"^### (.+)$", part, flags=re.MULTILINE)
    return dict(zip(pieces[::2], pieces[1::2], strict=True))


def commands(name: str) -> list[list[str]]:
    """Return the words of every command in console blocks that begins with a name."""
    joined = "\n".join(CONSOLE_BLOCKS).replace("\\\n", " ")
    begins = f"$ {name} "
    lines = [line.removeprefix("$ ") for line in joined.splitlines() if line.startswith(begins)]
    return [shlex.split(line, comments=True) for line in lines]


def test_every_store_plugin_of_the_repository_has_a_section() -> None:
    assert sorted(sections()) == provided_stores()


def test_every_section_says_how_to_install_test_name_watch_and_what_is_refused() -> None:
    for name, text in sections().items():
        for wanted in (
            "pip install",
            f"--store {name}",
            f'{{"{name}": {{',
            "* Watch:",
            "* Refused:",
        ):
            assert wanted in text, f"{name}: {wanted}"


def test_every_store_plugin_is_compared_in_the_table_of_promises() -> None:
    head = DOCUMENT.partition("## What each promises\n")[2].split("\n")[1]

    assert sorted(re.findall(r"`(\w+)`", head)) == provided_stores()


@pytest.mark.parametrize("block", [*JSON_BLOCKS, *README_BLOCKS])
def test_a_json_block_is_a_configuration_that_sglang_takes(
    block: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KV_SECRET", "5e" * 32)
    read: dict[str, object] = json.loads(block)
    config = read if "store" in read else {"store": read}

    store = parse_config(config).store

    assert set(compose(store.plugin, store.options).plugins) <= set(provided_stores())


def doctor_stores() -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yield name and options of every `kvlinker doctor` in the document."""
    for words in commands("kvlinker"):
        if words[1] == "doctor":
            options = [words[at + 1] for at, word in enumerate(words) if word == "--option"]
            yield words[words.index("--store") + 1], option_values(options)


def test_doctor_is_shown_for_every_store() -> None:
    shown = {name for name, _ in doctor_stores()}

    assert shown >= set(provided_stores())


@pytest.mark.parametrize(("name", "options"), [*doctor_stores()], ids=lambda value: str(value)[:20])
def test_a_store_that_doctor_is_shown_for_is_made_of_plugins_that_there_are(
    name: str, options: Mapping[str, object]
) -> None:
    assert set(compose(name, options).plugins) <= set(provided_stores())


@pytest.mark.parametrize(("name", "parent"), LOCAL.items())
def test_the_doctor_of_a_local_store_finds_no_problem_with_a_smaller_one(
    name: str, parent: Path | None
) -> None:
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        options = option_values([f"path={folder}/kv", "capacity=4MiB"])

        findings = [str(finding) for finding in store_findings(name, options, seconds=60)]

    assert any("self-test passed" in finding for finding in findings), findings


def promises(name: str) -> Mapping[str, str]:
    """Return a store's column of the table of promises."""
    table_of_promises = DOCUMENT.partition("## What each promises\n\n")[2].partition("\n\n")[0]
    lines = [line.strip("|").split("|") for line in table_of_promises.splitlines()]
    column = [cell.strip() for cell in lines[0]].index(f"`{name}`")
    return {cells[0].strip(): cells[column].strip() for cells in lines}


@pytest.mark.parametrize("name", ["file", "s3"])
def test_what_the_table_promises_is_what_a_store_says_of_itself(name: str, tmp_path: Path) -> None:
    configs: dict[str, dict[str, object]] = {
        "file": {"path": str(tmp_path / "kv"), "capacity": 4 << 20},
        "s3": {"url": tmp_path.as_uri()},
    }
    store = load_plugins().store(name).open(configs[name])
    able = store.capabilities
    store.close()
    told = promises(name)

    assert able.leases == (told["what a lookup found stays until its load"] == "yes")
    assert able.persistent == (told["the server process ends or is killed"] == "there")


def option_names(name: str) -> set[str]:
    """Return the names of the options that a store's plugin takes."""
    module = importlib.import_module(f"kvlinker_{name}.options")
    (options,) = (
        value
        for value in vars(module).values()
        if is_dataclass(value) and isinstance(value, type) and value.__module__ == module.__name__
    )
    return {item.name for item in fields(options) if item.init}


@pytest.mark.parametrize("name", provided_stores())
def test_the_options_in_a_store_s_readme_are_those_that_it_takes_and_no_others(name: str) -> None:
    readme = ROOT / "plugins" / "stores" / f"kvlinker-{name}" / "README.md"
    tables = re.findall(
        r"^\| option \|.*\n\|[-| ]+\n((?:\|.*\n)+)",
        readme.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    cells = [row.split("|")[1] for rows in tables for row in rows.splitlines()]

    told = [found for cell in cells for found in re.findall(r"`(\w+)`", cell)]

    assert sorted(told) == sorted(option_names(name))
