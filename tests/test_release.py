"""A release builds, checks, installs and smoke-tests, and finds what is wrong before anybody else does."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path

import pytest
from archives import entry_points_in, metadata_problems, sdist_problems, wheel_problems
from changelogs import START, changelog_problems, fragment_problems
from distributions import CORE, ROOT, Distribution, distributions
from packaging.version import Version
from release import Release, chosen, core_at, floors, with_required
from repository import each_distribution, write_distribution

SCRIPT = ROOT / "tools" / "release.py"
PYPROJECT = """
readme = "README.md"
requires-python = ">=3.11"
license = "Apache-2.0"
dependencies = ["kvlinker>=0.1,<1"]
[project.entry-points."kvlinker.models"]
toy = "kvlinker_toy"
"""
METADATA = """\
Metadata-Version: 2.4
Name: kvlinker-toy
Version: 0.1.0
License-Expression: Apache-2.0
Requires-Python: >=3.11
Description-Content-Type: text/markdown

# kvlinker-toy
"""
INFO = "kvlinker_toy-0.1.0.dist-info"
WHEEL: Mapping[str, str] = {
    "kvlinker_toy/__init__.py": "",
    "kvlinker_toy/py.typed": "",
    f"{INFO}/METADATA": METADATA,
    f"{INFO}/entry_points.txt": "[kvlinker.models]\ntoy = kvlinker_toy\n",
    f"{INFO}/licenses/LICENSE": "Apache License",
    f"{INFO}/RECORD": "",
}
SDIST: Mapping[str, str] = {
    **dict.fromkeys(["CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml"], ""),
    "PKG-INFO": METADATA,
    "tests/test_toy.py": "",
}


@pytest.fixture
def toy(tmp_path: Path) -> Distribution:
    made = write_distribution(tmp_path, "", folder="models/kvlinker-toy", pyproject=PYPROJECT)
    (made.folder / "README.md").write_text("# kvlinker-toy\n")
    return made


def write_wheel(folder: Path, files: Mapping[str, str]) -> Path:
    path = folder / "toy.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)
    return path


def write_sdist(folder: Path, files: Mapping[str, str]) -> Path:
    path = folder / "toy.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"kvlinker_toy-0.1.0/{name}")
            member.size = len(content.encode())
            archive.addfile(member, BytesIO(content.encode()))
    return path


def without(files: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: content for name, content in files.items() if name not in names}


# ---- wheels and source archives ---------------------------------------------------------------


def test_a_whole_wheel_and_a_whole_source_archive_are_fine(
    toy: Distribution, tmp_path: Path
) -> None:
    assert wheel_problems(write_wheel(tmp_path, WHEEL), toy) == []
    assert sdist_problems(write_sdist(tmp_path, SDIST), toy) == []


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        (without(WHEEL, "kvlinker_toy/__init__.py"), "kvlinker_toy/__init__.py is missing"),
        (without(WHEEL, "kvlinker_toy/py.typed"), "kvlinker_toy/py.typed is missing"),
        (without(WHEEL, f"{INFO}/licenses/LICENSE"), f"{INFO}/licenses/LICENSE is missing"),
        (
            {**WHEEL, "kvlinker_toy/tests/test_toy.py": ""},
            "kvlinker_toy/tests/test_toy.py does not belong into a wheel",
        ),
        (
            {**WHEEL, "kvlinker_toy/__pycache__/x.pyc": ""},
            "kvlinker_toy/__pycache__/x.pyc does not belong into a wheel",
        ),
        ({**WHEEL, "tests/test_toy.py": ""}, "tests/test_toy.py is in no package"),
        (
            without(WHEEL, f"{INFO}/entry_points.txt"),
            "entry point toy = kvlinker_toy of kvlinker.models is missing",
        ),
        (
            {**WHEEL, f"{INFO}/entry_points.txt": "[kvlinker.models]\ntoy = kvlinker_toy\nT = t\n"},
            "entry point T = t of kvlinker.models is not in pyproject.toml",
        ),
        (without(WHEEL, f"{INFO}/METADATA"), "metadata is invalid"),
    ],
)
def test_what_is_wrong_with_a_wheel_is_said(
    toy: Distribution, tmp_path: Path, files: Mapping[str, str], problem: str
) -> None:
    problems = wheel_problems(write_wheel(tmp_path, files), toy)

    assert [found for found in problems if f"toy.whl: {problem}" in found]


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        (without(SDIST, "CHANGELOG.md"), "CHANGELOG.md is missing"),
        (without(SDIST, "tests/test_toy.py"), "it has no tests"),
        ({**SDIST, ".mypy_cache/x": ""}, ".mypy_cache/x does not belong into a source archive"),
        (without(SDIST, "PKG-INFO"), "metadata is invalid"),
    ],
)
def test_what_is_wrong_with_a_source_archive_is_said(
    toy: Distribution, tmp_path: Path, files: Mapping[str, str], problem: str
) -> None:
    problems = sdist_problems(write_sdist(tmp_path, files), toy)

    assert [found for found in problems if f"toy.tar.gz: {problem}" in found]


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("Name: kvlinker-toy", "Name: kvlinker_toy", "another name"),
        ("Version: 0.1.0", "Version: 0.1.1", "another version"),
        (">=3.11", ">=3.12", "another Python"),
        ("Apache-2.0", "MIT", "another licence"),
        ("# kvlinker-toy", "", "another README"),
        ("text/markdown", "text/plain", "another kind of README"),
        ("Version: 0.1.0", "Version: one", "metadata is invalid: 'one' is invalid"),
    ],
)
def test_metadata_that_states_something_else_is_found(
    toy: Distribution, old: str, new: str, problem: str
) -> None:
    assert metadata_problems(METADATA.encode(), toy) == []

    (found, *others) = metadata_problems(METADATA.replace(old, new).encode(), toy)

    assert problem in found
    assert others == []


def test_names_of_entry_points_keep_their_letters() -> None:
    found = entry_points_in("[a.B]\nName = module:Thing\n\n[c]\nx = y\n")

    assert found == {("a.B", "Name", "module:Thing"), ("c", "x", "y")}


# ---- changelogs -------------------------------------------------------------------------------


def add_fragment(distribution: Distribution, name: str, text: str = "Something.\n") -> None:
    folder = distribution.folder / "newsfragments"
    folder.mkdir(exist_ok=True)
    (folder / ".gitignore").write_text("!.gitignore\n")
    (folder / name).write_text(text)


@each_distribution
def test_every_distribution_has_a_changelog_and_fragments_that_will_be_in_it(
    distribution: Distribution,
) -> None:
    text = (distribution.folder / "CHANGELOG.md").read_text()

    assert text.startswith(f"# Changelog of {distribution.name}\n")
    assert START in text
    assert (distribution.folder / "newsfragments" / ".gitignore").is_file()
    assert fragment_problems(distribution) == []


@pytest.mark.parametrize("name", ["12.added.md", "+window.fixed.md", "12.fixed.2.md"])
def test_a_fragment_names_what_kind_of_change_it_is(toy: Distribution, name: str) -> None:
    add_fragment(toy, name)

    assert fragment_problems(toy) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [("12.md", "x"), ("12.add.md", "x"), ("12.added.txt", "x"), ("1.added.md", " ")],
)
def test_a_fragment_that_no_changelog_would_have_is_found(
    toy: Distribution, name: str, text: str
) -> None:
    add_fragment(toy, name, text)

    (problem,) = fragment_problems(toy)

    assert problem.startswith(f"kvlinker-toy/newsfragments/{name}: call it NUMBER.KIND.md")


def test_a_version_without_a_section_cannot_be_released(toy: Distribution) -> None:
    changelog = toy.folder / "CHANGELOG.md"

    assert changelog_problems(toy) == [
        f"kvlinker-toy: CHANGELOG.md lacks the line {START}",
        "kvlinker-toy: CHANGELOG.md has no section for 0.1.0",
    ]
    changelog.write_text(f"{START}\n\n## 0.1.0.1\n")
    assert changelog_problems(toy) == ["kvlinker-toy: CHANGELOG.md has no section for 0.1.0"]
    changelog.write_text(f"{START}\n\n## 0.1.0 (2031-01-01)\n")
    assert changelog_problems(toy) == []


def test_fragments_become_the_section_of_a_release(toy: Distribution) -> None:
    (toy.folder / "CHANGELOG.md").write_text(f"# Changelog\n\n{START}\n\n## 0.0.9\n\nOld.\n")
    add_fragment(toy, "+windows.added.md", "Windows of any length.\n")
    add_fragment(toy, "31.fixed.md", "A page of one slot.\n")

    (no_section, waiting) = changelog_problems(toy)
    command = waiting.partition("run: towncrier ")[2].split()
    subprocess.run(
        [sys.executable, "-m", "towncrier", *command, "--yes", "--date", "2031-01-01"],
        cwd=ROOT,
        check=True,
    )

    assert "no section for 0.1.0" in no_section
    assert changelog_problems(toy) == []
    assert (toy.folder / "CHANGELOG.md").read_text() == (
        f"# Changelog\n\n{START}\n\n"
        "## 0.1.0 (2031-01-01)\n\n"
        "### Added\n\n- Windows of any length.\n\n"
        "### Fixed\n\n- A page of one slot. (#31)\n\n\n"
        "## 0.0.9\n\nOld.\n"
    )


# ---- what is released -------------------------------------------------------------------------


def test_all_distributions_are_released_unless_some_are_named() -> None:
    assert [found.name for found in chosen([])] == [found.name for found in distributions()]
    assert [found.name for found in chosen(["kvlinker-dsa"])] == ["kvlinker-dsa"]


def test_what_a_distribution_requires_of_the_others_is_built_beside_it() -> None:
    released = chosen(["kvlinker-memory", "kvlinker-dsa"])

    built = [found.name for found in with_required(released)]

    assert built == ["kvlinker", "kvlinker-file", "kvlinker-memory", "kvlinker-dsa"]


def test_a_misspelt_distribution_is_refused_with_the_closest_one() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "kvlinker-das"], check=False, capture_output=True, text=True
    )

    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr == "error: there is no distribution kvlinker-das; did you mean kvlinker-dsa?\n"
    )


def test_a_dry_run_builds_checks_installs_and_tests_without_leaving_anything() -> None:
    before = sorted(ROOT.glob("dist/*"))
    command = [sys.executable, str(SCRIPT), "--dry-run", "kvlinker-file", "kvlinker-memory"]

    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)

    lines = done.stdout.splitlines()
    assert (done.returncode, lines[-1]) == (0, "all is well")
    version = CORE.version
    assert f"building kvlinker {version}" in lines
    assert f"testing kvlinker-file:file with kvlinker {version}" in lines
    assert f"testing kvlinker-memory:memory with kvlinker {version}" in lines
    assert sorted(ROOT.glob("dist/*")) == before


def test_a_plugin_that_does_not_work_is_not_released(tmp_path: Path) -> None:
    broken = copy_of_the_template(
        tmp_path,
        {
            "kvlinker-example": "kvlinker-broken",
            "kvlinker_example": "kvlinker_broken",
            "\nexample =": "\nbroken =",
            "api_version=1": "api_version=0",
            "kvlinker>=0.1,": "kvlinker>=0.0.9,",
        },
    )
    folder = tmp_path / "dist"
    release = Release(distributions=[broken], folder=folder, scratch=tmp_path, is_dry=True)

    problems = list(release.problems())

    plugins, smoke, floor = problems
    assert plugins.startswith("kvlinker plugins failed:")
    assert smoke.startswith("smoke test of kvlinker-broken:broken failed:")
    assert "speaks plugin API 0" in smoke
    assert floor == (
        "kvlinker-broken: there is no tag kvlinker-0.0.9 with a core: fetch it, or raise the floor of "
        "the plugins that claim it"
    )


def copy_of_the_template(folder: Path, replacements: Mapping[str, str]) -> Distribution:
    """Copy the template of plugins to `kvlinker-broken`, with other words in its files."""
    source, target = ROOT / "examples" / "kvlinker-example", folder / "kvlinker-broken"
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", ".*", "*.json"))
    (target / "src" / "kvlinker_example").rename(target / "src" / "kvlinker_broken")
    for path in target.rglob("*"):
        if path.suffix in {".py", ".toml", ".md"}:
            text = path.read_text()
            for old, new in replacements.items():
                text = text.replace(old, new)
            path.write_text(text)
    return Distribution(folder=target)


# ---- the lowest core --------------------------------------------------------------------------


def claiming(folder: Path, name: str, floor: str) -> Distribution:
    pyproject = f'dependencies = ["kvlinker{floor}", "numpy>=1.26"]\n'
    return write_distribution(folder, "", folder=f"models/{name}", pyproject=pyproject)


def test_plugins_are_tested_with_the_lowest_core_that_they_claim(tmp_path: Path) -> None:
    plugins = [
        claiming(tmp_path, "kvlinker-a", ">=0.2,<1"),
        claiming(tmp_path, "kvlinker-b", ">=0.1.0,<1"),
        claiming(tmp_path, "kvlinker-c", "<1,>=0.1"),
        claiming(tmp_path, "kvlinker-d", ">=0.2.0"),
    ]

    found = floors([*plugins, CORE], Version("0.2.0"))

    assert {floor: [one.name for one in names] for floor, names in found.items()} == {
        Version("0.1"): ["kvlinker-b", "kvlinker-c"]
    }


def test_an_older_core_is_built_from_its_tag(tmp_path: Path) -> None:
    repository, built = tmp_path / "repository", tmp_path / "built"
    built.mkdir()
    for version, content in (("0.1.0", "old = True\n"), ("0.2.0", "new = True\n")):
        write_core(repository, version, content)

    wheel = core_at(Version("0.1.0"), built, root=repository)

    assert wheel.name == "kvlinker-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as opened:
        assert opened.read("kvlinker/__init__.py") == b"old = True\n"


def test_a_tag_that_holds_another_version_is_refused(tmp_path: Path) -> None:
    repository, built = tmp_path / "repository", tmp_path / "built"
    built.mkdir()
    write_core(repository, "0.1.0", "old = True\n", tag="kvlinker-0.0.5")

    with pytest.raises(
        Exception, match=r"tag kvlinker-0\.0\.5 builds .*0\.1\.0.*, not kvlinker 0\.0\.5"
    ):
        core_at(Version("0.0.5"), built, root=repository)


def write_core(repository: Path, version: str, content: str, *, tag: str = "") -> None:
    """Commit a core of a version, and tag it."""
    package = repository / "core" / "src" / "kvlinker"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(content)
    (repository / "core" / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
        f'[project]\nname = "kvlinker"\nversion = "{version}"\nrequires-python = ">=3.11"\n'
    )
    name = tag or f"kvlinker-{version}"
    who = ["-c", "user.name=Somebody", "-c", "user.email=somebody@example.org"]
    for arguments in (
        ["init", "--quiet"],
        ["add", "--all"],
        [*who, "commit", "--quiet", "--message", version],
        ["tag", name],
    ):
        command = ["git", *arguments]
        subprocess.run(command, cwd=repository, check=True)
