"""Runs SGLang's Engine in this process, as a library: one prompt, then `shutdown`, which closes no linker.

Arguments: a file with the engine's options and a prompt as JSON. Writes the answer as JSON beside it, named `answer`,
shuts the engine down at the first line of its input, writes the file `ended`, and lives on until its input ends.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import sglang


def main(path: Path) -> None:
    """Generate once, end the engine, and live on."""
    given = json.loads(path.read_text())
    engine = sglang.Engine(**given["engine"])
    answer = engine.generate(
        input_ids=given["prompt"],
        sampling_params={"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
        return_logprob=True,
    )
    _say(path.with_name("answer"), json.dumps(answer))
    sys.stdin.readline()
    engine.shutdown()
    _say(path.with_name("ended"), "")
    sys.stdin.read()


def _say(path: Path, text: str) -> None:
    """Write a file that is whole once it is there."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


if __name__ == "__main__":  # the engine's processes import this module anew
    main(Path(sys.argv[1]))
