"""Cases: the models that the demo shows, and what each of them reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from kvlinker.errors import UnsupportedOperationError
from kvlinker_transformers.models import tiny_model
from kvlinker_transformers.smollm2 import load_smollm2, weights_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["CASES", "DemoCase", "LoadedCase", "demo_text"]

_RANDOM_PROMPT_BYTES = 1500
"""Bytes of the text that a random model reads as tokens; its vocabulary holds every byte."""
_SHOWN_WORDS = 17
_CONVERTER_PACKAGES = ("accelerate", "gguf", "safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCase:
    """A model, what it reads, and how its tokens become text."""

    model: PreTrainedModel
    prompt: Sequence[int]
    decode: Callable[[Sequence[int]], str]
    prompt_end: str = ""
    """The prompt's last words, where it is made of words."""
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoCase:
    """One model of the demo."""

    name: str
    title: str
    new_tokens: int
    pages: int
    """Pages of its pools: enough for all tokens, and the reserved one."""
    load: Callable[[Path], LoadedCase]
    """Makes the model in a process of the demo; converted weights go into the folder."""
    check: Callable[[], None] = lambda: None
    """Raises UnsupportedOperationError where the model cannot be had."""


def demo_text() -> str:
    """Return the text that is read: an essay on what a language model remembers."""
    return files(__package__).joinpath("text.txt").read_text(encoding="utf-8").rstrip()


def _load_real(folder: Path) -> LoadedCase:
    loaded, text = load_smollm2(folder), demo_text()
    return LoadedCase(
        model=loaded.model,
        prompt=loaded.text.encode(text),
        decode=loaded.text.decode,
        prompt_end=" ".join(text.split()[-_SHOWN_WORDS:]),
        stop_token_ids=loaded.stop_token_ids,
    )


def _load_random(model_type: str, _folder: Path) -> LoadedCase:
    prompt = demo_text().encode()[:_RANDOM_PROMPT_BYTES]
    return LoadedCase(model=tiny_model(model_type), prompt=list(prompt), decode=_numbers)


def _numbers(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


def _check_real() -> None:
    weights_folder()
    if absent := [name for name in _CONVERTER_PACKAGES if find_spec(name) is None]:
        msg = f"its weights are converted by {', '.join(absent)}; try: pip install 'kvlinker-transformers[demo]'"
        raise UnsupportedOperationError(msg)


CASES: Mapping[str, DemoCase] = MappingProxyType(
    {
        case.name: case
        for case in (
            DemoCase(
                name="smollm2",
                title="SmolLM2-135M-Instruct: grouped-query attention, real weights",
                new_tokens=43,
                pages=128,
                load=_load_real,
                check=_check_real,
            ),
            DemoCase(
                name="dsa",
                title="DSA as in DeepSeek V3.2: random weights, KV of the real size per layer",
                new_tokens=16,
                pages=40,
                load=partial(_load_random, "deepseek_v32"),
            ),
            DemoCase(
                name="deepseek_v4",
                title="DeepSeek V4: random weights, KV of the real size per layer",
                new_tokens=16,
                pages=12,
                load=partial(_load_random, "deepseek_v4"),
            ),
        )
    }
)
"""Case by its name, in the order in which they are shown."""
