"""Files that a script makes are what the script makes now."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT

DESCRIPTIONS = ROOT / "examples" / "descriptions"
MOST_BYTES = 100_000

# Bytes of a token, and of a stored boundary beside them: config.json of each model, as in its plugin's tests.
SIZES = {
    "llama-3.1-8b": (131_072, 0),
    "gpt-oss-120b": (36_864, 4_718_592),
    "qwen3-next-80b-a3b": (24_576, 77_266_944),
    "deepseek-v3": (70_272, 0),
    "deepseek-v3.2": (78_324, 0),
    "glm-5.2": (92_628, 0),
    "deepseek-v4-flash": (998_208 / 256, 8_160_000),
    "deepseek-v4-pro": (1_430_208 / 256, 11_592_960),
}


def made_by(script: Path, folder: Path) -> dict[str, str]:
    """Run a script that writes into a folder, and return what it wrote."""
    subprocess.run([sys.executable, str(script), str(folder)], check=True)
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_the_example_descriptions_are_what_their_script_makes(tmp_path: Path) -> None:
    made = made_by(DESCRIPTIONS / "make_descriptions.py", tmp_path)

    kept = {path.name: path.read_text() for path in DESCRIPTIONS.glob("*.json")}
    assert made == kept
    assert {Path(name).stem for name in made} == set(SIZES)
    assert max(len(text) for text in made.values()) < MOST_BYTES


@pytest.mark.parametrize(
    ("script", "names"),
    [("draw_page.py", ["page.svg"]), ("draw_life.py", ["load.svg", "offload.svg"])],
)
def test_pictures_are_what_their_script_draws(
    script: str, names: list[str], tmp_path: Path
) -> None:
    pictures = ROOT / "docs" / "pictures"

    made = made_by(pictures / script, tmp_path)

    assert made == {name: (pictures / name).read_text() for name in names}


@pytest.mark.parametrize("model", sorted(SIZES))
def test_an_example_is_explained_with_the_sizes_of_its_model(model: str) -> None:
    command = [sys.executable, "-m", "kvlinker", "explain", "--json"]

    done = subprocess.run(
        [*command, str(DESCRIPTIONS / f"{model}.json")], check=True, stdout=subprocess.PIPE
    )

    explained = json.loads(done.stdout)
    assert (explained["bytes_per_token"], explained["bytes_per_boundary"]) == SIZES[model]
