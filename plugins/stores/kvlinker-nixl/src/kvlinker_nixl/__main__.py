"""The command `python -m kvlinker_nixl serve`: memory that other processes keep pages in."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

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
    # Blocked before any thread is made, and so in each of them: a signal then waits for `sigwait`. With a handler it
    # could come before `pause`, or to another thread than the one that waits, and nothing would end.
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)
    try:
        server = PeerServer(parse_bytes(given.capacity), host=given.host, port=given.port)
    except (KVLinkerError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    host, port = server.address
    sys.stdout.write(f"{amount(parse_bytes(given.capacity))} at {host}:{port}\n")
    sys.stdout.flush()
    signal.sigwait(_ENDS)
    server.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
