"""The command `python -m kvlinker_nixl serve`: memory that other processes keep pages in."""

from __future__ import annotations

import argparse
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvlinker.errors import KVLinkerError
from kvlinker.quantities import amount, parse_bytes
from kvlinker_nixl.peer_server import PeerServer

__all__ = ["main"]

_ENDS = (signal.SIGINT, signal.SIGTERM)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal says that it is over; 1 where that cannot be begun."""
    parser = argparse.ArgumentParser(prog="python -m kvlinker_nixl", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="lend memory to stores with the backend UCX")
    serve.add_argument("--capacity", required=True, help="bytes of memory, such as 8GiB")
    serve.add_argument("--host", default="127.0.0.1", help="whoever reaches it can read every page")
    serve.add_argument("--port", default=7301, type=int)
    given = parser.parse_args(arguments)
    with _signals() as told:
        try:
            server = PeerServer(parse_bytes(given.capacity), host=given.host, port=given.port)
        except (KVLinkerError, OSError) as error:
            sys.stderr.write(f"{error}\n")
            return 1
        host, port = server.address
        sys.stdout.write(f"{amount(parse_bytes(given.capacity))} at {host}:{port}\n")
        sys.stdout.flush()
        told.recv(1)
        server.close()
    return 0


@contextmanager
def _signals() -> Iterator[socket.socket]:
    """Give a socket that a byte comes from for each signal which says that it is over.

    Any thread may get a signal, also one that was there before a mask could be set, such as those of numpy: the byte
    is written in that thread, and is there for whoever reads it later. The handler itself has nothing to do.
    """
    told, teller = socket.socketpair()
    with told, teller:
        teller.settimeout(0)  # a signal waits for nobody
        before = signal.set_wakeup_fd(teller.fileno())
        handlers = {number: signal.signal(number, lambda *_: None) for number in _ENDS}
        try:
            yield told
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(before)


if __name__ == "__main__":
    sys.exit(main())
