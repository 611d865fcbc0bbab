"""The plugins that the guides build are right: their files, put together, pass the conformance kit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest
from repository import ROOT

GUIDES = sorted((ROOT / "docs").glob("writing-*.md"))
BLOCK = re.compile(r"^```python\n# (\w+\.py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def files_of(text: str) -> Mapping[str, str]:
    """Return the files that a guide's blocks make, each from all blocks that begin with its name."""
    files: dict[str, str] = {}
    for name, content in BLOCK.findall(text):
        files[name] = f"{files[name]}\n\n{content}" if name in files else content
    return files


def run_kit(folder: Path, *options: str) -> str:
    """Run a guide's conformance tests in their folder, and return the last line of the output."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *options]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [*command, "test_kit.py"],
        cwd=folder,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_the_plugin_of_a_guide_passes_the_conformance_kit(guide: Path, tmp_path: Path) -> None:
    files = files_of(guide.read_text(encoding="utf-8"))
    for name, content in files.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    if "goldens" in files["test_kit.py"]:
        run_kit(tmp_path, "--kvlinker-update-goldens")

    outcome = run_kit(tmp_path)

    assert re.match(r"\d\d+ passed in", outcome)


def test_the_store_of_the_guide_has_less_than_a_hundred_lines() -> None:
    guide = (ROOT / "docs" / "writing-a-store-plugin.md").read_text(encoding="utf-8")

    assert len(files_of(guide)["kvlinker_drawer.py"].splitlines()) < 100


def test_the_packaging_of_the_guides_store_names_the_module_of_its_blocks() -> None:
    guide = (ROOT / "docs" / "writing-a-store-plugin.md").read_text(encoding="utf-8")
    (packaging,) = re.findall(r"^```toml\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL)

    made = tomllib.loads(packaging)

    (module,) = made["project"]["entry-points"]["kvlinker.stores"].values()
    assert f"{module}.py" in files_of(guide)
    assert made["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"] == [f"{module}.py"]


def test_a_guides_blocks_are_put_together_by_file() -> None:
    text = (
        "```python\n# one.py\na = 1\n```\n\n```python\nnot = 'in a file'\n```\n\n"
        "```python\n# two.py\nb = 2\n```\n\n```python\n# one.py\nc = 3\n```\n"
    )

    assert files_of(text) == {"one.py": "a = 1\n\n\nc = 3\n", "two.py": "b = 2\n"}


def test_there_is_a_guide_for_every_kind_of_plugin() -> None:
    assert [path.stem for path in GUIDES] == [
        "writing-a-model-plugin",
        "writing-a-store-plugin",
        "writing-an-engine-adapter",
    ]
