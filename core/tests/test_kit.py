"""The kit's classes in the hands of a plugin author: what is collected, what is refused, what is counted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
from pair_plugin import CACHES

from kvlinker.testing.kit import KitTests, kit_tests
from kvlinker.testing.models import ModelPluginTests

NAME = "test_g5_addresses_and_row_counts_change_no_layout"


def subclass(**attributes: object) -> type:
    """Make a subclass of the model plugins' tests that a plugin author might write."""
    return type("TestTheirs", (ModelPluginTests,), attributes)


def quiet(_self: object) -> None:
    """Pass."""


def test_a_test_of_the_kit_cannot_be_replaced_in_silence() -> None:
    with pytest.raises(TypeError, match=rf"TestTheirs\.{NAME} replaces a test of the kit without"):
        subclass(**{NAME: quiet})


@pytest.mark.parametrize(
    "mark",
    [pytest.mark.skip(reason="slow"), pytest.mark.xfail, pytest.mark.xfail(reason=" ")],
    ids=["skip", "no_reason", "blank_reason"],
)
def test_only_an_expected_failure_with_a_reason_excuses_a_replacement(
    mark: pytest.MarkDecorator,
) -> None:
    def replacement(_self: object) -> None:
        """Pass."""

    with pytest.raises(TypeError, match="replaces a test of the kit without a reason"):
        subclass(**{NAME: mark(replacement)})


def test_a_replacement_that_says_why_it_fails_is_accepted() -> None:
    @pytest.mark.xfail(reason="its keys hold addresses until version 2")
    def replacement(_self: object) -> None:
        """Pass."""

    theirs = subclass(**{NAME: replacement})

    assert vars(theirs)[NAME] is replacement


def test_a_test_of_the_kit_cannot_be_taken_away() -> None:
    with pytest.raises(TypeError, match=rf"TestTheirs\.{NAME} replaces a test of the kit"):
        subclass(**{NAME: None})


def test_a_base_class_beside_the_kit_cannot_replace_a_test_either() -> None:
    mixin = type("Mixin", (), {NAME: quiet})

    with pytest.raises(TypeError, match=rf"Mixin\.{NAME} replaces a test of the kit"):
        type("TestTheirs", (mixin, ModelPluginTests), {})


def test_tests_of_ones_own_may_be_added() -> None:
    theirs = subclass(test_something_else=quiet)

    assert vars(theirs)["test_something_else"] is quiet


def test_kit_tests_are_those_of_the_kit_alone() -> None:
    class TestTheirs(ModelPluginTests):
        def test_something_else(self) -> None:
            """Pass."""

    names = kit_tests(TestTheirs)

    assert names == kit_tests(ModelPluginTests)
    assert NAME in names
    assert kit_tests(KitTests) == ()


def test_a_subclass_that_names_no_plugin_is_told_so() -> None:
    class TestTheirs(ModelPluginTests):
        caches = CACHES

    with pytest.raises(NotImplementedError, match="TestTheirs must set `plugin`"):
        TestTheirs().test_s8_it_loads_with_the_hooks_and_the_version_of_this_api()


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in a folder that knows nothing of this repository's settings."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


class Sources:
    """Test modules that a plugin author might write."""

    right: ClassVar[str] = (
        "import sys; sys.path.insert(0, {tests!r})\n"
        "import pair_plugin\n"
        "from kvlinker.testing.models import ModelPluginTests\n"
        "class TestPair(ModelPluginTests):\n"
        "    plugin = pair_plugin\n"
        "    caches = pair_plugin.CACHES\n"
    )
    without_caches: ClassVar[str] = right + "    caches = ()\n"


def write(folder: Path, source: str) -> None:
    tests = str(Path(__file__).parent)
    (folder / "test_theirs.py").write_text(source.format(tests=tests))


def test_seven_lines_run_every_test_of_the_kit_for_every_cache(tmp_path: Path) -> None:
    write(tmp_path, Sources.right)

    done = run_pytest(tmp_path, "-q")

    without_cache = 3
    count = (len(kit_tests(ModelPluginTests)) - without_cache) * len(CACHES) + without_cache
    assert f"{count} passed" in done.stdout, done.stdout


def test_an_empty_list_of_caches_is_an_error_and_not_a_skip(tmp_path: Path) -> None:
    write(tmp_path, Sources.without_caches)

    done = run_pytest(tmp_path, "-q")

    assert done.returncode != 0
    assert "TestPair.caches is empty; give at least one cache" in done.stdout + done.stderr


def test_everything_but_the_kits_classes_works_without_pytest() -> None:
    program = (
        "import sys; sys.modules['pytest'] = sys.modules['hypothesis'] = None\n"
        "import kvlinker.testing, kvlinker.testing.model_checks, kvlinker.testing.shelves\n"
        "import kvlinker.testing.smoke_checks, kvlinker.testing.pool_examples, kvlinker.pytest_options\n"
        "print('torch' in sys.modules)"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert done.stdout.strip() == "False"


def test_other_runs_of_pytest_load_nothing_of_kvlinker_but_its_options(tmp_path: Path) -> None:
    (tmp_path / "test_else.py").write_text(
        "import sys\n"
        "def test_modules():\n"
        "    found = {name for name in sys.modules if name.partition('.')[0] == 'kvlinker'}\n"
        "    assert found == {'kvlinker', 'kvlinker.pytest_options'}\n"
        "    assert 'numpy' not in sys.modules\n"
    )

    done = run_pytest(tmp_path, "-q")

    assert "1 passed" in done.stdout, done.stdout
