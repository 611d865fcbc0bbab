"""Draws a load over time and the life of an offload, in the order in which a real linker did what is drawn.

Who waited for whom is recorded from the run; how long a step looks is chosen, so that it can be read.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from draw_page import FONT, INK, PAPER, SHADE, text

from kvlinker.device import DeviceAccess, HostAccess, HostObjects
from kvlinker.keys import KeyNamespace
from kvlinker.linker import Linker
from kvlinker.plans import TransferPlan
from kvlinker.store import Hold, ObjectKey, WriteBatch, WriteStatus
from kvlinker.testing import FakePools, Family, HostEvent, MemoryStore, fake_group, page_keys

LAYERS, PAGES = 4, 3
BLUE, RED, GREEN, GOLD, GREY = "#4477aa", "#ee6677", "#228833", "#ccbb44", "#bbbbbb"
LEFT, UNIT, LANE, BAR, TOP = 150, 36, 54, 30, 78
LIMIT_S = 30.0


# ---- what happened ----------------------------------------------------------------------------


class Recorder:
    """Notes what the threads of a run do, in the order in which they do it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.notes: list[str] = []

    def note(self, what: str) -> None:
        """Add a note."""
        with self._lock:
            self.notes.append(what)

    def expect_order(self, *notes: str) -> None:
        """Refuse to draw what did not happen.

        Raises:
            RuntimeError: a note is missing, or came before the one in front of it.
        """
        places = [self.notes.index(note) for note in notes if note in self.notes]
        if len(places) < len(notes) or places != sorted(places):
            msg = f"{notes} did not happen in this order: {self.notes}"
            raise RuntimeError(msg)


class RecordingAccess(DeviceAccess):
    """Access to pools in host memory that notes which buffers are copied."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._access = HostAccess()

    def copy_out(self, plan: TransferPlan, host: HostObjects) -> None:
        """See DeviceAccess."""
        self._access.copy_out(plan, host)
        self._recorder.note(f"copied {plan.pool}")

    def copy_in(self, plan: TransferPlan, host: HostObjects) -> None:
        """See DeviceAccess."""
        self._access.copy_in(plan, host)
        for label in plan.spans.labels:
            self._recorder.note(f"filled {label}")


class RecordedHold(Hold):
    """A hold whose release is noted, once."""

    def __init__(self, hold: Hold, recorder: Recorder) -> None:
        self._hold = hold
        self._recorder: Recorder | None = recorder

    @property
    def present(self) -> tuple[bool, ...]:
        """See Hold."""
        return self._hold.present

    def release(self) -> None:
        """See Hold."""
        self._hold.release()
        if self._recorder is not None:
            self._recorder.note("released")
            self._recorder = None


class RecordingStore(MemoryStore):
    """A store in memory that notes what it is asked."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def hold(self, keys: Sequence[ObjectKey], *, seconds: float) -> Hold:
        """See Store."""
        hold = super().hold(keys, seconds=seconds)
        self._recorder.note("held")
        return RecordedHold(hold, self._recorder)

    def exists(self, keys: Sequence[ObjectKey]) -> tuple[bool, ...]:
        """See Store."""
        self._recorder.note("asked what exists")
        return super().exists(keys)

    def write(
        self,
        batches: Sequence[WriteBatch],
        memory: DeviceAccess,
        *,
        may_publish: Callable[[], bool],
    ) -> tuple[tuple[WriteStatus, ...], ...]:
        """See Store."""

        def ask() -> bool:
            self._recorder.note("asked to publish")
            return may_publish()

        answer = super().write(batches, memory, may_publish=ask)
        for batch in batches:
            self._recorder.note(f"visible {batch.plan.pool}")
        return answer


