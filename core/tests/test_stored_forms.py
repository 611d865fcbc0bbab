"""What wrappers stored in one release is right in the next: golden vectors of what they give the store in them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from stored_forms import FINGERPRINT, FORMS, Recorder, batch_of, object_key, written_as

from kvlinker.device import HostAccess
from kvlinker.store import ReadRequest, ReadStatus

GOLDEN: dict[str, dict[str, str]] = json.loads(
    (Path(__file__).parent / "golden" / "forms.json").read_text("utf-8")
)


@pytest.mark.parametrize("name", FORMS)
def test_t1_what_an_earlier_release_has_stored_is_read(name: str) -> None:
    form, golden, inner = FORMS[name], GOLDEN[name], Recorder()
    stored = np.frombuffer(bytes.fromhex(golden["bytes"]), dtype=np.uint8).reshape(1, -1).copy()
    key, fingerprint = bytes.fromhex(golden["key"]), bytes.fromhex(golden["fingerprint"])
    batch = batch_of(stored, key=key, fingerprint=fingerprint)
    inner.write([batch], HostAccess(), may_publish=lambda: True)
    rows = np.zeros((1, form.object_bytes), dtype=np.uint8)
    request = ReadRequest(
        keys=(object_key(),), object_bytes=form.object_bytes, fingerprint=FINGERPRINT
    )

    store = form.wrap(inner)
    with store.open_read(request) as session:
        statuses = session.read(batch_of(rows).plan, HostAccess())
    store.close()

    assert statuses == (ReadStatus.OK,)
    assert rows.tobytes() == form.content.tobytes()


@pytest.mark.parametrize("name", FORMS)
def test_k1_what_is_stored_now_is_called_and_told_apart_as_before(name: str) -> None:
    written, golden = written_as(FORMS[name]), GOLDEN[name]

    assert written["key"] == golden["key"]
    assert written["fingerprint"] == golden["fingerprint"]
