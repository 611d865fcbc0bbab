"""`kvlinker doctor`: whether this environment, its plugins and a store are fit for use."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from kvlinker.cli.findings import (
    Finding,
    Level,
    disk_finding,
    environment_findings,
    limit_finding,
    plugin_findings,
    torch_finding,
)
from kvlinker.cli.plugins_command import plugin_form
from kvlinker.cli.screen import (
    FOUND_A_PROBLEM,
    plain_table,
    plugins_at_work,
    print_json,
    reporting_errors,
    screen,
)
from kvlinker.discovery import load_plugins
from kvlinker.errors import ContractError, KVLinkerError
from kvlinker.installed import PluginKind
from kvlinker.lanes import Lane
from kvlinker.probing import probe_plugins
from kvlinker.quantities import amount
from kvlinker.selftest import self_test
from kvlinker.store import Store, StoreStats
from kvlinker.stores.composition import compose

__all__ = ["examine"]

_STYLES = {Level.GOOD: "green", Level.NOTE: "yellow", Level.PROBLEM: "bold red"}


@reporting_errors
def examine(
    *,
    store: Annotated[
        str | None, typer.Option(metavar="NAME", help="Open this store and test it.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Option of the store; may be repeated."),
    ] = None,
    deadline: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="How long a plugin, torch or a store's test may take."
        ),
    ] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Look at the environment, the plugins and, if one is named, at a store.

    Exit code 1 if there is a problem.
    """
    options = option_values(option or ())
    if options and store is None:
        msg = f"--option {option[0] if option else ''} needs --store NAME"
        raise ContractError(msg)
    records = probe_plugins(deadline)
    with plugins_at_work():
        findings = [
            *environment_findings(),
            torch_finding(deadline),
            limit_finding(),
            *plugin_findings(records),
            *(store_findings(store, options, seconds=deadline) if store else ()),
        ]
    if as_json:
        print_json(
            {
                "findings": [
                    {"topic": found.topic, "level": found.level.value, "text": found.text}
                    for found in findings
                ],
                "plugins": [plugin_form(record) for record in records],
            }
        )
    else:
        _show(findings)
    if any(found.level is Level.PROBLEM for found in findings):
        raise typer.Exit(FOUND_A_PROBLEM)


def option_values(options: Sequence[str]) -> Mapping[str, object]:
    """Return the values of NAME=VALUE pairs; a value that is JSON is what it says, any other is text.

    Raises:
        ContractError: one is no such pair.

    >>> dict(option_values(["path=/srv/kv", "capacity=20GiB", "self_test=true"]))
    {'path': '/srv/kv', 'capacity': '20GiB', 'self_test': True}
    """
    values: dict[str, object] = {}
    for option in options:
        name, is_pair, text = option.partition("=")
        if not is_pair or not name:
            msg = f"--option takes NAME=VALUE, got {option!r}"
            raise ContractError(msg)
        try:
            values[name] = json.loads(text)
        except ValueError:
            values[name] = text
    return values


def store_findings(
    name: str, options: Mapping[str, object], *, seconds: float
) -> Iterator[Finding]:
    """Open a store, test it with one object of which nothing stays, and yield what was found.

    Args:
        name: of the store plugin.
        options: of the store.
        seconds: how long the test may take; all the rest, such as opening it, may take as long again.
    """
    examination = _StoreExamination(name, options, seconds=seconds)
    lane = Lane("doctor")
    task = lane.submit(examination.run)
    has_ended = task.wait(2 * seconds)
    yield from tuple(examination.findings)
    if has_ended:
        lane.close(0)
        return
    lane.abandon(task)  # it ends with this process, whatever the store's client hangs at
    text = f"{examination.step} has not ended within {2 * seconds:g} s; is its server up?"
    yield Finding(topic=examination.topic, level=Level.PROBLEM, text=text)


class _StoreExamination:
    """One look at a store, in a thread of its own: a client may hang at any step."""

    def __init__(self, name: str, options: Mapping[str, object], *, seconds: float) -> None:
        self.topic = f"test of {name}"
        self.step = "opening"
        self.findings: list[Finding] = []
        self._name, self._options, self._seconds = name, options, seconds

    def run(self) -> None:
        try:
            with closing(self._open()) as store:
                self._look_at(store)
                self.step = "closing"
        except (KVLinkerError, OSError) as error:
            what = "cannot be opened: " if self.step == "opening" else ""
            self._problem(f"{what}{error}")
        except Exception as error:  # noqa: BLE001  # a plugin may raise anything
            self._problem(
                f"{self.step}: {type(error).__name__}: {error}; its store plugin is at fault"
            )

    def _open(self) -> Store:
        registry = load_plugins(kinds=(PluginKind.STORE,))
        return compose(self._name, self._options).open(registry)

    def _look_at(self, store: Store) -> None:
        self.step = "looking at its figures"
        stats = store.stats()
        self.findings.append(Finding(topic=self.topic, text=_stats_text(stats)))
        self.step = "the self-test"
        self.findings.append(_test_finding(self.topic, store, self._seconds))
        path = self._options.get("path")
        if isinstance(path, str):
            self.findings.append(disk_finding(Path(path).expanduser(), stats))

    def _problem(self, text: str) -> None:
        self.findings.append(Finding(topic=self.topic, level=Level.PROBLEM, text=text))


def _stats_text(stats: StoreStats) -> str:
    capacity = stats.capacity_bytes
    bound = "" if capacity is None else f" of {amount(capacity)}"
    return f"{stats.objects:,} objects, {amount(stats.used_bytes)}{bound} taken"


def _test_finding(topic: str, opened: Store, seconds: float) -> Finding:
    report = self_test(opened, seconds=seconds)
    if report.problems:
        first = report.problems[0]
        text = f"the self-test failed at {first.name!r}: {first.problem}"
        return Finding(topic=topic, level=Level.PROBLEM, text=text)
    steps = ", ".join(f"{step.name} {step.seconds * 1e3:.1f} ms" for step in report.steps)
    return Finding(topic=topic, text=f"self-test passed: {steps}")


def _show(findings: Sequence[Finding]) -> None:
    console = screen()
    table = plain_table("", "what", text="found")
    for found in findings:
        table.add_row(Text(found.level.value, _STYLES[found.level]), found.topic, found.text)
    console.print(table)
    problems = sum(found.level is Level.PROBLEM for found in findings)
    console.print()
    if problems:
        count = "1 problem" if problems == 1 else f"{problems} problems"
        console.print(count, style="bold red")
    else:
        console.print("no problem found", style="bold green")