@dataclass(frozen=True, kw_only=True)
class Run:
    """A linker over a small DSA cache, and what is noted of it."""

    recorder: Recorder = field(default_factory=Recorder)
    pools: FakePools = field(default_factory=lambda: fake_group(Family.DSA))

    def linker(self, store: MemoryStore) -> Linker:
        """Return a linker whose copies are noted."""
        namespace = KeyNamespace(model_id="small", producer="pictures")
        device = RecordingAccess(self.recorder)
        return Linker(self.pools.group, store, namespace, device=device)


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until something holds.

    Raises:
        TimeoutError: it does not for too long.
    """
    end = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > end:
            msg = f"nothing happened for {LIMIT_S} s"
            raise TimeoutError(msg)
        time.sleep(0.001)


def run_offload() -> Run:
    """Offload three pages that a forward is still writing."""
    run = Run()
    note = run.recorder.note
    linker = run.linker(RecordingStore(run.recorder))
    pages = run.pools.page_transfers(page_keys(PAGES), {"kv": range(PAGES)})
    run.pools.fill(pages)
    written = HostEvent()
    note("forward began")
    if linker.offload(pages, ready=[written]):
        note("accepted")
    wait_for(lambda: written.queries)
    if not linker.num_completed_offloads():
        note("not complete")
    note("forward ended")
    written.set()
    wait_for(linker.num_completed_offloads)
    if linker.pop_completed_offload():
        note("stored")
    linker.close()
    run.recorder.expect_order(
        *("forward began", "accepted", "not complete", "forward ended", "asked what exists"),
        *("copied indexer", "copied kv", "asked to publish", "visible indexer", "visible kv"),
        "stored",
    )
    return run


def run_load() -> Run:
    """Load three pages, and compute every layer as soon as it is there."""
    run = Run()
    note, keys = run.recorder.note, page_keys(PAGES)
    store = RecordingStore(run.recorder)
    linker = run.linker(store)
    pages = run.pools.page_transfers(keys, {"kv": range(PAGES)})
    run.pools.fill(pages)
    linker.offload(pages)
    wait_for(linker.num_completed_offloads)
    run.pools.memory.poison()
    run.recorder.notes.clear()
    if linker.lookup("request", run.pools.lookup_transfers(keys)) == [1, 2, 3]:
        note("found")
    if linker.load("request", run.pools.page_transfers(keys, {"kv": (9, 4, 7)})):
        note("queued")
    batch = linker.start_layer_wise_loading()
    linker.layer_done_counter.set_consumer(batch)
    for layer in range(LAYERS):
        linker.layer_done_counter.wait_until(layer)
        note(f"computed {layer}")
    if linker.finish_layer_wise_loading(batch):
        note("landed")
    linker.close()
    for layer, labels in enumerate(labels_of(run.pools)):
        for label in labels:
            run.recorder.expect_order("held", "queued", f"filled {label}", f"computed {layer}")
    run.recorder.expect_order("held", "found", "queued", "landed")
    run.recorder.expect_order("computed 3", "landed")
    run.recorder.expect_order("filled latent[3]", "released")
    return run


def labels_of(pools: FakePools) -> Iterator[list[str]]:
    """Yield for each layer the labels of its spans, in the order in which they are loaded."""
    for layer in range(LAYERS):
        yield [
            entry.components[0][position].label
            for entry in pools.group.entries
            for position in entry.layer_mapping.get(layer, ())
        ]


TIP = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
    f'orient="auto"><path d="M 0 0 L 8 4 L 0 8 z" fill="{INK}"/></marker></defs>'
)
"""The tip of an arrow."""

# ---- pictures ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Step:
    """A bar of a lane."""

    lane: str
    words: str
    start: float
    end: float
    colour: str

    @property
    def ink(self) -> str:
        """Colour of the words: light on dark bars, dark on light ones."""
        return PAPER if self.colour in {BLUE, GREEN} else INK


def bar(step: Step, lanes: Sequence[str]) -> Iterator[str]:
    """Draw a step."""
    x, y = LEFT + step.start * UNIT, TOP + lanes.index(step.lane) * LANE
    width = (step.end - step.start) * UNIT
    yield (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{BAR}" rx="3" '
        f'fill="{step.colour}" stroke="{INK}" stroke-width="0.8"/>'
    )
    yield text(
        x + width / 2, y + 19, step.words, size=12, colour=step.ink, more='text-anchor="middle"'
    )


def arrow(lanes: Sequence[str], at: float, source: str, target: str, words: str = "") -> str:
    """Draw an arrow between two lanes at a time."""
    first, last = lanes.index(source), lanes.index(target)
    down = last > first
    start = TOP + first * LANE + (BAR if down else 0)
    end = TOP + last * LANE + (-2 if down else BAR + 2)
    x = LEFT + at * UNIT
    line = (
        f'<path d="M {x:g} {start:g} V {end:g}" stroke="{INK}" stroke-width="1.4" '
        f'marker-end="url(#tip)"/>'
    )
    return line + (text(x + 6, (start + end) / 2 + 4, words, size=11) if words else "")


def picture(
    title: str, subtitle: str, lanes: Sequence[str], steps: Sequence[Step], arrows: Sequence[str]
) -> str:
    """Return the picture of some lanes."""
    width = LEFT + max(step.end for step in steps) * UNIT + 24
    height = TOP + len(lanes) * LANE + 22
    foot = height - 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" {FONT} role="img">',
        f"<title>{title}</title>",
        TIP,
        f'<rect width="{width:g}" height="{height:g}" fill="{PAPER}"/>',
        text(20, 30, title, size=17, more='font-weight="bold"'),
        text(20, 50, subtitle),
    ]
    for number, lane in enumerate(lanes):
        y = TOP + number * LANE
        parts.append(
            f'<rect x="{LEFT - 6}" y="{y - 6}" width="{width - LEFT - 12:g}" height="{BAR + 12}" '
            f'fill="{SHADE}" opacity="0.5"/>'
        )
        parts.append(text(20, y + 19, lane))
    parts += [line for step in steps for line in bar(step, lanes)]
    parts += arrows
    parts += [
        f'<path d="M {LEFT} {foot} H {LEFT + 60}" stroke="{INK}" stroke-width="1" marker-end="url(#tip)"/>',
        text(LEFT + 68, foot + 4, "time", size=11),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


SCHEDULER, FORWARD, LINKER, STORE, MEMORY = "scheduler", "forward", "linker", "store", "pages"
COMPUTES, FILLS = 3.0, {"latent": 3.0, "index_k": 1.5}
"""How long steps look."""


def draw_load() -> str:
    """Return the picture of a load, whose layers are computed as they land."""
    run, lanes = run_load(), (SCHEDULER, FORWARD, LINKER, STORE)
    steps = [
        Step(lane=SCHEDULER, words="lookup", start=0, end=1.6, colour=GOLD),
        Step(lane=SCHEDULER, words="load", start=1.6, end=2.8, colour=GOLD),
        Step(lane=SCHEDULER, words="start", start=2.8, end=4, colour=GOLD),
    ]
    arrows = [arrow(lanes, 0.8, SCHEDULER, STORE, ""), arrow(lanes, 3.9, SCHEDULER, LINKER)]
    filled = computed = 4.0
    for layer, labels in enumerate(labels_of(run.pools)):
        for label in labels:
            role = label.partition("[")[0]
            begin, filled = filled, filled + FILLS[role]
            words, colour = ("kv", BLUE) if role == "latent" else ("index", GREEN)
            steps.append(
                Step(lane=LINKER, words=f"{words} {layer}", start=begin, end=filled, colour=colour)
            )
        if filled > computed:
            steps.append(Step(lane=FORWARD, words="wait", start=computed, end=filled, colour=PAPER))
        arrows.append(arrow(lanes, filled, LINKER, FORWARD))
        begin = max(filled, computed)
        computed = begin + COMPUTES
        steps.append(
            Step(lane=FORWARD, words=f"layer {layer}", start=begin, end=computed, colour=RED)
        )
    steps += [
        Step(
            lane=STORE,
            words="objects are held: nothing evicts what lookup has promised",
            start=0.8,
            end=filled,
            colour=GREY,
        ),
        Step(
            lane=SCHEDULER,
            words="finish",
            start=computed,
            end=computed + 1.6,
            colour=GOLD,
        ),
    ]
    subtitle = (
        "Layers 0 and 2 have index keys. The forward waits for its own layer, and for no other."
    )
    return picture("A load over time", subtitle, lanes, steps, arrows)


def draw_offload() -> str:
    """Return the picture of an offload from the offer to its completion."""
    run_offload()
    lanes = (FORWARD, MEMORY, SCHEDULER, LINKER, STORE)
    steps = [
        Step(lane=FORWARD, words="writes the pages' KV", start=0, end=8.6, colour=RED),
        Step(lane=FORWARD, words="goes on with other pages", start=8.6, end=24.6, colour=RED),
        Step(lane=MEMORY, words="being written", start=0, end=8.6, colour=PAPER),
        Step(lane=MEMORY, words="kept: neither freed nor changed", start=8.6, end=23, colour=GREY),
        Step(lane=MEMORY, words="free", start=23, end=24.6, colour=PAPER),
        Step(lane=SCHEDULER, words="offload", start=1.4, end=3.4, colour=GOLD),
        Step(lane=SCHEDULER, words="0 complete", start=5, end=7.6, colour=GOLD),
        Step(lane=SCHEDULER, words="pop: stored", start=20.6, end=23, colour=GOLD),
        Step(lane=LINKER, words="waits for the event", start=3.4, end=8.6, colour=PAPER),
        Step(lane=LINKER, words="what exists?", start=8.6, end=11.4, colour=BLUE),
        Step(lane=LINKER, words="copy index", start=11.4, end=13.8, colour=GREEN),
        Step(lane=LINKER, words="copy kv", start=13.8, end=16, colour=BLUE),
        Step(lane=LINKER, words="may publish?", start=16, end=18.6, colour=BLUE),
        Step(lane=LINKER, words="done", start=18.6, end=20.6, colour=BLUE),
        Step(lane=STORE, words="visible: index first, then kv", start=18.6, end=24.6, colour=GREY),
    ]
    arrows = [
        arrow(lanes, 3.3, SCHEDULER, LINKER),
        arrow(lanes, 8.6, FORWARD, LINKER, "event"),
        arrow(lanes, 9.2, LINKER, STORE),
        arrow(lanes, 18.7, LINKER, STORE),
        arrow(lanes, 20.6, LINKER, SCHEDULER),
    ]
    subtitle = "It is accepted at once, reads a page after its event alone, and completes when it will read no more."
    return picture("The life of an offload", subtitle, lanes, steps, arrows)


PICTURES: Mapping[str, Callable[[], str]] = {"load.svg": draw_load, "offload.svg": draw_offload}

if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for name, draw in PICTURES.items():
        (folder / name).write_text(draw(), encoding="utf-8")
