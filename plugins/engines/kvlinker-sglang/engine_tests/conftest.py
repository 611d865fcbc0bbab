"""What all engine tests share: SGLang is told to use the CPU before anything imports it."""

from __future__ import annotations

import os

import pytest

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    """Let SGLang, and what it imports of torch, warn; warnings of all others stay errors."""
    config.addinivalue_line("filterwarnings", r"ignore::UserWarning:sglang\..*")
    config.addinivalue_line("filterwarnings", r"ignore::DeprecationWarning:torch\..*")
