"""TLS: certificates are always checked, and whoever has none that fits is told so."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import OpenStore
from redis_server import RedisServer, free_port

from kvlinker.errors import StoreError
from kvlinker.store import ReadStatus
from kvlinker.testing.shelves import Shelf, object_keys

MakeServer = Callable[..., RedisServer]
OPENSSL = shutil.which("openssl")


@pytest.fixture(scope="module")
def openssl() -> str:
    """Give the path of openssl; where there is none, tests are counted as skipped, with this reason."""
    if OPENSSL is None:
        pytest.skip("openssl is not installed: apt-get install openssl")
    return OPENSSL


def make_certificate(openssl: str, folder: Path, name: str, *, host: str) -> tuple[str, str]:
    """Make a certificate that is signed by itself, and return its path and its key's."""
    certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
    command = [
        *(openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
        *("-nodes", "-days", "2", "-subj", f"/CN={name}", "-addext", f"subjectAltName={host}"),
        *("-keyout", str(key), "-out", str(certificate)),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return str(certificate), str(key)


@pytest.fixture(scope="module")
def certificates(
    openssl: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[str, str]]:
    """Give certificates: the server's own, one of another host, and a client's."""
    folder = tmp_path_factory.mktemp("certificates")
    hosts = {"server": "IP:127.0.0.1", "elsewhere": "DNS:cache.example", "client": "DNS:client"}
    return {
        name: make_certificate(openssl, folder, name, host=host) for name, host in hosts.items()
    }


def tls_server(
    make_server: MakeServer, certificate: tuple[str, str], *options: str
) -> tuple[RedisServer, str]:
    port = free_port()
    server = make_server(
        *("--tls-port", str(port), "--tls-cert-file", certificate[0]),
        *("--tls-key-file", certificate[1], *options),
    )
    return server, f"rediss://127.0.0.1:{port}/0"


def test_a_server_whose_certificate_signs_itself_is_trusted_by_whoever_names_it(
    make_server: MakeServer, open_store: OpenStore, certificates: dict[str, tuple[str, str]]
) -> None:
    certificate = certificates["server"]
    server, url = tls_server(make_server, certificate, "--tls-auth-clients", "no")
    shelf = Shelf(open_store(server, url=url, ca_file=certificate[0]))
    keys = object_keys(3)

    shelf.stock(keys)

    assert shelf.read(keys) == (ReadStatus.OK,) * 3


@pytest.mark.parametrize(
    ("certificate", "trusted", "reason"),
    [
        ("server", None, "self.signed certificate"),
        ("elsewhere", "elsewhere", "IP address mismatch"),
    ],
)
def test_a_certificate_that_nobody_vouches_for_or_of_another_host_is_refused(
    make_server: MakeServer,
    open_store: OpenStore,
    certificates: dict[str, tuple[str, str]],
    certificate: str,
    trusted: str | None,
    reason: str,
) -> None:
    own = certificates[certificate]
    server, url = tls_server(make_server, own, "--tls-auth-clients", "no")
    trust = {"ca_file": certificates[trusted][0]} if trusted else {}

    with pytest.raises(StoreError, match=f"the server refuses: .*{reason}.* as ca_file"):
        open_store(server, url=url, **trust)


def test_a_server_that_asks_for_a_certificate_gets_the_clients_own(
    make_server: MakeServer, open_store: OpenStore, certificates: dict[str, tuple[str, str]]
) -> None:
    own, (certificate, key) = certificates["server"], certificates["client"]
    server, url = tls_server(make_server, own, "--tls-ca-cert-file", certificate)
    trust = {"url": url, "ca_file": own[0]}

    with pytest.raises(StoreError, match="cannot be reached"):
        open_store(server, **trust)
    store = open_store(server, **trust, cert_file=certificate, key_file=key)

    assert store.exists(object_keys(1)) == (False,)


def test_a_server_without_tls_is_not_spoken_to_in_plain_text(
    server: RedisServer, open_store: OpenStore
) -> None:
    url = server.url.replace("redis://", "rediss://")

    with pytest.raises(StoreError, match=r"cannot be reached: .*redis:// where it does not"):
        open_store(server, url=url, connect_seconds=0.2, retry_seconds=0.05)
