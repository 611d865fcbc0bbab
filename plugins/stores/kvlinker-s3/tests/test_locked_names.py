"""A server that lets nobody write under a name, as one that is locked, fails that object and nothing else."""

from __future__ import annotations

import pytest
from http_proxy import Answer, Asked, proxy_to
from s3_server import OpenStore, S3Server

from kvlinker.store import ReadStatus, WriteStatus
from kvlinker.testing.shelves import Shelf, object_keys


@pytest.mark.parametrize("status", [409, 412])
def test_a_name_that_cannot_be_written_over_fails_and_is_not_tried_for_ever(
    server: S3Server, open_store: OpenStore, status: int
) -> None:
    locked, *others = object_keys(3)

    def refuse(asked: Asked) -> Answer | None:
        is_it = asked.method == "PUT" and asked.path.endswith(locked.hex()[-20:])
        return Answer(status=status, body=b"<Error><Code>Locked</Code></Error>") if is_it else None

    with proxy_to(server.port) as proxy:
        shelf = Shelf(open_store(proxy.port))
        proxy.before = refuse

        written = shelf.write([locked, *others])

        assert proxy.count("PUT") <= 4
        assert shelf.store.stats().counters["errors"] == 1
        assert shelf.read([locked, *others]) == (ReadStatus.MISS, ReadStatus.OK, ReadStatus.OK)
    assert written == (WriteStatus.FAILED, WriteStatus.WRITTEN, WriteStatus.WRITTEN)
