"""The template's README as somebody follows it: copied out of the repository, renamed, installed, listed, tested."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from environments import Environment, build, make_environment
from repository import CORE, ROOT

TEMPLATE = ROOT / "examples" / "kvlinker-example"
CONSOLE = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """Return the commands of the README's console blocks, in order."""
    blocks = CONSOLE.findall((TEMPLATE / "README.md").read_text())
    return [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Make an environment with core alone, as a wheel, where nothing can be downloaded."""
    wheelhouse = tmp_path_factory.mktemp("wheelhouse")
    build(CORE, wheelhouse)
    folder = tmp_path_factory.mktemp("tutorial")
    made = make_environment(folder, wheelhouse, ["kvlinker[cli,testing]"])
    made.add_command("pip", "--quiet", "--no-index", "--no-build-isolation")
    made.add_command("pytest", "-p", "no:cacheprovider")
    return made


@pytest.fixture(scope="module")
def outputs(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Run every command where the README says, and return what each of them wrote."""
    folder = tmp_path_factory.mktemp("work")
    unwanted = shutil.ignore_patterns("__pycache__", ".*")
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=unwanted)
    written = {}
    for command in commands():
        if command.startswith("cd "):
            folder /= command.removeprefix("cd ")
            continue
        done = subprocess.run(
            ["/bin/sh", "-ec", command],
            cwd=folder,
            env=environment.variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        written[command] = done.stdout
    return written


def test_the_copy_is_listed_as_a_sound_plugin(outputs: dict[str, str]) -> None:
    (line,) = (line for line in outputs["kvlinker plugins"].splitlines() if "mine" in line)

    assert line.split() == ["mine", "model", "kvlinker-mine", "0.1.0", "1", "loaded"]


def test_explain_selects_the_copy(outputs: dict[str, str]) -> None:
    assert "strategy mine lays it out" in outputs["kvlinker explain cache.json"]


def test_the_kit_and_the_copys_own_tests_pass(outputs: dict[str, str]) -> None:
    summary = outputs["pytest"].splitlines()[-1]

    assert re.search(r"\b\d{2,} passed\b", summary), summary
    assert "failed" not in summary
    assert "skipped" not in summary


def test_the_smoke_tests_pass_on_what_is_installed(outputs: dict[str, str]) -> None:
    (output,) = (text for command, text in outputs.items() if "smoke" in command)

    assert "3 passed" in output


@pytest.mark.usefixtures("outputs")  # they install the copy
def test_s10_nothing_of_the_repository_is_used(environment: Environment) -> None:
    program = "import kvlinker, kvlinker_mine; print(kvlinker.__file__, kvlinker_mine.__file__)"

    places = [Path(place) for place in environment.run(program).split()]

    assert len(places) == 2
    for place in places:
        assert place.resolve().is_relative_to(environment.site_packages.resolve())


def test_the_readme_has_every_step() -> None:
    steps = [command.split()[0] for command in commands()]

    assert steps == ["cp", "cd", "mv", "grep", "pip", "kvlinker", "kvlinker", "pytest", "pytest"]
