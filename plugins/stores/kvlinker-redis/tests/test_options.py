"""Options: what is not known is refused by name, and no password is ever shown."""

from __future__ import annotations

from traceback import format_exception

import pytest

import kvlinker_redis
from kvlinker.errors import ContractError
from kvlinker.secret_references import SecretReference
from kvlinker_redis import RedisStoreOptions
from kvlinker_redis.address import Address

URL = "redis://127.0.0.1:6379/0"
HIDDEN = "hunter2"


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("redis://cache.example", ("cache.example", 6379, "", 0, False)),
        ("rediss://cache.example:6380/3", ("cache.example", 6380, "", 3, True)),
        ("redis://[::1]:7000/", ("::1", 7000, "", 0, False)),
        ("unix:///run/redis.sock", ("", 6379, "/run/redis.sock", 0, False)),
        ("unix:///run/redis.sock?db=2", ("", 6379, "/run/redis.sock", 2, False)),
    ],
)
def test_a_url_says_where_the_server_is(url: str, place: tuple[str, int, str, int, bool]) -> None:
    address = Address.of_url(url)

    found = (address.host, address.port, address.socket_path, address.database, address.has_tls)
    assert found == place
    assert (address.username, address.password) == (None, None)


@pytest.mark.parametrize(
    ("url", "username", "reference"),
    [
        ("redis://kv:${env:PW}@host", "kv", SecretReference(kind="env", name="PW")),
        ("redis://:${env:PW}@host", None, SecretReference(kind="env", name="PW")),
        (
            "rediss://a%40b:${file:/run/pw}@host",
            "a@b",
            SecretReference(kind="file", name="/run/pw"),
        ),
        ("unix://kv:${env:PW}@/run/redis.sock", "kv", SecretReference(kind="env", name="PW")),
    ],
)
def test_a_url_says_who_asks_and_where_the_password_is(
    url: str, username: str | None, reference: SecretReference
) -> None:
    address = Address.of_url(url)

    assert (address.username, address.password) == (username, reference)


@pytest.mark.parametrize(
    "url",
    [
        f"redis://kv:{HIDDEN}@host",
        f"rediss://:{HIDDEN}@host:6380/0",
        f"redis://kv:{HIDDEN}@more@host",
        f"redis://kv:${{env:A}}{HIDDEN}@host",
        f"unix://kv:{HIDDEN}@/run/redis.sock",
        f"unix:///run/redis.sock?password={HIDDEN}",
        f"unix:///run/redis.sock?db=1&password={HIDDEN}",
        f"unix://:{HIDDEN}/run/redis.sock",
        f"redis://host/0?password={HIDDEN}",
        f"redis://kv:{HIDDEN}",
        f"redis://[{HIDDEN}]:6379",
    ],
)
def test_a_password_in_plain_text_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ContractError) as caught:
        kvlinker_redis.open_store({"url": url})

    assert HIDDEN not in "".join(format_exception(caught.value))


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://host", "must begin with redis://"),
        ("host:6379", "must begin with redis://"),
        ("redis://", "must be a host"),
        ("redis://host:port", "names no server"),
        ("redis://host/name", "number of a database, got 'name'"),
        ("redis://host/0?ssl_cert_reqs=none", "give all else as options"),
        ("unix://run/redis.sock", "unix:///path/of/socket"),
        ("unix:///run/redis.sock?timeout=3", "unix:///path/of/socket"),
    ],
)
def test_a_url_of_another_form_is_refused(url: str, reason: str) -> None:
    with pytest.raises(ContractError, match=reason):
        RedisStoreOptions(url=url)


def test_options_show_no_user() -> None:
    options = RedisStoreOptions(url="rediss://somebody:${env:PW}@host:1/0")

    assert options.url == "rediss://host:1/0"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({}, "option 'url' is needed"),
        ({"url": 5}, "url must be a text, got a int"),
        ({"url": URL, "time_to_live": 5}, "unknown option 'time_to_live'; known are"),
        ({"url": URL, "ttl_second": 5}, "did you mean 'ttl_seconds'"),
        ({"url": URL, "address": "x"}, "unknown option 'address'"),
        ({"url": URL, "cluster": "yes"}, "cluster must be true or false, got 'yes'"),
        ({"url": "redis://host/1", "cluster": True}, "database 0 alone, got redis://host:6379/1"),
        ({"url": "unix:///run/redis.sock", "cluster": True}, "a cluster has host, port"),
        ({"url": URL, "prefix": ""}, "prefix must be 1 to 64"),
        ({"url": URL, "prefix": "a*b"}, "prefix must be 1 to 64"),
        ({"url": URL, "prefix": "a{b}"}, "prefix must be 1 to 64"),
        ({"url": URL, "prefix": "a~b"}, "prefix must be 1 to 64"),
        ({"url": URL, "ttl_seconds": 0}, "ttl_seconds must be a whole positive number"),
        ({"url": URL, "ttl_seconds": 1.5}, "ttl_seconds must be a whole positive number"),
        ({"url": URL, "ttl_seconds": True}, "ttl_seconds must be a whole positive number"),
        ({"url": URL, "answer_seconds": 0}, "answer_seconds must be a positive number"),
        ({"url": URL, "retry_seconds": float("nan")}, "retry_seconds must be a positive number"),
        ({"url": URL, "pause_seconds": "1"}, "pause_seconds must be a positive number"),
        ({"url": URL, "connect_seconds": 1e9}, "connect_seconds must be a positive number"),
        ({"url": URL, "call_bytes": 10}, "redis store: call_bytes must be at least 65536, got 10"),
        ({"url": URL, "call_bytes": "8"}, "redis store: call_bytes must be at least 65536, got 8"),
        ({"url": "rediss://host", "ca_file": "/nowhere"}, "ca_file must name a file"),
        ({"url": URL, "ca_file": __file__}, "ca_file is for TLS alone"),
        ({"url": "rediss://host", "key_file": __file__}, "is the key of no certificate"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(config: dict[str, object], reason: str) -> None:
    with pytest.raises(ContractError, match=reason):
        kvlinker_redis.open_store(config)


def test_bytes_may_have_a_unit() -> None:
    options = RedisStoreOptions.of_config({"url": URL, "call_bytes": "16MiB"})

    assert options.call_bytes == 16 << 20
