"""What every distribution states of itself, and that the Makefile finds each of them."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from packaging.version import Version
from repository import (
    CORE,
    ROOT,
    Distribution,
    distributions,
    each_distribution,
    table,
    write_distribution,
)

from kvlinker.installed import OFFICIAL_PLUGINS, PluginKind

CORE_VERSION = Version(str(CORE.project["version"]))


def misstatements(distribution: Distribution, core_version: Version) -> list[str]:
    """Return what a distribution's metadata and folder say that they should not."""
    folder, project = distribution.folder, distribution.project
    facts = {
        "no [tool] table": "tool" not in distribution.pyproject,
        "its name is its folder's": distribution.kind == "core" or distribution.name == folder.name,
        "a typing marker": (distribution.package / "py.typed").is_file(),
        "a README of more than a line": len((folder / "README.md").read_text().splitlines()) > 1,
        "the licence": (folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text(),
        "licence expression Apache-2.0": project.get("license") == "Apache-2.0",
        "Python 3.11 or newer": project.get("requires-python") == ">=3.11",
        "entry points named after the plugin": entry_points_are_right(distribution),
        "torch with a floor and no ceiling": all(
            {clause.operator for clause in requirement.specifier} == {">="}
            for requirement in distribution.requirements + distribution.extra_requirements
            if requirement.name == "torch"
        ),
        "this kvlinker up to the next major": distribution.kind == "core"
        or requires_core(distribution, core_version),
    }
    return [f"{folder}: should have {fact}" for fact, holds in facts.items() if not holds]


def entry_points_are_right(distribution: Distribution) -> bool:
    """Say whether a plugin's entry points name its own package, in the group of its folder; core has pytest's alone.

    Beside the one with the distribution's name there may be others, each for a module of its own name.
    """
    groups = table(distribution.project.get("entry-points", {}))
    if distribution.kind == "core":
        return groups in ({}, {"pytest11": {"kvlinker": "kvlinker.pytest_options"}})
    if distribution.kind != "examples" and list(groups) != [f"kvlinker.{distribution.kind}"]:
        return False
    public_name = distribution.import_name.removeprefix("kvlinker_")
    package = distribution.import_name
    own = {public_name: package}
    return bool(groups) and all(
        own | {name: f"{package}.{name}" for name in table(group).keys() - own.keys()} == group
        for group in groups.values()
    )


def requires_core(distribution: Distribution, core_version: Version) -> bool:
    """Say whether a plugin accepts this version of core, and refuses the next major one."""
    found = [req.specifier for req in distribution.requirements if req.name == "kvlinker"]
    next_major = Version(f"{core_version.major + 1}")
    return len(found) == 1 and core_version in found[0] and next_major not in found[0]


def test_hints_in_messages_name_every_plugin_that_is_here() -> None:
    found = {
        (kind, name)
        for kind in PluginKind
        for distribution in distributions()
        for name in table(table(distribution.project.get("entry-points", {})).get(kind.group, {}))
        if distribution.kind != "examples"
    }

    assert found == {(kind, name) for kind, names in OFFICIAL_PLUGINS.items() for name in names}


@each_distribution
def test_a_distribution_states_what_it_must(distribution: Distribution) -> None:
    assert misstatements(distribution, CORE_VERSION) == []


def test_misstatements_are_found_one_by_one(tmp_path: Path) -> None:
    pyproject = (
        'license = "MIT"\nrequires-python = ">=3.10"\n'
        'dependencies = ["kvlinker>=0.2", "torch>=2.4,<3"]\n'
        '[project.entry-points."kvlinker.models"]\nx = "kvlinker_y"\n'
        "[tool.ruff]\n"
    )
    made = write_distribution(tmp_path, "", folder="stores/kvlinker-x", pyproject=pyproject)
    (made.folder / "README.md").write_text("# kvlinker-x\n")
    (made.folder / "LICENSE").write_text("public domain\n")

    findings = misstatements(made, Version("0.1.0"))

    assert [finding.partition("should have ")[2] for finding in findings] == [
        "no [tool] table",
        "a typing marker",
        "a README of more than a line",
        "the licence",
        "licence expression Apache-2.0",
        "Python 3.11 or newer",
        "entry points named after the plugin",
        "torch with a floor and no ceiling",
        "this kvlinker up to the next major",
    ]


def test_the_version_of_core_is_said_once_and_the_same() -> None:
    source = (CORE.package / "__init__.py").read_text()

    assert re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE) == [str(CORE_VERSION)]


def test_public_names_are_unique() -> None:
    names = [found.import_name.removeprefix("kvlinker_") for found in distributions()]

    assert len(set(names)) == len(names)


def test_make_installs_every_distribution() -> None:
    command = ["make", "--dry-run", "--always-make", "env"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}

    done = subprocess.run(
        command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True
    )

    wanted = {path.folder.relative_to(ROOT).as_posix() for path in distributions()} - {"core"}
    installed = set(re.findall(r"--editable '(.+?)'", done.stdout))
    assert installed == {"core[cli,compression,encryption,retries,testing]", *wanted}
    assert done.stdout.index("constraints.txt torch\n") < done.stdout.index("--editable")
