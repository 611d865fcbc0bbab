"""Real servers with the linker: what was computed once is read back, in this process and in the next one."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_frame.server import Server, ServerOptions
from linked_servers import PAGE, Link, prompt_of

Start = Callable[[ServerOptions], Server]
ModelFolder = Callable[[str], Path]
SEVERAL = 12 * PAGE + 5
WHOLE = 12 * PAGE
FAMILIES = {"llama": "mha", "sliding": "swa", "latent": "mla"}
"""Of the models that are served, each by the strategy of that name."""


@pytest.mark.supports(
    engine="sglang",
    level="server",
    case="model",
    family=FAMILIES,
    kv_format="bf16",
)
@pytest.mark.parametrize("model", FAMILIES)
def test_what_a_server_has_forgotten_is_read_back_by_it_and_by_the_next_one(
    start_server: Start, model_folder: ModelFolder, tmp_path: Path, model: str
) -> None:
    link = Link(store=tmp_path / "store", options={"min_hit_tokens": 5 * PAGE})
    server = start_server(link.server(model_folder(model)))
    prompt, short = prompt_of(SEVERAL), prompt_of(4 * PAGE + 1, seed=1)

    server.client.generate(short)
    cold = server.client.generate(prompt)
    link.forget(server.client)
    restored = server.client.generate(prompt)
    counted = link.settle()
    server.restart()
    first = server.client.generate(prompt)
    warm = server.client.generate(prompt)
    too_short = server.client.generate(short)
    log = server.log_text()

    assert (cold.host_tokens, cold.device_tokens) == (0, 0)
    assert (restored.host_tokens, restored.device_tokens) == (WHOLE, 0)
    assert (first.host_tokens, first.device_tokens) == (WHOLE, 0)
    assert (warm.host_tokens, warm.device_tokens) == (0, WHOLE)
    assert cold.output == restored.output == first.output == warm.output
    assert too_short.cached_tokens == 0
    assert counted["tokens_total/landed"] == WHOLE
    assert counted.tokens_close
    assert not any(counted.labels("errors_total").values())
    assert re.findall(r"kvlinker: strategy (\S+) \(", log) == [FAMILIES[model]] * 2
    assert set(re.findall(r"KV Cache is allocated\. dtype: (\S+),", log)) == {"torch.bfloat16"}
