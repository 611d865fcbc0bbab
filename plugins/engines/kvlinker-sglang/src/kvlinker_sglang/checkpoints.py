"""Checkpoints: a digest that changes when the weights in a folder do, without reading all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from kvlinker.errors import ContractError
from kvlinker.keys import digest_fields

__all__ = ["checkpoint_digest"]

_WHOLE_BYTES = 1 << 20
"""Files up to this size are read as a whole."""
_SAMPLES = 16
_SAMPLE_BYTES = 16 << 10
_DIGEST_BYTES = 12
_WEIGHTS = frozenset({".bin", ".gguf", ".pt", ".pth", ".safetensors"})
_FACTS = ("config.json", "_config.json", ".index.json", "params.json")
"""Ends of the names of files that say what the weights mean; a tokenizer changes no KV of given tokens."""


def checkpoint_digest(path: str, *, revision: str | None = None) -> str | None:
    """Return a digest of a checkpoint's configuration and of samples of its weights, hexadecimal.

    Training changes nearly every weight, so that a few samples of each file tell two versions apart;
    names of folders and times of files are no part of it, so that copies on other hosts agree.

    Args:
        path: a folder, a file of weights, or the name of a model that was downloaded.
        revision: of a downloaded model.

    Returns:
        None where the files are not on this host.

    Raises:
        ContractError: a file cannot be read.
    """
    folder = _folder(path, revision)
    if folder is None:
        return None
    files = [folder] if folder.is_file() else sorted(_files(folder))
    base = folder.parent if folder.is_file() else folder
    try:
        fields = tuple(_sampled(file, str(file.relative_to(base))) for file in files)
    except OSError as error:
        msg = f"the checkpoint {path} cannot be read: {error}"
        raise ContractError(msg) from error
    return digest_fields("kvlinker-sglang.checkpoint/1", fields, size=_DIGEST_BYTES).hex()


def _folder(path: str, revision: str | None) -> Path | None:
    place = Path(path)
    if place.exists():
        return place
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(path, "config.json", revision=revision)
    except ValueError:  # the path is no name of a model
        return None
    return Path(found).parent if isinstance(found, str) else None


def _files(folder: Path) -> Iterator[Path]:
    for file in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
        wanted = file.suffix in _WEIGHTS or file.name.endswith(_FACTS)
        if wanted and not hidden and file.is_file():
            yield file


def _sampled(file: Path, name: str) -> tuple[str, int, bytes]:
    size = file.stat().st_size
    with file.open("rb") as opened:
        if size <= _WHOLE_BYTES:
            return name, size, opened.read()
        samples = []
        for start in _starts(size):
            opened.seek(start)
            samples.append(opened.read(_SAMPLE_BYTES))
        return name, size, b"".join(samples)


def _starts(size: int) -> Iterable[int]:
    """Return where the samples begin: the first at the start, the last at the end, the others between."""
    last = size - _SAMPLE_BYTES
    return (last * number // (_SAMPLES - 1) for number in range(_SAMPLES))
