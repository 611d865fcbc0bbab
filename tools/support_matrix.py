"""Write docs/support-matrix.md, and the records beside it, from what marked tests proved when they passed."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from distributions import ROOT
from support_records import RECORDS, Record, read_records, record_line

__all__ = ["DOCUMENT", "LEVELS", "main", "render"]

DOCUMENT = Path("docs", "support-matrix.md")
LEVELS = {
    "kit": "the conformance kit: layouts over memory of its own, page by page and byte by byte",
    "pool": "the engine's own pool objects: every byte of a page goes to other slots of other pools",
    "tree": "the engine's own prefix tree, allocators and pools, with a store behind them",
    "server": "servers over HTTP, restarted, that answer as without a store",
    "model": "logits of the model, bit for bit, in a process that restored its pages",
}
"""How it is proved, from the least to the most."""
_ENGINES = {"any": "Any engine", "sglang": "SGLang", "transformers": "transformers"}
_HEAD = """# Support matrix

What is moved and what is refused, as tests proved it that passed.
`make support-matrix` runs them and writes this page; a marked test fails where it proves something else.

| level | proved by |
|---|---|
"""


def render(records: Sequence[Record]) -> str:
    """Return the document.

    Raises:
        ValueError: a record would be in no table.
    """
    for record in records:
        _check_is_shown(record)
    levels = "".join(f"| {level} | {text} |\n" for level, text in LEVELS.items())
    tests = sorted({record.test for record in records})
    numbers = {test: f"T{number}" for number, test in enumerate(tests, 1)}
    sections = [f"{_HEAD}{levels}"]
    for engine, name in _ENGINES.items():
        found = [record for record in records if record.engine == engine]
        sections += [*_proofs(name, found, numbers), *_refusals(name, found, numbers)]
    listed = "".join(f"* {number}: `{test}`\n" for test, number in numbers.items())
    return "\n".join([*sections, f"## Tests\n\n{listed}"])


def _check_is_shown(record: Record) -> None:
    where = f"{record.test} {record.case}".rstrip()
    if record.engine not in _ENGINES:
        msg = f"{where}: no section for the engine {record.engine!r}; there are {sorted(_ENGINES)}"
        raise ValueError(msg)
    if record.level not in {"refused", *LEVELS}:
        msg = f"{where}: no column for the level {record.level!r}; there are {sorted(LEVELS)}"
        raise ValueError(msg)


def _proofs(name: str, records: Sequence[Record], numbers: dict[str, str]) -> Iterator[str]:
    proofs = [record for record in records if record.level != "refused"]
    levels = [level for level in LEVELS if any(record.level == level for record in proofs)]
    if not proofs:
        return
    heads = ["family", "KV", "beside", "facts", "draft", *levels]
    table = [f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}\n"]
    for row in sorted({_row(record) for record in proofs}):
        of_row = [record for record in proofs if _row(record) == row]
        cells = [_cell([one for one in of_row if one.level == level], numbers) for level in levels]
        table.append(_line([*(text or "none" for text in row), *cells]))
    yield f"## {name}\n\n{''.join(table)}"


def _row(record: Record) -> tuple[str, ...]:
    return record.family, record.kv_format, record.formats, record.facts, record.draft


def _cell(records: Sequence[Record], numbers: dict[str, str]) -> str:
    """Return the tests of a row at one level, each with its cases."""
    parts = []
    for test in sorted(
        {record.test for record in records}, key=lambda test: int(numbers[test][1:])
    ):
        cases = sorted({record.case for record in records if record.test == test} - {""})
        parts.append(f"{numbers[test]}: {', '.join(cases)}" if cases else numbers[test])
    return "; ".join(parts)


def _refusals(name: str, records: Sequence[Record], numbers: dict[str, str]) -> Iterator[str]:
    refusals = sorted(
        {(one.family, one.reason, numbers[one.test]) for one in records if one.level == "refused"}
    )
    if refusals:
        lines = "".join(_line([f"`{what}`", why, test]) for what, why, test in refusals)
        yield f"### {name}: refused\n\n| what | message | test |\n|---|---|---|\n{lines}"


def _line(cells: Sequence[str]) -> str:
    safe = (cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells)
    return f"| {' | '.join(safe)} |\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the records of each run, and write both files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="what --support-record wrote")
    runs = parser.parse_args(arguments).runs
    records = sorted({record for path in runs for record in read_records(path)})
    lines = "".join(f"{record_line(record)}\n" for record in records)
    (ROOT / RECORDS).write_text(lines, encoding="utf-8")
    (ROOT / DOCUMENT).write_text(render(records), encoding="utf-8")
    print(
        f"{len(records)} records of {len({record.test for record in records})} tests in {DOCUMENT}"
    )


if __name__ == "__main__":
    main()
