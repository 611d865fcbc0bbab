"""Pytest plugin: what marked tests proved, written down as they pass, and compared with the support matrix.

`supports(engine=..., level=...)` marks a test that proves that a cache is moved; where its facts come from:

* the test's `record_property("description", description_to_json(...))`, by default;
* `of="name"`: the parameter of that name, an example of the conformance kit. A class may carry that mark.
* `family=..., kv_format=...`: stated, where no description can be reached; the family may be a mapping by case.

`refuses(engine=...)` marks one that proves refusals, each by `record_property("refused", [what, message])`.
`case="name"` names the parameter that tells the cases of a test apart; by default it is all of them.

A mark whose parameter is not there fails where it is collected, and a marked test that is skipped fails.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest

from kvlinker.description import KVCacheDescription
from kvlinker.description_json import description_from_json
from kvlinker.testing.cache_examples import CacheExample

__all__ = ["RECORDS", "Record", "SupportRecorder", "read_records", "record_line", "record_of"]

RECORDS = Path("docs", "support-matrix.jsonl")
"""What the matrix was made of, beside it."""
_PROPERTY = "support"
_MARKS = {
    "supports": "the test proves that a cache is moved; see tools/support_records.py",
    "refuses": "the test proves that a cache is refused; see tools/support_records.py",
}
_CASE = tuple[str, str]
"""A test and its case."""


@dataclass(frozen=True, order=True, kw_only=True)
class Record:
    """What one case of a test proved."""

    engine: str
    family: str
    """Of a refusal: what was refused."""
    kv_format: str = ""
    formats: str = ""
    """Of what is kept beside."""
    facts: str = ""
    """All others of the description."""
    draft: str = ""
    level: str
    """`refused`, of a refusal."""
    test: str
    case: str = ""
    reason: str = ""
    """Of a refusal: its message."""


def record_line(record: Record) -> str:
    """Return the form that records are kept in: one line of JSON, without what is empty."""
    return json.dumps({name: value for name, value in asdict(record).items() if value})


def read_records(path: Path) -> list[Record]:
    """Return the records of a file; none where there is no file."""
    if not path.exists():
        return []
    return [Record(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def record_of(record: Record, description: KVCacheDescription) -> Record:
    """Return a record with all facts of a description, so that none of them changes unseen."""
    facts = {name: str(value) for name, value in description.facts.items()}
    pages = facts.pop("kv_family", "")
    formats = {
        name.removesuffix("_format"): facts.pop(name)
        for name in sorted(facts)
        if name.endswith("_format")
    }
    scaled = " with scales" if description.facts.get("kv_scaled") else ""
    return replace(
        record,
        family=f"{description.family} beside {pages}" if pages else description.family,
        kv_format=formats.pop("kv", "") + scaled,
        formats=_listed(formats),
        facts=_listed(facts),
        draft="yes" if any(role.startswith("draft_") for role in description.buffers) else "",
    )


def _listed(facts: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in sorted(facts.items()))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption(
        "--support-record",
        type=Path,
        metavar="FILE",
        help="Write what marked tests proved to a file, and compare with nothing.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks and the recorder.

    Raises:
        UsageError: there is nothing to compare with, and nothing is written either.
    """
    for name, text in _MARKS.items():
        config.addinivalue_line("markers", f"{name}: {text}")
    target: Path | None = config.getoption("--support-record")
    path = config.rootpath / RECORDS
    if not target and not path.exists():
        msg = f"no {path} to compare marked tests with; run in the repository, or give --support-record FILE"
        raise pytest.UsageError(msg)
    known = None if target else read_records(path)
    is_worker = "workerinput" in vars(config)
    config.pluginmanager.register(SupportRecorder(None if is_worker else target, known))


