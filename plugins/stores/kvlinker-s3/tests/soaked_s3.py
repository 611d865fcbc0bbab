"""Object stores under a soak: a server that dies, hangs and loses connections, and a directory without one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from http_proxy import Answer, Asked, Proxy
from s3_server import BUCKET, S3Server, settings_for

from kvlinker.testing.soak import Outage

__all__ = ["SoakedDirectory", "SoakedS3"]

_EVERY = 3


@dataclass(frozen=True, kw_only=True)
class SoakedS3:
    """The adapter of the object store on a server, for `kvlinker.testing.soak`."""

    server: S3Server
    proxy: Proxy
    """Between the store and the server; it lives as long as the soak."""
    module: str = "kvlinker_s3"
    grace_seconds: float = 8.0
    """More than a call's deadline, its tries and the pause after them."""
    lets_go_late: bool = True
    """The library's own threads close connections."""

    @property
    def config(self) -> Mapping[str, object]:
        """Impatient."""
        return {
            "url": f"s3://{BUCKET}",
            "prefix": "soak",
            "settings": settings_for(self.proxy.port),
            "connect_seconds": 1.0,
            "answer_seconds": 3.0,
            "request_seconds": 6.0,
            "retry_seconds": 0.4,
            "pause_seconds": 0.1,
            "concurrency": 4,
        }

    @property
    def outages(self) -> Sequence[Outage]:
        """Death, a freeze, answers that are errors, and connections that are cut in the middle of a body."""
        server = self.server
        return (
            Outage(name="killed", begin=server.kill, end=server.start, seconds=(0.6, 1.5)),
            Outage(name="cut", begin=self._cut, end=self._pass_on, seconds=(0.5, 2.0)),
            Outage(name="frozen", begin=server.freeze, end=server.thaw, seconds=(0.5, 4.0)),
            Outage(name="errors", begin=self._fail, end=self._pass_on, seconds=(0.5, 2.0)),
        )

    def _cut(self) -> None:
        numbers = count()

        def cut_some(asked: Asked, answer: Answer) -> None:
            if next(numbers) % _EVERY == 0:
                answer.cut, answer.is_reset = len(answer.body) // 2, asked.method == "PUT"

        self.proxy.after = cut_some

    def _fail(self) -> None:
        numbers = count()

        def refuse_some(_: Asked) -> Answer | None:
            return Answer(status=503) if next(numbers) % _EVERY else None

        self.proxy.before = refuse_some

    def _pass_on(self) -> None:
        self.proxy.before = self.proxy.after = None
        self.proxy.asked.clear()  # of a soak, there are very many


@dataclass(frozen=True, kw_only=True)
class SoakedDirectory:
    """The adapter of the object store in a directory, which nothing can happen to."""

    folder: Path
    module: str = "kvlinker_s3"
    grace_seconds: float = 1.0
    lets_go_late: bool = True
    outages: Sequence[Outage] = ()

    @property
    def config(self) -> Mapping[str, object]:
        """A folder of its own."""
        return {"url": self.folder.as_uri(), "prefix": "soak", "concurrency": 4}
