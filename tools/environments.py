"""Clean environments: what is installed there comes from wheels, beside a torch that stays as it is."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from distributions import ROOT, Distribution, distributions
from packaging.requirements import Requirement

__all__ = ["Environment", "build", "make_environment", "make_fresh_environment"]

IN_DEVELOPMENT = ("kvlinker", "_editable_impl_kvlinker", "__editable__.kvlinker")


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A virtual environment that sees the packages of this one, but for those under development."""

    folder: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        """Where pip installs into."""
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.folder / "lib" / version / "site-packages"

    def add_command(self, name: str, *arguments: str) -> None:
        """Add a command that runs a module there: pip or pytest, which the environment sees and has no script for."""
        script = self.folder / "bin" / name
        script.write_text(f'#!/bin/sh\nexec {self.python} -m {name} "$@" {" ".join(arguments)}\n')
        script.chmod(0o755)

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of somebody who has activated it."""
        return {"PATH": f"{self.folder / 'bin'}{os.pathsep}{os.defpath}", "HOME": str(self.folder)}

    def run(self, program: str) -> str:
        """Run a program there, apart from this process's folder and variables, and return its output."""
        command = [str(self.python), "-I", "-c", program]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def build(distribution: Distribution, folder: Path) -> None:
    """Build a source archive, and the wheel from that archive."""
    options = ["--no-isolation", "--outdir", str(folder), str(distribution.folder)]
    subprocess.run([sys.executable, "-m", "build", *options], check=True)


def link_other_packages(folder: Path) -> None:
    """Fill a folder with links to all packages of this environment but those under development."""
    folder.mkdir()
    for site in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for package in Path(site).iterdir():
            if not package.name.startswith(IN_DEVELOPMENT):
                (folder / package.name).symlink_to(package)


def make_environment(folder: Path, wheelhouse: Path, requirements: Iterable[str]) -> Environment:
    """Make an environment and let pip install wheels there, by name and without an index."""
    environment = Environment(folder=folder / "venv")
    venv.create(environment.folder, symlinks=True)
    link_other_packages(folder / "others")
    (environment.site_packages / "others.pth").write_text(f"{folder / 'others'}\n")
    options = ["--isolated", "--no-index", "--find-links", str(wheelhouse)]
    pip = [sys.executable, "-m", "pip", "--python", str(environment.python)]
    subprocess.run([*pip, "install", *options, *requirements], check=True)
    return environment


def make_fresh_environment(
    folder: Path, wheelhouse: Path, requirements: Iterable[str]
) -> Environment:
    """Make an environment and let pip install wheels there, with what they need from its index.

    torch comes first and alone, so that nothing that is installed later chooses its build.
    """
    environment = Environment(folder=folder / "venv")
    venv.create(environment.folder, symlinks=True)
    constraint = ["--constraint", str(ROOT / "constraints.txt")]
    pip = [sys.executable, "-m", "pip", "--python", str(environment.python)]
    wanted = list(requirements)
    for first in (["torch"], wanted) if needs_torch(wanted) else (wanted,):
        options = [*constraint, "--find-links", str(wheelhouse)]
        subprocess.run([*pip, "install", *options, *first], check=True)
    return environment


def needs_torch(requirements: Iterable[str]) -> bool:
    """Say whether one of the repository's own distributions among the requirements needs torch."""
    names = {Requirement(line).name for line in requirements}
    return any(
        needed.name == "torch"
        for found in distributions()
        if found.name in names
        for needed in found.requirements
    )