class SupportRecorder:
    """Gathers what passed, or fails a marked test that proves something else than is known."""

    def __init__(self, target: Path | None, known: Sequence[Record] | None) -> None:
        """Take the file to write, and what is known; None compares with nothing."""
        self._target = target
        self._compares = known is not None
        self._known: dict[_CASE, set[str]] = defaultdict(set)
        for record in known or ():
            self._known[record.test, record.case].add(record_line(record))
        self._gone: dict[str, list[str]] = {}
        self._proved: dict[_CASE, set[str]] = defaultdict(set)
        self._failed: set[str] = set()
        """Tests of which a case did not pass."""

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Fail what has a mark that proves nothing, since its parameter is not there."""
        report = yield
        if report.passed and (problems := sorted(set(_astray(collector, report.result)))):
            report.outcome = "failed"
            report.longrepr = "\n".join(problems)
            report.result = []
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: Sequence[pytest.Item]
    ) -> None:
        """Note the cases that are known and were not collected, where all cases of a test were asked for."""
        if any("[" in argument for argument in config.args):
            return
        collected: dict[str, set[str]] = defaultdict(set)
        for item in items:
            for test, case, _ in _claims(item):
                collected[test].add(case)
        for test, case in self._known:
            if test in collected and case not in collected[test]:
                self._gone.setdefault(test, []).append(case)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Add what a test proved to its report, and fail it where that is not known or it was skipped."""
        report = yield
        claims = list(_claims(item))
        if not report.passed:
            report.user_properties.append((_PROPERTY, [[test, "", ""] for test, _, _ in claims]))
            if claims and report.skipped:
                why = report.longreprtext
                _fail(report, f"the test is marked, and was skipped or expected to fail\n{why}")
            return report
        if not claims or call.when != "call":
            return report
        proved = [
            [test, case, record_line(record)]
            for test, case, mark in claims
            for record in _records(
                item, mark, Record(engine="", family="", level="", test=test, case=case)
            )
        ]
        report.user_properties.append((_PROPERTY, proved))
        if problem := self._problem(claims, proved):
            _fail(report, problem)
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take in what a test proved, wherever it ran."""
        for name, proved in report.user_properties:
            if name == _PROPERTY and isinstance(proved, list):
                for test, case, line in proved:
                    self._failed |= set() if line else {test}
                    self._proved[test, case].add(line)

    def pytest_sessionfinish(self) -> None:
        """Write the file; a test of which a case did not pass proved nothing."""
        if self._target is None:
            return
        lines = sorted(
            line
            for (test, _), proved in self._proved.items()
            for line in proved
            if test not in self._failed
        )
        self._target.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def _problem(
        self, claims: Sequence[tuple[str, str, pytest.Mark]], proved: Sequence[Sequence[str]]
    ) -> str:
        """Return how a test differs from what is known of it; empty if it does not."""
        lines = {line for _, _, line in proved}
        if not lines:
            return "the test is marked, and stated neither a description nor a refusal"
        if not self._compares:
            return ""
        known = {line for test, case, _ in claims for line in self._known[test, case]}
        gone = sorted(case for test, _, _ in claims for case in self._gone.get(test, ()))
        if lines == known and not gone:
            return ""
        told = "\n".join([*sorted(lines - known), "and not:", *sorted(known - lines), *gone])
        return (
            f"docs/support-matrix.md is not what this test proves; run make support-matrix\n{told}"
        )


def _fail(report: pytest.TestReport, problem: str) -> None:
    report.outcome = "failed"
    report.longrepr = problem
    # Pytest counts no failure that was expected.
    vars(report).pop("wasxfail", None)


def _astray(
    collector: pytest.Collector, found: Sequence[pytest.Item | pytest.Collector]
) -> Iterator[str]:
    """Yield a message for each mark of an item without its parameter, or of a collector with no item that has it."""
    items = [item for item in found if isinstance(item, pytest.Item)]
    marked = [*((item, [item]) for item in items), (collector, items)]
    for node, claiming in marked:
        for mark in node.own_markers:
            wanted = _wanted(mark)
            if mark.name in _MARKS and not any(_has(item, wanted) for item in claiming):
                yield (
                    f"{node.nodeid.partition('[')[0]} is marked {mark.name}, and no test there has a parameter "
                    f"{wanted!r}; name one in of= or case="
                )


def _wanted(mark: pytest.Mark) -> str | None:
    wanted: str | None = mark.kwargs.get("of", mark.kwargs.get("case"))
    return wanted


def _has(item: pytest.Item, wanted: str | None) -> bool:
    return wanted is None or wanted in _parameters(item)


def _claims(item: pytest.Item) -> Iterator[tuple[str, str, pytest.Mark]]:
    """Yield the test, the case and the mark of everything that an item is marked to prove."""
    test, parameters = item.nodeid.partition("[")[0], _parameters(item)
    for mark in (*item.iter_markers("supports"), *item.iter_markers("refuses")):
        wanted = _wanted(mark)
        if wanted is None:
            yield test, item.nodeid.partition("[")[2].removesuffix("]"), mark
        elif wanted in parameters:
            value = parameters[wanted]
            if isinstance(value, CacheExample):
                yield test.rpartition("::")[0], value.name, mark
            else:
                yield test, str(value), mark


def _parameters(item: pytest.Item) -> Mapping[str, object]:
    if not isinstance(item, pytest.Function) or "callspec" not in vars(item):
        return {}
    return item.callspec.params


def _records(item: pytest.Item, mark: pytest.Mark, begun: Record) -> Iterator[Record]:
    """Yield what an item that passed has proved by one of its marks."""
    begun = replace(begun, engine=mark.kwargs["engine"], level=mark.kwargs.get("level", "refused"))
    if mark.name == "refuses":
        for found in _stated(item, "refused"):
            what, message = found if isinstance(found, list) else (str(found), "")
            yield replace(begun, family=what, reason=" ".join(message.split()))
    elif "family" in mark.kwargs:
        families = mark.kwargs["family"]
        family = families[begun.case] if isinstance(families, Mapping) else families
        yield replace(begun, family=family, kv_format=mark.kwargs["kv_format"])
    elif isinstance(example := _parameters(item).get(mark.kwargs.get("of", "")), CacheExample):
        yield record_of(begun, example.made_up())
    else:
        for text in _stated(item, "description"):
            yield record_of(begun, description_from_json(str(text)))


def _stated(item: pytest.Item, name: str) -> list[object]:
    return [value for key, value in item.user_properties if key == name]
