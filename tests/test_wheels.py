"""What a user gets: every distribution as a wheel, installed beside a torch that stays as it is."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
from archives import sdist_problems, wheel_problems
from environments import Environment, build, make_environment
from packaging.requirements import Requirement
from repository import Distribution, distributions, each_distribution


@pytest.fixture(scope="session")
def wheelhouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel and the source archive of every distribution, and return their folder."""
    folder = tmp_path_factory.mktemp("wheelhouse")
    for distribution in distributions():
        build(distribution, folder)
    return folder


@pytest.fixture
def unpacked(
    wheelhouse: Path, tmp_path: Path
) -> Callable[[Distribution], importlib.metadata.Distribution]:
    """Unpack one wheel and return what its metadata says."""

    def unpack(distribution: Distribution) -> importlib.metadata.Distribution:
        (wheel,) = wheelhouse.glob(f"{distribution.import_name}-*.whl")
        shutil.unpack_archive(wheel, tmp_path, "zip")
        (found,) = importlib.metadata.distributions(path=[str(tmp_path)])
        return found

    return unpack


@pytest.fixture(scope="session")
def installed(wheelhouse: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Make an environment and let pip install every wheel there, by name and without an index."""
    names = ["kvlinker[cli,testing]", *(found.name for found in distributions())]
    return make_environment(tmp_path_factory.mktemp("installed"), wheelhouse, names)


@each_distribution
def test_a_wheel_and_a_source_archive_hold_what_they_should_and_nothing_else(
    distribution: Distribution, wheelhouse: Path
) -> None:
    (wheel,) = wheelhouse.glob(f"{distribution.import_name}-*.whl")
    (archive,) = wheelhouse.glob(f"{distribution.import_name}-*.tar.gz")

    problems = [*wheel_problems(wheel, distribution), *sdist_problems(archive, distribution)]

    assert problems == []


@each_distribution
def test_a_wheel_asks_for_torch_without_a_ceiling(
    distribution: Distribution,
    unpacked: Callable[[Distribution], importlib.metadata.Distribution],
) -> None:
    requirements = [Requirement(line) for line in unpacked(distribution).requires or []]

    clauses = {(req.name, part.operator) for req in requirements for part in req.specifier}
    assert {operator for name, operator in clauses if name == "torch"} <= {">="}
    assert not {name for name, _ in clauses} & {"torchvision", "torchaudio"}


def test_installing_every_wheel_brings_nothing_else_and_leaves_torch_alone(
    installed: Environment,
) -> None:
    brought = importlib.metadata.distributions(path=[str(installed.site_packages)])

    assert sorted(found.name for found in brought) == sorted(
        found.name for found in distributions()
    )
    answer = installed.run("import torch; print(torch.__version__, torch.__file__)")
    version, _, file = answer.strip().partition(" ")
    assert version == importlib.metadata.version("torch")
    assert (
        Path(file).resolve()
        == Path(sysconfig.get_path("platlib"), "torch", "__init__.py").resolve()
    )


def test_installed_plugins_are_loaded_from_their_wheels_without_torch(
    installed: Environment,
) -> None:
    program = """
import json, sys
from kvlinker.discovery import load_plugins
records = load_plugins(environ={}).records
print(json.dumps({record.qualified_name: [record.status.value, record.location] for record in records}))
assert "torch" not in sys.modules
"""

    records = json.loads(installed.run(program))

    expected = ["loaded", str(installed.site_packages.resolve())]
    assert records == dict.fromkeys(qualified_names(), expected)


def test_the_command_of_the_wheels_shows_every_plugin_as_sound(installed: Environment) -> None:
    command = [str(installed.folder / "bin" / "kvlinker"), "plugins", "--json"]
    environment = {"PATH": os.defpath}

    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)

    for name in qualified_names():
        assert f'"{name.partition(":")[0]}"' in done.stdout


def qualified_names() -> list[str]:
    """Return what each plugin is called where names could clash: `distribution:name`."""
    return [name for found in distributions() for name in found.plugins]


def test_the_mover_of_the_wheels_was_compiled_and_copies(installed: Environment) -> None:
    program = """
import xxhash
from kvlinker.moving import summing_mover
print(summing_mover(xxhash.xxh3_64_intdigest))
"""

    assert installed.run(program).startswith("native, up to ")
