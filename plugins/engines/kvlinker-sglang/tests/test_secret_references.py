"""Secrets are read from where they lie, at the last moment."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvlinker.errors import ContractError
from kvlinker_sglang.secret_references import SecretReference, resolve_secrets


def test_an_environment_variable_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_SECRET", "s3")

    assert SecretReference(env="KV_SECRET").read() == "s3"


def test_a_file_is_read_without_its_last_line_end(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("s3 cr3t\n", encoding="utf-8")

    assert SecretReference(file=str(file)).read() == "s3 cr3t"


def test_a_file_is_found_in_the_home_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "secret").write_text("s3", encoding="utf-8")

    assert SecretReference(file="~/secret").read() == "s3"
    with pytest.raises(ContractError, match="file ~no such user/s cannot be read: RuntimeError"):
        SecretReference(file="~no such user/s").read()


@pytest.mark.parametrize("content", [None, ""])
def test_a_secret_that_is_not_there_is_refused_by_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    file = tmp_path / "secret"
    if content is None:
        monkeypatch.delenv("KV_SECRET", raising=False)
    else:
        monkeypatch.setenv("KV_SECRET", content)
        file.write_text(content, encoding="utf-8")

    with pytest.raises(ContractError, match="environment variable KV_SECRET"):
        SecretReference(env="KV_SECRET").read()
    with pytest.raises(ContractError, match=str(file)):
        SecretReference(file=str(file)).read()


@pytest.mark.parametrize("given", [{}, {"env": "A", "file": "/b"}])
def test_a_reference_names_one_place(given: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="one of them"):
        SecretReference.model_validate(given)


def test_references_are_replaced_wherever_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_SECRET", "s3")
    reference = {"env": "KV_SECRET"}

    options = resolve_secrets({"a": reference, "b": [{"c": reference}, 1], "d": {"e": {"f": "g"}}})

    assert options == {"a": "s3", "b": [{"c": "s3"}, 1], "d": {"e": {"f": "g"}}}


def test_a_secret_that_is_handed_to_a_store_is_known_as_one_and_not_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KV_SECRET", "hunter2")

    options = resolve_secrets({"settings": {"secret_access_key": {"env": "KV_SECRET"}}})

    assert options == {"settings": {"secret_access_key": "hunter2"}}
    assert "hunter2" not in repr(options)
