"""Records: what the demo's processes tell each other, in files and in lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Logits", "Part", "Progress", "RunRecord"]

Logits: TypeAlias = NDArray[np.float32]
"""[new tokens, vocabulary]; every value of a narrower format is one of these too."""


class Part(Enum):
    """What a process does."""

    READ = "read"
    """Read the text, store its pages, and go on writing."""
    CONTINUE = "continue"
    """Begin with pools full of nonsense, restore the pages, and go on writing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A step of a process, one line on its standard output."""

    step: str
    done: int = 0
    """Tokens written."""

    def to_line(self) -> str:
        """Return the line."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def from_line(cls, line: str) -> Self:
        """Return what a line says."""
        return cls(**json.loads(line))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What one process did, for comparison and for the table."""

    prompt_tokens: int
    cached_tokens: int
    """Tokens of the prompt that were restored."""
    page_size: int
    pools: Mapping[str, int]
    """Physical pool to the bytes of its page."""
    moved_bytes: int
    """Bytes stored, or restored."""
    restore_seconds: float
    """Of a restore alone, before anything is computed; 0 for the run that reads."""
    first_token_seconds: float
    tokens: tuple[int, ...]
    text: str
    """The tokens, as the model's text or as numbers."""
    prompt_end: str
    """The prompt's last words; empty where tokens are no words."""

    def save(self, folder: Path, case: str, part: Part, logits: Logits) -> None:
        """Write the record and the logits."""
        np.save(folder / f"{case}-{part.value}.npy", logits)
        text = json.dumps(asdict(self))
        (folder / f"{case}-{part.value}.json").write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, folder: Path, case: str, part: Part) -> tuple[Self, Logits]:
        """Return what `save` wrote."""
        text = (folder / f"{case}-{part.value}.json").read_text(encoding="utf-8")
        fields = json.loads(text)
        fields["tokens"] = tuple(fields["tokens"])
        logits: Logits = np.load(folder / f"{case}-{part.value}.npy", allow_pickle=False)
        return cls(**fields), logits
