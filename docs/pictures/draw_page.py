"""Draws one page of a small DSA cache, in memory and in a store, from the group that its plugin lays out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from kvlinker.description import IndexerKind, KVCacheDescription, LayerFacts, LogicalPool
from kvlinker.discovery import load_plugins
from kvlinker.installed import PluginKind
from kvlinker.pools import DevicePoolGroup
from kvlinker.selection import build_group, select_strategy
from kvlinker.spans import BufferSpan

PAGES, PAGE_SIZE, SHOWN_PAGE = 6, 64, 5
COLOURS = ("#4477aa", "#ee6677", "#228833")
"""One for each layer."""
FONT = 'font-family="Helvetica, Arial, sans-serif"'
PAPER, INK, SHADE = "#ffffff", "#222222", "#e6e6e6"

LEFT, TOP, CELL, ROW, GAP = 150, 112, 34, 36, 66
OBJECT_LEFT, OBJECT_WIDTH, HEADER = 500, 210, 18
WIDTH, HEIGHT = 860, 370


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One range: a part of a page, in a buffer and in an object."""

    layer: int
    buffer_y: int
    """Where its buffer is drawn."""
    size: int
    offset: int
    """In the object's payload."""


def small_cache() -> KVCacheDescription:
    """Return a DSA cache of three layers, of which the second selects by the first one's index."""
    kv, index = PAGES * PAGE_SIZE, PAGE_SIZE * (128 + 4)
    start = 1 << 32

    def span(place: int, rows: int, row_bytes: int) -> BufferSpan:
        base = start * (place + 1) if rows else 0
        return BufferSpan(base_ptr=base, rows=rows, row_bytes=row_bytes, row_stride=row_bytes)

    owners = (True, False, True)
    return KVCacheDescription(
        family="dsa",
        page_size=PAGE_SIZE,
        buffers={
            "kv": tuple(span(layer, kv, 576 * 2) for layer in range(3)),
            "index_k": tuple(
                span(3 + i, PAGES if own else 0, index) for i, own in enumerate(owners)
            ),
        },
        layers=tuple(
            LayerFacts(
                layer=layer,
                global_layer=layer,
                indexer=IndexerKind.OWN if own else IndexerKind.SHARED,
            )
            for layer, own in enumerate(owners)
        ),
        logical_pools=(LogicalPool(name="kv", page_size=PAGE_SIZE),),
        facts={"kv_format": "bf16", "index_format": "fp8_e4m3fn_fp32_scale"},
    )


def lay_out(description: KVCacheDescription) -> DevicePoolGroup:
    """Return the group that the installed plugins make of it."""
    registry = load_plugins(kinds=(PluginKind.MODEL,))
    return build_group(select_strategy(description, registry), description)


def text(
    x: float, y: float, words: str, *, size: int = 13, colour: str = INK, more: str = ""
) -> str:
    """Return one line of text."""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}" {more}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, fill: str) -> str:
    """Return a rectangle."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" '
        f'fill="{fill}" stroke="{INK}" stroke-width="0.8"/>'
    )


def draw_buffers(group: DevicePoolGroup) -> Iterator[str]:
    """Draw every buffer as its pages, one of them in its layer's colour."""
    y = TOP
    for entry in group.entries:
        row = "page" if entry.rows_are_pages else "slot"
        size = entry.spans[0].row_bytes
        yield text(20, y - 10, f"entry {entry.name}: a row is a {row} of {size:,} B", size=12)
        for layer, positions in entry.layer_mapping.items():
            for position in positions:
                label = entry.components[0][position].label
                yield text(20, y + 19, f"layer {layer}: {label}", colour=COLOURS[layer])
                for page in range(PAGES):
                    colour = COLOURS[layer] if page == SHOWN_PAGE else PAPER
                    yield box(LEFT + page * CELL, y, CELL, 28, colour)
                y += ROW
        y += GAP


def pieces_of(group: DevicePoolGroup) -> Iterator[tuple[str, int, list[Piece]]]:
    """Yield each entry's name, object bytes and the ranges of the shown page."""
    y = TOP
    slots = list(range(SHOWN_PAGE * PAGE_SIZE, (SHOWN_PAGE + 1) * PAGE_SIZE))
    for entry in group.entries:
        ranges = entry.page_plan(entry.prepare_locations(slots)).expand()
        pieces = []
        for layer, size, offset in zip(
            entry.layer_mapping, ranges.size, ranges.offset, strict=True
        ):
            pieces.append(Piece(layer=layer, buffer_y=y, size=int(size), offset=int(offset)))
            y += ROW
        y += GAP
        yield entry.name, entry.page_bytes, pieces


def draw_objects(group: DevicePoolGroup) -> Iterator[str]:
    """Draw one object for each entry, and lines from the page's pieces to their places in it."""
    for name, size, pieces in pieces_of(group):
        top = pieces[0].buffer_y - 4
        yield text(OBJECT_LEFT, top - HEADER - 6, f"object of {name}: {size:,} B", size=12)
        yield box(OBJECT_LEFT, top - HEADER, OBJECT_WIDTH, HEADER, SHADE)
        yield text(OBJECT_LEFT + 8, top - 5, "header: checksums of the ranges", size=11)
        for piece in pieces:
            middle = piece.buffer_y + 14
            yield line(piece, middle)
            yield box(OBJECT_LEFT, middle - ROW / 2, OBJECT_WIDTH, ROW, COLOURS[piece.layer])
            words = f"{piece.size:,} B of layer {piece.layer}"
            yield text(OBJECT_LEFT + 8, middle + 5, words, size=12, colour=PAPER)
            right = OBJECT_LEFT + OBJECT_WIDTH + 10
            yield text(right, middle + 5, f"from offset {piece.offset:,}", size=12)


def line(piece: Piece, y: float) -> str:
    """Return a line from a piece in memory to its place in an object."""
    start = LEFT + (SHOWN_PAGE + 1) * CELL
    return (
        f'<path d="M {start:g} {y:g} H {OBJECT_LEFT:g}" stroke="{COLOURS[piece.layer]}" '
        f'stroke-width="2" stroke-dasharray="2 4"/>'
    )


def draw(group: DevicePoolGroup) -> str:
    """Return the picture."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {FONT} role="img">',
        "<title>One page of a DSA cache in memory and in a store</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{PAPER}"/>',
        text(20, 34, "In device memory", size=17, more='font-weight="bold"'),
        text(
            20,
            54,
            f"page {SHOWN_PAGE}: slots {SHOWN_PAGE * PAGE_SIZE} to {(SHOWN_PAGE + 1) * PAGE_SIZE - 1}",
        ),
        text(OBJECT_LEFT, 34, "In a store", size=17, more='font-weight="bold"'),
        text(OBJECT_LEFT, 54, "one object for each entry, under a key of its own"),
        *draw_buffers(group),
        *draw_objects(group),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    (folder / "page.svg").write_text(draw(lay_out(small_cache())), encoding="utf-8")
