"""Object stores under a soak: a server that dies, hangs and loses connections, and a directory without one."""

from __future__ import annotations

from itertools import count
from pathlib import Path

from http_proxy import Answer, Asked, Proxy
from s3_server import BUCKET, S3Server, settings_for

from kvlinker.testing.soak import Outage, SoakTarget

__all__ = ["soaked_directory", "soaked_s3"]

_EVERY = 3


def soaked_s3(server: S3Server, proxy: Proxy) -> SoakTarget:
    """Return a store on a server, and what happens to it.

    The server dies and freezes, answers are errors, and connections are cut in the middle of a body.

    Args:
        server: holds the objects.
        proxy: between the store and the server; it lives as long as the soak.
    """
    return SoakTarget(
        module="kvlinker_s3",
        config={
            "url": f"s3://{BUCKET}",
            "prefix": "soak",
            "settings": settings_for(proxy.port),
            "connect_seconds": 1.0,
            "answer_seconds": 3.0,
            "request_seconds": 6.0,
            "retry_seconds": 0.4,
            "pause_seconds": 0.1,
            "concurrency": 4,
        },
        outages=(
            Outage(name="killed", begin=server.kill, end=server.start, seconds=(0.6, 1.5)),
            Outage(
                name="cut",
                begin=lambda: _cut(proxy),
                end=lambda: _pass_on(proxy),
                seconds=(0.5, 2.0),
            ),
            Outage(name="frozen", begin=server.freeze, end=server.thaw, seconds=(0.5, 4.0)),
            Outage(
                name="errors",
                begin=lambda: _fail(proxy),
                end=lambda: _pass_on(proxy),
                seconds=(0.5, 2.0),
            ),
        ),
        # More than a call's deadline, its tries and the pause after them.
        grace_seconds=8.0,
        # The library's own threads close connections.
        lets_go_late=True,
    )


def soaked_directory(folder: Path) -> SoakTarget:
    """Return a store in a directory, which nothing can happen to."""
    config = {"url": folder.as_uri(), "prefix": "soak", "concurrency": 4}
    return SoakTarget(module="kvlinker_s3", config=config, lets_go_late=True)


def _cut(proxy: Proxy) -> None:
    numbers = count()

    def cut_some(asked: Asked, answer: Answer) -> None:
        if next(numbers) % _EVERY == 0:
            answer.cut, answer.is_reset = len(answer.body) // 2, asked.method == "PUT"

    proxy.after = cut_some


def _fail(proxy: Proxy) -> None:
    numbers = count()

    def refuse_some(_: Asked) -> Answer | None:
        return Answer(status=503) if next(numbers) % _EVERY else None

    proxy.before = refuse_some


def _pass_on(proxy: Proxy) -> None:
    proxy.before = proxy.after = None
    proxy.asked.clear()  # of a soak, there are very many
