"""Runs the `kvlinker` command as `python -m kvlinker`."""

from __future__ import annotations

from kvlinker.cli import main

main()
