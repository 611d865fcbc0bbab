"""Somebody elsewhere serves a pool that nobody here knows, with nothing but what is installed from wheels."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from distributions import ROOT
from environments import Environment, make_environment

SOURCE = Path(__file__).parent / "outsider"
SGLANG = ROOT / "plugins" / "engines" / "kvlinker-sglang"
OURS = (
    ROOT / "core",
    ROOT / "plugins" / "stores" / "kvlinker-file",
    SGLANG,
    SGLANG / "cpu_stubs",
)
INSTALLED = ("kvlinker[testing]", "kvlinker-file", "kvlinker-sglang", "lantern-kv")
ENVIRONMENT = ROOT / ".venv-sglang"
PROGRAM = """
import json, os, sys
import pytest
outcome = pytest.main(["-p", "no:cacheprovider", "-q", *sys.argv[2:]])
files = {getattr(module, "__file__", None) for module in list(sys.modules.values())} - {None}
real = [sorted(map(os.path.realpath, paths)) for paths in (files, sys.path)]
with open(sys.argv[1], "w") as out:
    json.dump({"outcome": int(outcome), "files": real[0], "path": real[1]}, out)
"""


@dataclass(frozen=True)
class Ran:
    """What the outsider's tests did."""

    outcome: int
    summary: str
    output: str
    files: frozenset[Path]
    """Where the modules were that they had loaded."""
    path: frozenset[Path]
    """Where they looked for modules."""


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the distribution, outside of the repository."""
    folder = tmp_path_factory.mktemp("outside") / "lantern-kv"
    shutil.copytree(SOURCE, folder, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    return folder


@pytest.fixture(scope="module")
def environment(outside: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Make an environment of wheels alone, beside the SGLang of this one."""
    wheelhouse = tmp_path_factory.mktemp("wheelhouse")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--isolated"]
    pip = [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(wheelhouse)]
    subprocess.run([*pip, *map(str, (*OURS, outside))], check=True)
    wanted = [*INSTALLED, "kvlinker-sglang-cpu-stubs"]
    return make_environment(tmp_path_factory.mktemp("rehearsal"), wheelhouse, wanted)


@pytest.fixture(scope="module")
def ran(environment: Environment, outside: Path) -> Ran:
    """Run the outsider's tests there, in a process that knows nothing of this one."""
    found = outside / "found.json"
    command = [str(environment.python), "-I", "-c", PROGRAM, str(found), "tests"]
    done = subprocess.run(
        command,
        cwd=outside,
        env=environment.variables | {"PYTHONDONTWRITEBYTECODE": "1"},
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert found.exists(), done.stdout
    told = json.loads(found.read_text())
    return Ran(
        outcome=told["outcome"],
        summary=done.stdout.strip().splitlines()[-1],
        output=done.stdout,
        files=frozenset(map(Path, told["files"])),
        path=frozenset(map(Path, told["path"])),
    )


def test_the_kits_and_the_real_trees_pass(ran: Ran) -> None:
    assert ran.outcome == 0, ran.output
    assert " skipped" not in ran.summary
    assert "failed" not in ran.summary


def test_s10_nothing_of_the_repositorys_source_is_used(ran: Ran, environment: Environment) -> None:
    assert ran.files
    assert [str(path) for path in (*ran.files, *ran.path) if is_source(path)] == []
    ours = {path for path in ran.files if path.parts[-2].startswith(("kvlinker", "lantern_kv"))}
    here = environment.site_packages.resolve()
    assert {path.relative_to(here).parts[0] for path in ours if path.is_relative_to(here)} >= {
        "kvlinker",
        "kvlinker_sglang",
        "kvlinker_file",
        "lantern_kv",
    }
    assert all(path.is_relative_to(here) for path in ours)


def is_source(path: Path) -> bool:
    """Whether a path is of the repository, and not of an engine that is installed within its folder."""
    return path.is_relative_to(ROOT) and not path.is_relative_to(ENVIRONMENT)


def test_a_file_of_the_repository_is_told_from_an_installed_one() -> None:
    assert is_source(ROOT / "core" / "src" / "kvlinker" / "pools.py")
    assert is_source(Path(__file__))
    assert not is_source(ENVIRONMENT / "lib" / "torch" / "__init__.py")
