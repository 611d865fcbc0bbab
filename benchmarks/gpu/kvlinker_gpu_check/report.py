"""Runs all checks on a lab and reports what they found."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import MappingProxyType

from kvlinker.errors import KVLinkerError
from kvlinker_gpu_check.bandwidth import measure_bandwidth
from kvlinker_gpu_check.checks import check_bytes, check_overlap, check_pinned, check_staging
from kvlinker_gpu_check.findings import CheckFailedError, Finding
from kvlinker_gpu_check.lab import Lab
from kvlinker_gpu_check.layouts import FOLDER, Layout, layouts
from kvlinker_gpu_check.order_checks import (
    check_layers_arrive,
    check_load_waits,
    check_offload_waits,
)
from kvlinker_gpu_check.torch_lab import CudaTools, TorchLab

__all__ = ["CHECKS", "main", "markdown", "run_checks"]

CHECKS: Mapping[str, Callable[[Lab, Layout], None]] = MappingProxyType(
    {
        "bytes of objects and of all pool memory": check_bytes,
        "staging is pinned and bounded": check_staging,
        "loads from pinned shared memory": check_pinned,
        "copies run beside a kernel": check_overlap,
        "an offload waits for its event": check_offload_waits,
        "a load waits for its event": check_load_waits,
        "a layer is there when it is reported": check_layers_arrive,
    }
)
EXAMPLES = FOLDER.parents[3] / "examples" / "descriptions"
MEASURED = ("deepseek-v3.2", "deepseek-v4-flash", "llama-3.1-8b")
EXAMPLE_PAGES = 1024
"""Pages of the described pools."""


def run_checks(lab: Lab, chosen: Iterable[Layout]) -> Iterator[Finding]:
    """Yield what each check finds on each layout."""
    for layout in chosen:
        for name, check in CHECKS.items():
            yield _outcome(name, check, lab, layout)


def _outcome(name: str, check: Callable[[Lab, Layout], None], lab: Lab, layout: Layout) -> Finding:
    try:
        check(lab, layout)
    except CheckFailedError as error:
        return Finding(check=name, layout=layout.name, problem=str(error))
    except (KVLinkerError, RuntimeError) as error:
        problem = f"{type(error).__name__}: {error}"
        return Finding(check=name, layout=layout.name, problem=problem)
    return Finding(check=name, layout=layout.name)


def markdown(lab: Lab, findings: Sequence[Finding], seconds: float) -> str:
    """Return the lines for docs/performance.md."""
    checked = [finding for finding in findings if not finding.figure]
    wrong = [finding for finding in checked if finding.problem]
    passed = f"{len(checked) - len(wrong)} of {len(checked)} checks passed"
    lines = [
        f"`benchmarks/gpu/check` on {lab.name}, in {seconds:.0f} s: {passed}.",
        "",
        "| what | pages | bandwidth |",
        "| --- | --- | --- |",
    ]
    lines += [f"| {f.check} | {f.layout} | {f.figure} |" for f in findings if f.figure]
    lines += [""] * bool(wrong)
    lines += [f"* **wrong**: {f.check}, {f.layout}: {f.problem}" for f in wrong]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the device and print what was found; 0 where nothing is wrong, 1 otherwise, 2 without a device."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", type=int, default=0, help="number of the CUDA device")
    parser.add_argument("--markdown", type=Path, default=None, help="file for the report's lines")
    parsed = parser.parse_args(arguments)
    try:
        lab = TorchLab(CudaTools(parsed.device))
    except (KVLinkerError, RuntimeError) as error:
        print(f"no device to check: {error}")
        return 2
    return report(lab, parsed.markdown)


def report(lab: Lab, path: Path | None) -> int:
    """Run everything on a lab, print each finding, and write the lines of a report."""
    start = time.perf_counter()
    findings = []
    for finding in chain(run_checks(lab, layouts()), _bandwidth(lab)):
        print(finding, flush=True)
        findings.append(finding)
    lines = markdown(lab, findings, time.perf_counter() - start)
    print(f"\n{lines}")
    if path is not None:
        path.write_text(lines + "\n")
    return 1 if any(finding.problem for finding in findings) else 0


def _bandwidth(lab: Lab) -> Iterator[Finding]:
    for name in MEASURED:
        layout = Layout.load(EXAMPLES / f"{name}.json", pages=EXAMPLE_PAGES)
        yield from measure_bandwidth(lab, layout)
