"""Builds distributions, checks what is in them, installs them into a clean environment and smoke-tests them.

It publishes nothing: whoever releases uploads what it leaves in dist/. See docs/releasing.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

from archives import sdist_problems, wheel_problems
from changelogs import changelog_problems, fragment_problems
from distributions import CORE, ROOT, Distribution, distributions
from environments import Environment, build, make_environment, make_fresh_environment
from packaging.version import Version

__all__ = ["Release", "chosen", "core_at", "floors", "main", "with_required"]

STORE_OPTIONS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {"kvlinker-file:file": {"path": "store", "capacity": "4MiB"}}
)
"""Stores that can be opened without a server, with the options for it."""


class ReleaseError(Exception):
    """Why nothing can be released."""


def chosen(names: Sequence[str]) -> list[Distribution]:
    """Return the distributions of these names; all without any.

    Raises:
        ReleaseError: there is none of such a name.
    """
    known = {found.name: found for found in distributions()}
    for name in names:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
            msg = f"there is no distribution {name}; {hint}"
            raise ReleaseError(msg)
    return [known[name] for name in names] if names else list(known.values())


def floors(plugins: Iterable[Distribution], core: Version) -> dict[Version, list[Distribution]]:
    """Return the plugins that claim to work with an older core than this one, by the lowest that they claim."""
    found: dict[Version, list[Distribution]] = {}
    for plugin in plugins:
        if plugin.core_floor is not None and plugin.core_floor != core:
            found.setdefault(plugin.core_floor, []).append(plugin)
    return found


def with_required(wanted: Sequence[Distribution]) -> list[Distribution]:
    """Return distributions, behind core and those of the repository that they cannot be installed without."""
    known = {found.name: found for found in distributions()}
    found = {CORE.name: CORE}
    for one in wanted:
        required = [known[needed.name] for needed in one.requirements if needed.name in known]
        found |= {needed.name: needed for needed in required}
    return list((found | {one.name: one for one in wanted}).values())


def core_at(version: Version, folder: Path, *, root: Path = ROOT) -> Path:
    """Build the wheel of a core that was released before, from its tag, and return it.

    Raises:
        ReleaseError: there is no such tag, or it holds another version.
    """
    tag = f"kvlinker-{version}"
    command = ["git", "archive", tag, "core"]
    done = subprocess.run(command, cwd=root, check=False, capture_output=True)
    if done.returncode:
        msg = f"there is no tag {tag} with a core: fetch it, or raise the floor of the plugins that claim it"
        raise ReleaseError(msg)
    with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
        archive.extractall(folder / "source", filter="data")
    build(Distribution(folder=folder / "source" / "core"), folder)
    wheels = list(folder.glob(f"kvlinker-{version}-*.whl"))
    if not wheels:
        msg = f"the tag {tag} builds {[path.name for path in folder.glob('*.whl')]}, not kvlinker {version}"
        raise ReleaseError(msg)
    return wheels[0]


@dataclass(frozen=True, kw_only=True)
class Release:
    """One run: what is released, and where it is built."""

    distributions: Sequence[Distribution]
    folder: Path
    """Where source archives and wheels go."""
    scratch: Path
    """Where environments are made."""
    is_dry: bool
    """Use no network, and take third-party packages from the environment that this runs in."""

    def problems(self) -> Iterator[str]:
        """Do everything, and yield what is wrong."""
        for found in self.distributions:
            yield from fragment_problems(found)
            if not self.is_dry:
                yield from changelog_problems(found)
        yield from self._built()
        print(f"installing {len(self.distributions)} distributions into a clean environment")
        environment = self._environment("tree", self.folder, f"=={CORE.version}", self._plugins)
        yield from self._core_problems(environment)
        for plugin in self._plugins:
            yield from self._smoke_problems(environment, plugin, CORE.version)
        yield from self._floor_problems()

    @property
    def _plugins(self) -> list[Distribution]:
        return [found for found in self.distributions if found.kind != "core"]

    # ---- archives -----------------------------------------------------------------------------

    def _built(self) -> Iterator[str]:
        """Build everything, and what the environment needs beside it, and yield what is wrong with the archives."""
        for found in with_required(self.distributions):
            print(f"building {found.name} {found.version}")
            build(found, self.folder)
            yield from wheel_problems(self._wheel(found), found)
            base = f"{found.import_name}-{found.version}"
            yield from sdist_problems(self.folder / f"{base}.tar.gz", found)

    def _wheel(self, found: Distribution) -> Path:
        """Return the wheel that was built of a distribution, for any machine or for this one."""
        (wheel,) = self.folder.glob(f"{found.import_name}-{found.version}-*.whl")
        return wheel

    # ---- environments -------------------------------------------------------------------------

    def _environment(
        self, name: str, wheelhouse: Path, core: str, plugins: Iterable[Distribution]
    ) -> Environment:
        requirements = [f"kvlinker[cli,testing]{core}"]
        requirements += [f"{plugin.name}=={plugin.version}" for plugin in plugins]
        folder = self.scratch / name
        folder.mkdir()
        if self.is_dry:
            return make_environment(folder, wheelhouse, requirements)
        return make_fresh_environment(folder, wheelhouse, requirements)

    def _core_problems(self, environment: Environment) -> Iterator[str]:
        """Run the command: it loads every plugin in a process of its own."""
        command = [str(environment.python), "-m", "kvlinker", "plugins", "--json"]
        yield from self._run(command, environment, "kvlinker plugins")

    def _smoke_problems(
        self, environment: Environment, plugin: Distribution, core: Version
    ) -> Iterator[str]:
        for name in plugin.plugins:
            print(f"testing {name} with kvlinker {core}")
            command = [str(environment.python), "-m", "pytest", "-p", "no:cacheprovider", "-q"]
            command += ["--pyargs", "kvlinker.testing.smoke", f"--kvlinker-plugin={name}"]
            if name in STORE_OPTIONS:
                command.append(f"--kvlinker-store-config={json.dumps(dict(STORE_OPTIONS[name]))}")
            yield from self._run(command, environment, f"smoke test of {name}")

    def _run(self, command: Sequence[str], environment: Environment, what: str) -> Iterator[str]:
        """Run a command in an empty folder; its output is the problem where it fails."""
        with TemporaryDirectory(dir=self.scratch) as folder:
            done = subprocess.run(
                command,
                cwd=folder,
                env=environment.variables,
                check=False,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        if done.returncode:
            yield f"{what} failed:\n{done.stdout.rstrip()}"

    # ---- the lowest core ----------------------------------------------------------------------

    def _floor_problems(self) -> Iterator[str]:
        older = floors(self._plugins, CORE.version)
        for plugin in self._plugins:
            if plugin.core_floor == CORE.version:
                print(
                    f"{plugin.name} claims kvlinker {plugin.core_floor} and newer, which is this one"
                )
        for floor, plugins in sorted(older.items()):
            wheelhouse = self.scratch / f"wheels-{floor}"
            wheelhouse.mkdir()
            try:
                core_at(floor, wheelhouse)
            except ReleaseError as error:
                yield f"{', '.join(plugin.name for plugin in plugins)}: {error}"
                continue
            for plugin in with_required(plugins)[1:]:
                shutil.copy(self._wheel(plugin), wheelhouse)
            environment = self._environment(f"floor-{floor}", wheelhouse, f"=={floor}", plugins)
            for plugin in plugins:
                yield from self._smoke_problems(environment, plugin, floor)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a release and return the exit code: 1 if something is wrong, 2 if it could not be run."""
    parser = argparse.ArgumentParser(
        prog="release.py",
        description="Build, check, install and smoke-test distributions; publish nothing.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="distributions; all by default")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="use no network, leave nothing behind, and let changes wait for their release",
    )
    parser.add_argument("--outdir", type=Path, default=ROOT / "dist", help="where archives go")
    options = parser.parse_args(arguments)
    with TemporaryDirectory(prefix="kvlinker-release-") as scratch:
        folder = Path(scratch) / "dist" if options.dry_run else options.outdir
        folder.mkdir(parents=True, exist_ok=True)
        try:
            release = Release(
                distributions=chosen(options.names),
                folder=folder,
                scratch=Path(scratch),
                is_dry=options.dry_run,
            )
            problems = list(release.problems())
        except (ReleaseError, subprocess.CalledProcessError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    for problem in problems:
        print(f"problem: {problem}", file=sys.stderr)
    print(f"{len(problems)} problems" if problems else "all is well")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
