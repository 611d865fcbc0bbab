"""Options are refused by name before anything is opened, and say what to do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from kvlinker.errors import ContractError, StoreError
from kvlinker.secret_references import RevealedSecret
from kvlinker_nixl import Backend, NixlStoreOptions, open_nixl_store
from kvlinker_nixl.library import CALLS, load_client

FILE: Mapping[str, object] = {"backend": "POSIX", "path": "/kv", "capacity": "1GiB"}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "option 'backend' is needed"),
        ({"backend": "NFS"}, "backend must be one of"),
        ({"backend": "POSIX", "capacity": "1GiB"}, "needs option 'path'"),
        ({"backend": "POSIX", "path": "/kv"}, "needs option 'capacity'"),
        ({"backend": "UCX"}, "needs option 'server'"),
        ({"backend": "OBJ"}, "needs option 'bucket'"),
        ({**FILE, "pathh": 1}, "did you mean 'path'"),
        ({**FILE, "bucket": "b"}, "POSIX has no option 'bucket'"),
        ({"backend": "UCX", "server": "a:1", "path": "/kv"}, "UCX has no option 'path'"),
        ({"backend": "GDS", "path": "/kv", "capacity": "1GiB", "io": "aio"}, "no option 'io'"),
        ({**FILE, "capacity": "1 MiB"}, "capacity must be at least 2097152"),
        ({**FILE, "capacity": "much"}, "capacity: 'much' is not"),
        ({**FILE, "capacity": True}, "capacity must be a whole number of bytes"),
        ({**FILE, "path": 3}, "path must name a folder"),
        ({**FILE, "io": "dax"}, "io must be one of"),
        ({**FILE, "staged": "yes"}, "staged must be true or false"),
        ({**FILE, "direct_io": None}, "direct_io must be true or false"),
        ({**FILE, "direct_io": True, "staged": False}, "direct_io .* needs staged: true"),
        ({**FILE, "transfer_seconds": 0}, "transfer_seconds must be a positive number"),
        ({**FILE, "pause_seconds": True}, "pause_seconds must be a positive number"),
        ({**FILE, "max_regions": 0}, "max_regions must be at least 1"),
        ({**FILE, "call_bytes": 10}, "call_bytes must be at least 1048576"),
        ({"backend": "UCX", "server": "host"}, "server must be like"),
        ({"backend": "UCX", "server": "host:99999"}, "server must be like"),
        ({"backend": "OBJ", "bucket": "b", "staged": False}, "staged must be true"),
        ({"backend": "OBJ", "bucket": "b", "prefix": "../up"}, "prefix must be folders"),
        ({"backend": "OBJ", "bucket": "b", "region": 3}, "region must be a text"),
    ],
)
def test_what_is_wrong_is_refused_by_name(config: Mapping[str, object], words: str) -> None:
    with pytest.raises(ContractError, match=words):
        NixlStoreOptions.of_config(config)


def test_a_secret_in_plain_text_is_refused_and_not_repeated() -> None:
    with pytest.raises(ContractError, match="env:NAME") as caught:
        NixlStoreOptions.of_config({"backend": "OBJ", "bucket": "b", "secret_key": "hunter2"})

    assert "hunter2" not in str(caught.value)


def test_pages_go_through_host_memory_unless_the_backend_is_for_device_memory() -> None:
    ways = {
        backend: NixlStoreOptions(
            backend=backend, path=Path("/kv"), capacity=1 << 30, server="a:1", bucket="b"
        ).is_staged
        for backend in Backend
    }

    assert ways == {backend: not backend.is_gds for backend in Backend}


@pytest.mark.usefixtures("with_nixl")
@pytest.mark.parametrize("backend", [Backend.GDS, Backend.GDS_MT])
def test_gds_without_its_libraries_says_what_it_needs_and_what_does_without(
    tmp_path: Path, backend: Backend
) -> None:
    options = NixlStoreOptions(backend=backend, path=tmp_path / "store", capacity=4 << 20)

    with pytest.raises(StoreError, match=rf"{backend.value} cannot be opened: .*libcufile.*POSIX"):
        open_nixl_store(options)

    assert not list(tmp_path.iterdir())


# ---- the client -------------------------------------------------------------------------------


def test_a_missing_client_is_an_error_that_says_what_to_install() -> None:
    with pytest.raises(StoreError, match=r"no_such_nixl.*pip install"):
        load_client(["no_such_nixl"])


def test_an_older_client_is_refused_with_the_calls_that_it_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = {name: None for name in CALLS if name != "remove_remote_agent"}
    old = ModuleType("old_nixl")
    vars(old).update(
        nixl_agent=type("nixl_agent", (), calls),
        nixl_agent_config=None,
        nixl_thread_sync_t=SimpleNamespace(),
    )
    monkeypatch.setitem(sys.modules, "old_nixl", old)

    with pytest.raises(StoreError, match=r"too old: it has no nixl_agent.remove_remote_agent"):
        load_client(["old_nixl"])

    del vars(old)["nixl_thread_sync_t"]
    with pytest.raises(StoreError, match="too old: it has no nixl_thread_sync_t"):
        load_client(["old_nixl"])


@pytest.mark.usefixtures("with_nixl")
def test_the_client_says_nothing_on_the_standard_output_and_changes_no_global_setting(
    tmp_path: Path,
) -> None:
    script = f"""
import logging, sys
import kvlinker_nixl
assert not [name for name in sys.modules if name.startswith(("nixl", "torch", "obstore"))]
store = kvlinker_nixl.open_store({{"backend": "POSIX", "path": {str(tmp_path / "store")!r}, "capacity": "4MiB"}})
store.close()
logging.getLogger("nixl.api").warning("a line of the client's")
assert logging.raiseExceptions
assert "torch" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@pytest.mark.parametrize(
    "keys",
    [
        {"access_key": "${env:KV_ID}", "secret_key": "${env:KV_KEY}"},
        {"access_key": {"env": "KV_ID"}, "secret_key": {"env": "KV_KEY"}},
    ],
    ids=["text", "object"],
)
def test_keys_of_a_bucket_may_be_written_as_references_in_either_form(
    monkeypatch: pytest.MonkeyPatch, keys: Mapping[str, object]
) -> None:
    monkeypatch.setenv("KV_ID", "kv")
    monkeypatch.setenv("KV_KEY", "open sesame")

    options = NixlStoreOptions.of_config({"backend": "OBJ", "bucket": "b", **keys})

    assert options.read_keys() == ("kv", "open sesame")
    assert "sesame" not in repr(options) + repr(options.read_keys())


def test_keys_that_somebody_read_from_references_are_taken() -> None:
    keys = {"access_key": RevealedSecret("kv"), "secret_key": RevealedSecret("open sesame")}

    options = NixlStoreOptions.of_config({"backend": "OBJ", "bucket": "b", **keys})

    assert options.read_keys() == ("kv", "open sesame")
    assert "sesame" not in repr(options)
