"""The check of a device passes on one that does right, and each of its parts fails on one that does wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import make_layouts
import numpy as np
import pytest
from gpu_stand_ins import OpaqueLab, PinnedPlaces, cpu_lab

from kvlinker.description import DescribeRequest
from kvlinker.description_json import description_to_json
from kvlinker.device import DeviceAccess, HostObjects, HostPin
from kvlinker.errors import DeviceCopyError
from kvlinker.plans import TransferPlan
from kvlinker.testing import HostMemory, OpaqueMemory
from kvlinker_gpu_check.bandwidth import measure_bandwidth
from kvlinker_gpu_check.findings import CheckFailedError, Finding
from kvlinker_gpu_check.lab import Lab
from kvlinker_gpu_check.layouts import FOLDER, Layout, layouts
from kvlinker_gpu_check.report import CHECKS, main, markdown, run_checks
from kvlinker_transformers.describe import describe_pools

LAYOUTS = {layout.name: layout for layout in layouts()}
BYTES, STAGING, PINNED, OVERLAP, OFFLOAD_WAITS, LOAD_WAITS, LAYERS = CHECKS
SMALL = LAYOUTS["mha-token-major"]


def check(name: str, lab: Lab, layout: Layout = SMALL) -> None:
    CHECKS[name](lab, layout)


class WrongAccess(DeviceAccess):
    """Does what the access behind it does."""

    def __init__(self, access: DeviceAccess, memory: OpaqueMemory) -> None:
        self._access = access
        self.memory = memory

    def copy_out(self, plan: TransferPlan, host: HostObjects) -> None:
        self._access.copy_out(plan, host)

    def copy_in(self, plan: TransferPlan, host: HostObjects) -> None:
        self._access.copy_in(plan, host)

    @property
    def pins_host(self) -> bool:
        return self._access.pins_host

    def pin_host(self, address: int, size: int) -> HostPin | None:
        return self._access.pin_host(address, size)

    def close(self) -> None:
        self._access.close()


class ForgetsLastPageOut(WrongAccess):
    def copy_out(self, plan: TransferPlan, host: HostObjects) -> None:
        kept = list(range(plan.num_pages - 1))
        self._access.copy_out(plan.select(kept), _some(host, kept))


class ForgetsLastPageIn(WrongAccess):
    def copy_in(self, plan: TransferPlan, host: HostObjects) -> None:
        kept = list(range(plan.num_pages - 1))
        self._access.copy_in(plan.select(kept), _some(host, kept))


class MixesPagesUp(WrongAccess):
    def copy_in(self, plan: TransferPlan, host: HostObjects) -> None:
        self._access.copy_in(plan, _some(host, list(reversed(range(plan.num_pages)))))


class CopiesLater(WrongAccess):
    """Returns before a load has landed; the next copy brings it to an end."""

    def __init__(self, access: DeviceAccess, memory: OpaqueMemory) -> None:
        super().__init__(access, memory)
        self._late: list[tuple[TransferPlan, HostObjects]] = []

    def copy_in(self, plan: TransferPlan, host: HostObjects) -> None:
        late, self._late = self._late, [(plan, host)]
        for copy in late:
            self._access.copy_in(*copy)


class WritesOneByteMore(WrongAccess):
    def copy_in(self, plan: TransferPlan, host: HostObjects) -> None:
        self._access.copy_in(plan, host)
        first = plan.expand()
        behind = np.array([first.address[0] + first.size[0]])
        self.memory.scatter(behind, ~self.memory.gather(behind, 1))


def _some(host: HostObjects, pages: list[int]) -> HostObjects:
    return HostObjects(span=host.span, slots=host.slots[pages], first_offset=host.first_offset)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_l13_every_check_passes_on_an_access_that_does_right(layout: Layout) -> None:
    findings = list(run_checks(OpaqueLab(), [layout]))

    assert [finding.check for finding in findings] == list(CHECKS)
    assert [finding.problem for finding in findings] == [""] * len(CHECKS)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_l13_every_check_passes_on_torch_tensors_through_the_cuda_access(layout: Layout) -> None:
    findings = list(run_checks(cpu_lab(), [layout]))

    assert [finding.problem for finding in findings] == [""] * len(CHECKS)


@pytest.mark.parametrize(
    "wrong",
    [ForgetsLastPageOut, ForgetsLastPageIn, MixesPagesUp, CopiesLater, WritesOneByteMore],
)
def test_wrong_bytes_are_found(wrong: type[WrongAccess]) -> None:
    with pytest.raises(CheckFailedError, match=r"\d+ of \d+ bytes are wrong, the first at \d+"):
        check(BYTES, OpaqueLab(wrap=wrong))


@pytest.mark.parametrize("wrong", [ForgetsLastPageIn, MixesPagesUp, WritesOneByteMore])
def test_wrong_bytes_from_pinned_memory_are_found(wrong: type[WrongAccess]) -> None:
    with pytest.raises(CheckFailedError, match=r"\d+ of \d+ bytes are wrong, the first at \d+"):
        check(PINNED, OpaqueLab(wrap=wrong))


@pytest.mark.parametrize(
    ("places", "problem"),
    [
        (PinnedPlaces(refuses=True), "shared memory of pool kv cannot be pinned"),
        (PinnedPlaces(keeps=True), "shared memory of pool kv was released and is still pinned"),
    ],
)
def test_memory_that_is_not_pinned_or_stays_so_is_found(places: PinnedPlaces, problem: str) -> None:
    with pytest.raises(CheckFailedError, match=problem):
        check(PINNED, OpaqueLab(pinned=places))


def test_memory_that_the_device_does_not_know_as_pinned_is_found() -> None:
    class PinsNothing(PinnedPlaces):
        def pin(self, address: int, size: int) -> None:
            pass

        def unpin(self, address: int) -> None:
            pass

    with pytest.raises(CheckFailedError, match="was pinned, and the device does not say so"):
        check(PINNED, OpaqueLab(pinned=PinsNothing()))


def test_b111_staging_that_is_not_pinned_is_found() -> None:
    with pytest.raises(CheckFailedError, match="4 of 4 staging buffers are not pinned"):
        check(STAGING, OpaqueLab(staging=lambda buffer: (buffer[0], False)))


def test_l13_staging_beyond_its_bound_is_found() -> None:
    with pytest.raises(CheckFailedError, match="of 65600 B, at most 32800 B were asked"):
        check(STAGING, OpaqueLab(staging=lambda buffer: (2 * buffer[0], True)))


def test_copies_that_wait_for_a_kernel_of_another_stream_are_found() -> None:
    class Synchronizes(WrongAccess):
        def copy_in(self, plan: TransferPlan, host: HostObjects) -> None:
            lab.synchronize()
            super().copy_in(plan, host)

    lab = OpaqueLab(wrap=Synchronizes)

    with pytest.raises(CheckFailedError, match="only after the kernel of another stream had ended"):
        check(OVERLAP, lab)


def test_copies_that_move_nothing_are_no_overlap() -> None:
    class MovesNothing(WrongAccess):
        def copy_out(self, plan: TransferPlan, host: HostObjects) -> None:
            pass

        copy_in = copy_out

    with pytest.raises(CheckFailedError, match="no page of pool kv was copied out"):
        check(OVERLAP, OpaqueLab(wrap=MovesNothing))


def test_l7_an_offload_that_overtakes_a_kernel_is_found() -> None:
    with pytest.raises(CheckFailedError, match="stored before the kernel had written it"):
        check(OFFLOAD_WAITS, OpaqueLab(lying_events=True))


def test_l5_a_load_that_overtakes_a_kernel_is_found() -> None:
    with pytest.raises(CheckFailedError, match="as a kernel saw it that the load had to wait for"):
        check(LOAD_WAITS, OpaqueLab(lying_events=True))


def test_a_load_that_brings_wrong_bytes_is_found() -> None:
    with pytest.raises(CheckFailedError, match=r"bytes are wrong.*|loaded"):
        check(LOAD_WAITS, OpaqueLab(wrap=MixesPagesUp))


def test_l4_a_layer_that_is_reported_too_early_is_found() -> None:
    with pytest.raises(CheckFailedError, match="after layer 0 was reported"):
        check(LAYERS, OpaqueLab(wrap=CopiesLater))


def test_a_failed_check_is_a_finding_and_the_others_run() -> None:
    findings = list(run_checks(OpaqueLab(lying_events=True), [SMALL]))

    wrong = [finding.check for finding in findings if finding.problem]
    assert [finding.check for finding in findings] == list(CHECKS)
    assert wrong == [OVERLAP, OFFLOAD_WAITS, LOAD_WAITS]


def test_an_error_of_the_device_is_a_finding() -> None:
    class Fails(WrongAccess):
        def copy_out(self, plan: TransferPlan, host: HostObjects) -> None:
            del plan, host
            msg = "illegal address"
            raise DeviceCopyError(msg)

    findings = {f.check: f.problem for f in run_checks(OpaqueLab(wrap=Fails), [SMALL])}

    assert findings[BYTES] == "DeviceCopyError: illegal address"
    assert findings[OFFLOAD_WAITS] == "an offload completed without storing"
    assert findings[STAGING] == findings[LOAD_WAITS] == ""


def test_bandwidth_is_a_share_of_a_plain_copy() -> None:
    page = SMALL.place(HostMemory()).group.entries[0].page_bytes

    findings = list(measure_bandwidth(OpaqueLab(), SMALL, pages=2, plain_bytes=4 * page))

    assert [finding.check for finding in findings] == [
        "load, alone",
        "load, beside kernels",
        "load from pinned slots, alone",
        "load from pinned slots, beside kernels",
        "offload, alone",
        "offload, beside kernels",
    ]
    assert {finding.layout for finding in findings} == {"mha-token-major, 2 pages"}
    assert {finding.figure for finding in findings} == {
        "0.50 of a plain pinned copy (0.0 of 0.0 GB/s)"
    }


def test_bandwidth_is_measured_on_torch_tensors_too() -> None:
    findings = list(measure_bandwidth(cpu_lab(), SMALL, pages=2, plain_bytes=1 << 16))

    assert all("of a plain pinned copy" in finding.figure for finding in findings)


def test_the_report_has_every_figure_and_everything_that_is_wrong() -> None:
    findings = [
        Finding(check="bytes", layout="mha"),
        Finding(check="order", layout="dsa", problem="overtaken"),
        Finding(check="load, alone", layout="dsa, 8 pages", figure="0.90"),
    ]

    lines = markdown(OpaqueLab(), findings, 12.3)

    assert lines.splitlines() == [
        "`benchmarks/gpu/check` on nothing, in 12 s: 1 of 2 checks passed.",
        "",
        "| what | pages | bandwidth |",
        "| --- | --- | --- |",
        "| load, alone | dsa, 8 pages | 0.90 |",
        "",
        "* **wrong**: order, dsa: overtaken",
    ]


def test_without_a_device_the_check_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = main(["--device", "99"])

    assert outcome == 2
    assert "no device to check: " in capsys.readouterr().out


def test_the_script_needs_nothing_installed_but_what_core_and_torch_need(tmp_path: Path) -> None:
    for missing in ("transformers", "importlib_metadata"):
        (tmp_path / f"{missing}.py").write_text("raise ImportError(__name__)")
    command = [sys.executable, str(FOLDER.parents[1] / "check"), "--device", "99"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}

    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)

    assert (done.returncode, done.stderr) == (2, "")
    assert done.stdout.startswith("no device to check: ")


def test_the_layouts_are_those_of_the_reference_engine() -> None:
    made = {
        name: description_to_json(describe_pools(pools, DescribeRequest(page_size=pools.page_size)))
        for name, pools in make_layouts.engine_pools().items()
    }

    kept = {path.stem: path.read_text().rstrip("\n") for path in FOLDER.glob("*.json")}
    assert made == kept
    assert {layout.description.family for layout in LAYOUTS.values()} == {
        "mha",
        "mla",
        "dsa",
        "deepseek_v4",
    }


def test_a_layout_grows_by_whole_pages_and_keeps_its_spare_rows() -> None:
    layout = LAYOUTS["deepseek-v4"]

    few, many = (layout.place(HostMemory(), pages=pages) for pages in (9, 20))

    rows = {span.label: span.rows for span in many.spans}
    assert rows["c4_state[0]"] == 20 * 8 + 1
    assert rows["swa_kv[0]"] == 20
    assert few.group.fingerprint == many.group.fingerprint


def test_a_stream_of_the_lab_refuses_pools_of_another() -> None:
    lab, other = cpu_lab(), OpaqueLab().pools()
    span = SMALL.place(other).spans[0]

    with pytest.raises(TypeError, match="takes its own pools, got OpaquePools"):
        lab.stream().write(other, span, 0, bytes(span.row_bytes))
