"""Loads every installed plugin in a process of its own, so that one that hangs or kills it is reported.

What a plugin prints is not shown; what became of it comes back through a file, since a plugin may close,
fill or inherit any pipe.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from kvlinker.admission import admit
from kvlinker.discovery import inspect_plugin
from kvlinker.errors import ContractError
from kvlinker.installed import PluginRecord, PluginStatus, available
from kvlinker.registry import LoadOutcome, PluginRegistry

__all__ = ["probe_plugins", "report_plugin"]

_CHILD = """
import json, os, sys
sys.path[:] = json.loads(sys.argv[1])
from kvlinker.probing import report_plugin
report_plugin(sys.argv[2], sys.argv[3])
os._exit(0)  # a thread that the plugin started would keep the process
"""
_PARALLEL = 4
"""Probes at once: each is mostly the start of an interpreter."""


def probe_plugins(
    deadline_s: float,
    *,
    allow: Iterable[str] | None = None,
    deny: Iterable[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> tuple[PluginRecord, ...]:
    """Return what becomes of every installed plugin when it is loaded, each in a process with a deadline.

    A plugin that a list disables is not started.

    Args:
        deadline_s: seconds that one plugin may take, the start of Python included.
        allow: as for `load_plugins`.
        deny: as for `load_plugins`.
        environ: as for `load_plugins`.

    Raises:
        ContractError: the deadline is not positive.
        PluginNotFoundError: a list holds a name that no distribution provides.
    """
    if deadline_s <= 0:
        msg = f"the deadline of a probe must be positive, got {deadline_s} s"
        raise ContractError(msg)
    variables = os.environ if environ is None else environ
    records = admit(available(), allow=allow, deny=deny, environ=variables)
    with ThreadPoolExecutor(max_workers=_PARALLEL) as pool:
        probed = pool.map(partial(_probe, deadline_s=deadline_s), records)
        return PluginRegistry(LoadOutcome(record=record) for record in probed).records


def _probe(record: PluginRecord, *, deadline_s: float) -> PluginRecord:
    if record.status is PluginStatus.DISABLED:
        return record
    with TemporaryDirectory(prefix="kvlinker-probe-") as folder:
        answer = Path(folder) / "answer.json"
        reason = _run(record, answer, deadline_s)
        if answer.exists():
            return _from_json(record, answer.read_text(encoding="utf-8"))
    return replace(record, status=PluginStatus.BROKEN, reason=reason)


def _run(record: PluginRecord, answer: Path, deadline_s: float) -> str:
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            _CHILD,
            json.dumps([str(path) for path in sys.path]),
            _key(record),
            str(answer),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        code = child.wait(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        # The session's id is the child's, which was not waited for yet, so it names no other process.
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        return f"loading it did not finish within {deadline_s:g} s; it hangs when it is imported"
    if code < 0:
        return f"loading it killed the process with {signal.Signals(-code).name}"
    return f"loading it ended the process with exit code {code}"


def report_plugin(key: str, path: str) -> None:
    """Load one plugin in this process and write what became of it; the child's half of a probe."""
    for record in available():
        if _key(record) == key:
            found = inspect_plugin(record)
            partial_file = Path(f"{path}.partial")
            partial_file.write_text(_to_json(found), encoding="utf-8")
            partial_file.replace(path)
            return


def _key(record: PluginRecord) -> str:
    return json.dumps([record.kind.value, record.distribution, record.name, record.module])


def _to_json(record: PluginRecord) -> str:
    return json.dumps(
        {
            "status": record.status.value,
            "reason": record.reason,
            "summary": record.summary,
            "traceback": record.traceback,
            "api_version": "" if record.api_version is None else str(record.api_version),
        }
    )


def _from_json(record: PluginRecord, text: str) -> PluginRecord:
    found: dict[str, str] = json.loads(text)
    return replace(
        record,
        status=PluginStatus(found["status"]),
        reason=found["reason"],
        summary=found["summary"],
        traceback=found["traceback"],
        api_version=int(found["api_version"]) if found["api_version"] else None,
    )
