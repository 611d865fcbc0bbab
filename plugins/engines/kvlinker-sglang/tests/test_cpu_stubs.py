"""The stand-ins that let SGLang run without a GPU are in the environment of the engine tests and nowhere else."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import distributions, requires
from importlib.util import find_spec
from pathlib import Path

STUBS = Path(__file__).parents[1] / "cpu_stubs"
PACKAGE = "kvlinker_sglang_cpu_stubs"


def test_they_are_not_installed_here() -> None:
    assert find_spec(PACKAGE) is None
    assert "kvlinker-sglang-cpu-stubs" not in {found.name for found in distributions()}


def test_no_distribution_asks_for_them() -> None:
    names = [found.name for found in distributions() if found.name.startswith("kvlinker")]

    asked = [line for name in names for line in requires(name) or [] if "stub" in line]

    assert "kvlinker-sglang" in names
    assert asked == []


def test_their_package_alone_changes_no_import() -> None:
    program = (
        f"import sys; before = list(sys.meta_path); import {PACKAGE}\n"
        "assert sys.meta_path == before\n"
        f"{PACKAGE}.install(); {PACKAGE}.install()\n"
        "assert len(sys.meta_path) == len(before) + 1\n"
        "import os; assert os.environ['SGLANG_USE_CPU_ENGINE'] == '1'\n"
        "assert os.environ['PATH'].split(':')[0] == sys.prefix + '/bin'\n"
        "assert os.environ['TORCH_EXTENSIONS_DIR'] == sys.prefix + '/torch_extensions'\n"
        "import triton, torchvision.transforms, sgl_kernel\n"
        "assert triton.cdiv(5, 4) == triton.next_power_of_2(2) == 2\n"
        "print(triton, torchvision.transforms.InterpolationMode, sgl_kernel.silu_and_mul)"
    )

    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(STUBS / "src")},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )

    assert done.stdout.startswith("<module 'triton' (stand-in)> ")
    assert done.stdout.endswith("<stand-in for sgl_kernel.silu_and_mul>\n")


def test_the_environment_of_the_engine_tests_activates_them() -> None:
    lines = (STUBS / f"{PACKAGE}.pth").read_text()

    assert lines == f"import {PACKAGE}; {PACKAGE}.install()\n"
