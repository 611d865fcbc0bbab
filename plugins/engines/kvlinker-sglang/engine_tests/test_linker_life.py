"""The life of a linked engine: refused starts, secrets, new weights, and an end that closes nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_frame.models import make_model
from engine_frame.server import (
    START_SECONDS,
    LinkerOptions,
    Server,
    ServerDied,
    ServerOptions,
    lives,
)
from leftovers import check_nothing_is_held, is_free, users_of
from linked_servers import PAGE, Link, answer_without_cache, prompt_of, wait_for

Start = Callable[[ServerOptions], Server]
ModelFolder = Callable[[str], Path]
SECRET = "hunter2-hunter2"  # noqa: S105  # what must not show
WHOLE = 12 * PAGE


def test_b34_new_weights_find_their_own_pages_and_secrets_are_in_no_log(
    start_server: Start, model_folder: ModelFolder, tmp_path: Path
) -> None:
    link = Link(
        store=tmp_path / "store", options={"namespace": {"secret": {"env": "KVLINKER_SECRET"}}}
    )
    options = link.server(model_folder("llama"), environment={"KVLINKER_SECRET": SECRET})
    server = start_server(options)
    client, prompt = server.client, prompt_of(WHOLE + 5)
    old = client.generate(prompt)
    link.forget(client)

    client.post(
        "update_weights_from_disk", {"model_path": str(make_model("llama", tmp_path, seed=1))}
    )
    new = client.generate(prompt)
    expected = answer_without_cache(client, prompt)
    link.forget(client)
    new_again = client.generate(prompt)
    server.restart()
    old_again = server.client.generate(prompt)

    assert (new.host_tokens, new_again.host_tokens, old_again.host_tokens) == (0, WHOLE, WHOLE)
    assert new.output == expected.output == new_again.output != old.output
    assert old_again.output == old.output
    assert SECRET not in server.log_text()
    assert "keyed with a secret" in server.log_text()


def test_a_server_with_a_wrong_option_does_not_start_and_says_which(
    start_server: Start, model_folder: ModelFolder
) -> None:
    linker = LinkerOptions(extra_config={"store": {"plugin": "file", "option": {}}})

    with pytest.raises(ServerDied, match=r"store\.option is unknown; did you mean options"):
        start_server(ServerOptions(model=model_folder("llama"), linker=linker))


def test_e4_an_engine_that_shuts_down_without_a_close_holds_nothing_and_the_next_one_reads_its_store(
    model_folder: ModelFolder, tmp_path: Path
) -> None:
    link = Link(store=tmp_path / "store")
    linker = link.server(model_folder("llama")).linker
    assert linker is not None
    given = tmp_path / "given.json"
    engine = {
        "model_path": str(model_folder("llama")),
        "device": "cpu",
        "skip_tokenizer_init": True,
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_cuda_graph": True,
        "page_size": PAGE,
        "mem_fraction_static": 0.5,
        "max_total_tokens": 4096,
        "log_level": "info",
        "enable_unified_cache_external_linker": True,
        "unified_cache_external_linker_backend": "dynamic",
        "unified_cache_external_linker_config": linker.config,
    }
    given.write_text(json.dumps({"engine": engine, "prompt": prompt_of(WHOLE + 5)}))

    first, second = (_run(given, link) for _ in range(2))

    assert first["output_ids"] == second["output_ids"]
    cached = [answer["meta_info"]["cached_tokens"] for answer in (first, second)]
    assert cached == [0, WHOLE]
    check_nothing_is_held(link)


def _run(given: Path, link: Link) -> dict[str, dict[str, object]]:
    """Return the answer of an engine of which nothing is left once it was shut down, though its process lives on."""
    script = Path(__file__).with_name("engine_process.py")
    command = ["setpriv", "--pdeathsig", "KILL", sys.executable, str(script), str(given)]
    answered, ended = given.with_name("answer"), given.with_name("ended")
    with (
        given.with_name("log").open("ab") as log,
        subprocess.Popen(
            command,
            env=ServerOptions(model=given, spawned=True).variables(),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        ) as process,
    ):
        _wait_for_file(answered, process)
        answer: dict[str, dict[str, object]] = json.loads(answered.read_text())
        link.settle()
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        _wait_for_file(ended, process)
        # Its schedulers are killed, and the kernel takes a moment for what they held.
        wait_for(lambda: users_of(link.store) == [], "the end of whoever uses the store")
        wait_for(lambda: is_free(link.port), "the end of whoever listens")
        process.stdin.close()
        assert process.wait(START_SECONDS) == 0
    # What tracks Python's shared resources ends a moment after the process.
    wait_for(lambda: not lives(process.pid), "the end of every process of the engine")
    answered.unlink()
    ended.unlink()
    return answer


def _wait_for_file(path: Path, process: subprocess.Popen[bytes]) -> None:
    wait_for(
        lambda: path.exists() or process.poll() is not None, path.name, limit_seconds=START_SECONDS
    )
    assert path.exists(), path.with_name("log").read_text()[-4000:]
