"""Options: what is not known is refused by name, and no secret is ever shown."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvlinker_s3
from kvlinker.errors import ContractError, StoreError
from kvlinker.secret_references import RevealedSecret, SecretReference
from kvlinker_s3 import S3StoreOptions
from kvlinker_s3.client import open_client

URL = "s3://kv-pages"
HIDDEN = "hunter2"


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("s3://bucket", "S3Store"),
        ("s3a://bucket/folder/deeper", "S3Store"),
        ("gs://bucket/folder", "GCSStore"),
        ("abfss://container@account.dfs.core.windows.net/folder", "AzureStore"),
    ],
)
def test_a_url_says_which_service_is_spoken_to(url: str, kind: str) -> None:
    settings = {"skip_signature": True}

    client = open_client(S3StoreOptions(url=url, settings=settings))

    assert type(client).__name__ == kind


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://host/bucket", "url must begin with one of s3://, s3a://, gs://"),
        ("bucket", "url must begin with one of"),
        ("memory:///", "url must begin with one of"),
        ("s3://", "url must be like"),
        ("file://host/folder", "url must be like"),
        ("file:///", "url must be like"),
        ("s3://bucket?region=x", "give all else as settings"),
        ("s3://[bucket", "url names no place"),
        (f"s3://key:{HIDDEN}@bucket", "give all else as settings"),
        (f"s3://{HIDDEN}@bucket", "must name no user"),
    ],
)
def test_a_url_of_another_form_is_refused(url: str, reason: str) -> None:
    with pytest.raises(ContractError, match=reason) as caught:
        S3StoreOptions(url=url)

    assert HIDDEN not in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"secret_access_key": HIDDEN},
        {"AWS_SECRET_ACCESS_KEY": HIDDEN},
        {"session_token": HIDDEN},
        {"sas_key": HIDDEN},
        {"azure_storage_account_key": HIDDEN},
        {"client_secret": HIDDEN},
        {"service_account_key": HIDDEN},
        {"bearer_token": HIDDEN},
        {"endpoint": f"https://kv:{HIDDEN}@storage.example"},
        {"secret_access_key": "${env:A}" + HIDDEN},
    ],
)
def test_a_secret_in_plain_text_is_refused_and_not_repeated(settings: dict[str, str]) -> None:
    with pytest.raises(ContractError, match="holds a secret in plain text") as caught:
        kvlinker_s3.open_store({"url": URL, "settings": settings})

    assert HIDDEN not in str(caught.value)


def test_options_show_no_settings_and_know_references() -> None:
    settings: dict[str, str | bool] = {
        "access_key_id": "kv",
        "secret_access_key": "${env:KV_SECRET}",
        "session_token": "${file:/run/token}",
        "aws_web_identity_token_file": "/run/identity",
        "virtual_hosted_style_request": False,
    }

    options = S3StoreOptions(url=URL, settings=settings)

    assert options.settings == {
        **settings,
        "secret_access_key": SecretReference(kind="env", name="KV_SECRET"),
        "session_token": SecretReference(kind="file", name="/run/token"),
    }
    assert "settings" not in repr(options)


def test_a_reference_may_be_written_as_sglang_configurations_write_it() -> None:
    settings = {"secret_access_key": {"env": "KV_SECRET"}, "session_token": {"file": "/run/token"}}

    options = S3StoreOptions.of_config({"url": URL, "settings": settings})

    assert options.settings == {
        "secret_access_key": SecretReference(kind="env", name="KV_SECRET"),
        "session_token": SecretReference(kind="file", name="/run/token"),
    }


def test_a_secret_that_somebody_read_from_a_reference_is_no_plain_text_and_is_not_shown() -> None:
    hidden = RevealedSecret(HIDDEN)
    settings = {"access_key_id": "kv", "secret_access_key": hidden, "request_payer": hidden}

    options = S3StoreOptions.of_config({"url": URL, "settings": settings})

    with pytest.raises(ContractError, match=r"settings were refused: .*<") as caught:
        open_client(options)
    assert HIDDEN not in f"{caught.value} {options!r} {dict(options.settings)!r}"


@pytest.mark.parametrize(
    "secret", [HIDDEN, f"{{\n  {HIDDEN}\n}}", f"{HIDDEN} " * 100, f"{HIDDEN}\t\t"]
)
def test_a_secret_that_the_library_cannot_use_is_not_repeated(
    monkeypatch: pytest.MonkeyPatch, secret: str
) -> None:
    monkeypatch.setenv("KV_SECRET", secret)
    options = S3StoreOptions(url=URL, settings={"request_payer": "${env:KV_SECRET}"})

    with pytest.raises(ContractError, match=r"settings were refused: .*<request_payer>") as caught:
        open_client(options)

    assert HIDDEN not in str(caught.value)
    assert caught.value.__cause__ is None


def test_an_empty_secret_leaves_what_the_library_says_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KV_SECRET", "")
    options = S3StoreOptions(url=URL, settings={"request_payer": "${env:KV_SECRET}"})

    with pytest.raises(ContractError, match=r'were refused: Generic Config error: failed to .*""'):
        open_client(options)


def test_a_secret_that_is_not_there_is_an_error_that_says_where_it_should_be(
    tmp_path: Path,
) -> None:
    settings = {"secret_access_key": f"${{file:{tmp_path / 'nowhere'}}}"}

    with pytest.raises(StoreError, match=r"secret_access_key's file .*nowhere cannot be read"):
        kvlinker_s3.open_store({"url": URL, "settings": settings})


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "taken").write_bytes(b"")

    with pytest.raises(StoreError, match="the folder cannot be used"):
        kvlinker_s3.open_store({"url": (tmp_path / "taken" / "folder").as_uri()})


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({}, "option 'url' is needed"),
        ({"url": 5}, "url must be a text, got a int"),
        ({"url": URL, "bucket": "x"}, "unknown option 'bucket'; known are"),
        ({"url": URL, "retry_second": 5}, "did you mean 'retry_seconds'"),
        ({"url": URL, "prefix": ""}, "prefix must be 1 to 256"),
        ({"url": URL, "prefix": "a/../b"}, "prefix must be 1 to 256"),
        ({"url": URL, "prefix": "/a"}, "prefix must be 1 to 256"),
        ({"url": URL, "prefix": "a//b"}, "prefix must be 1 to 256"),
        ({"url": URL, "prefix": "a*"}, "prefix must be 1 to 256"),
        ({"url": URL, "prefix": 5}, "prefix must be 1 to 256"),
        ({"url": URL, "settings": ["region"]}, "settings must be names with values, got a list"),
        ({"url": URL, "settings": {"region": 5}}, "setting 'region' must be a text, true or false"),
        ({"url": URL, "settings": {"regon": "x"}}, "'regon' is not valid for store 'S3'"),
        ({"url": "file:///tmp", "settings": {"region": "x"}}, "settings are for object storage"),
        ({"url": URL, "ca_file": "/nowhere"}, "ca_file must name a file"),
        ({"url": "file:///tmp", "ca_file": __file__}, "ca_file is for servers alone"),
        ({"url": URL, "ca_file": __file__}, "settings were refused: No certificates found"),
        ({"url": URL, "concurrency": 0}, "s3 store: concurrency must be at least 1, got 0"),
        ({"url": URL, "concurrency": 2.0}, "concurrency must be an integer, got 2.0"),
        ({"url": URL, "call_bytes": 10}, "s3 store: call_bytes must be at least 1048576, got 10"),
        (
            {"url": URL, "write_bytes": "8 of them"},
            "write_bytes: '8 of them' is not a number of bytes",
        ),
        ({"url": URL, "answer_seconds": 0}, "answer_seconds must be a positive number"),
        ({"url": URL, "request_seconds": True}, "request_seconds must be a positive number"),
        ({"url": URL, "retry_seconds": float("nan")}, "retry_seconds must be a positive number"),
        ({"url": URL, "pause_seconds": "1"}, "pause_seconds must be a positive number"),
        ({"url": URL, "connect_seconds": 1e9}, "connect_seconds must be a positive number"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(config: dict[str, object], reason: str) -> None:
    with pytest.raises(ContractError, match=reason):
        kvlinker_s3.open_store(config)


def test_bytes_may_have_a_unit() -> None:
    options = S3StoreOptions.of_config({"url": URL, "call_bytes": "16MiB", "write_bytes": "2GiB"})

    assert (options.call_bytes, options.write_bytes) == (16 << 20, 2 << 30)
