"""Settings of every test: hypothesis, and the examples in documents and docstrings run as tests."""

from __future__ import annotations

from contextlib import ExitStack, chdir
from importlib.util import find_spec
from tempfile import TemporaryDirectory

from hypothesis import settings
from sybil import Sybil
from sybil.parsers.doctest import DocTestParser
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

# Tests that run pytest elsewhere do not have the tools of this folder in their path, and need none of them.
pytest_plugins = ["support_records", "longest_first"] if find_spec("support_records") else []

settings.register_profile("kvlinker", deadline=None, print_blob=True)
settings.register_profile("soak", settings.get_profile("kvlinker"), max_examples=5000)
settings.load_profile("kvlinker")


def _enter_scratch_folder(namespace: dict[str, object]) -> None:
    scratch = ExitStack()
    scratch.enter_context(chdir(scratch.enter_context(TemporaryDirectory())))
    namespace["_scratch"] = scratch


def _leave_scratch_folder(namespace: dict[str, object]) -> None:
    scratch = namespace.pop("_scratch")
    if isinstance(scratch, ExitStack):
        scratch.close()


_documents = Sybil(
    name="documents",
    parsers=[PythonCodeBlockParser(), SkipParser()],
    patterns=["*.md"],
    setup=_enter_scratch_folder,
    teardown=_leave_scratch_folder,
)
_docstrings = Sybil(
    name="docstrings",
    parsers=[DocTestParser()],
    patterns=["src/*/*.py", "src/*/*/*.py"],
)
pytest_collect_file = (_documents + _docstrings).pytest()
