"""Tests of references to secrets: a text is one or none, and a secret is read anew each time."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvlinker.errors import StoreError
from kvlinker.secret_references import RevealedSecret, SecretReference


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("${env:KV_PW}", SecretReference(kind="env", name="KV_PW")),
        ("${file:/run/secrets/pw}", SecretReference(kind="file", name="/run/secrets/pw")),
        ("hunter2", None),
        ("${env:KV_PW}2", None),
        ("${env:}", None),
        ("${vault:KV_PW}", None),
        ("", None),
    ],
)
def test_a_text_is_a_reference_or_none(text: str, reference: SecretReference | None) -> None:
    assert SecretReference.of_text(text) == reference


def test_a_secret_is_read_anew_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "password"
    path.write_text("first\n")
    monkeypatch.setenv("KV_PW", "one")
    references = (
        SecretReference(kind="file", name=str(path)),
        SecretReference(kind="env", name="KV_PW"),
    )
    before = [reference.read("the password") for reference in references]

    path.write_text("second\r\n")
    monkeypatch.setenv("KV_PW", "two")

    assert before == ["first", "one"]
    assert [reference.read("the password") for reference in references] == ["second", "two"]


@pytest.mark.parametrize("kind", ["env", "file"])
def test_a_secret_that_is_not_there_is_an_error_that_says_where_it_should_be(
    kind: str, tmp_path: Path
) -> None:
    name = str(tmp_path / "NOWHERE")

    with pytest.raises(StoreError, match=f"the password's .*{name}"):
        SecretReference(kind=kind, name=name).read("the password")


def test_a_file_that_is_no_text_is_an_error_that_shows_none_of_it(tmp_path: Path) -> None:
    path = tmp_path / "binary"
    path.write_bytes(b"hunter2\xff\xfe")

    with pytest.raises(StoreError, match="it is no UTF-8 text") as caught:
        SecretReference(kind="file", name=str(path)).read("the password")

    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("value", "reference"),
    [
        ("${env:KV_PW}", SecretReference(kind="env", name="KV_PW")),
        ({"env": "KV_PW"}, SecretReference(kind="env", name="KV_PW")),
        ({"file": "/run/secrets/pw"}, SecretReference(kind="file", name="/run/secrets/pw")),
        ("plain", None),
        ({"env": ""}, None),
        ({"env": 5}, None),
        ({"variable": "KV_PW"}, None),
        ({"env": "A", "file": "B"}, None),
        ({}, None),
        (5, None),
    ],
)
def test_a_value_is_a_reference_in_either_form_or_none(
    value: object, reference: SecretReference | None
) -> None:
    assert SecretReference.of_value(value) == reference


def test_a_secret_that_was_read_is_a_text_and_shows_nothing() -> None:
    words = "open sesame"

    secret = RevealedSecret(words)

    assert secret == words
    assert words not in repr({"password": secret})
