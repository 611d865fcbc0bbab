"""Runs SGLang's Engine in this process, as a library: one prompt, then `shutdown`, which closes no linker.

Arguments: a file with the engine's options and a prompt as JSON. Prints the answer as JSON in its last line.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import sglang

STORED_SECONDS = 0.5


def main(path: Path) -> None:
    """Generate once, and end the engine."""
    given = json.loads(path.read_text())
    engine = sglang.Engine(**given["engine"])
    answer = engine.generate(
        input_ids=given["prompt"],
        sampling_params={"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
        return_logprob=True,
    )
    time.sleep(STORED_SECONDS)
    engine.shutdown()
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":  # the engine's processes import this module anew
    main(Path(sys.argv[1]))
