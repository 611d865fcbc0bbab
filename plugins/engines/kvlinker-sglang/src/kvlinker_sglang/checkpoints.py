"""Checkpoints: a digest that changes when the weights in a folder do, without reading all of them."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import BinaryIO

from kvlinker.errors import ContractError
from kvlinker.keys import digest_fields

__all__ = ["checkpoint_digest", "content_text"]

_WHOLE_BYTES = 1 << 20
"""Files up to this size are read as a whole."""
_SAMPLE_BYTES = 4 << 10
_STEP_BYTES = 4 << 20
"""Of a file of unknown format there is a sample in every so many bytes."""
_LEAST_SAMPLES = 16
_PART_BYTES = 16 << 20
"""Of a tensor there is a sample in every so many bytes."""
_MATRIX = 2
"""Dimensions of one."""
_MOST_SLICES = 4096
"""More of them are no stack of experts or of layers."""
_STACK_OF_EXPERTS = re.compile(r"(?:^|\.)experts\.(?!\d)")
"""Names of tensors that have a row for each expert; with a number behind it, it is one expert's, and shared experts are
a matrix like any other."""
_HEADER_BYTES = 100 << 20
"""A longer header is none: safetensors itself takes no longer one."""
_READERS = 8
"""Files that are read at a time: a store of files in the network answers each read late."""
_MOST_ENTRIES = 4096
"""More of them are no folder that somebody made for a server to read."""
_DIGEST_BYTES = 12
_WEIGHTS = frozenset({".bin", ".gguf", ".pt", ".pth", ".safetensors"})
_FACTS = ("config.json", "_config.json", ".index.json", "params.json", ".py")
"""Ends of the names of files that say what the weights mean, or compute with them where SGLang runs a checkpoint's own
code (--trust-remote-code); a tokenizer changes no KV of given tokens."""

_Sampled = tuple[str, int, bytes]


def checkpoint_digest(
    path: str, *, revision: str | None = None, cache_dir: str | None = None
) -> str | None:
    """Return a digest of a checkpoint's configuration and of samples of its weights, hexadecimal.

    Training changes nearly every weight of what is trained, so that a sample of each tensor tells two versions apart,
    and one of each expert where a tensor holds several; names of folders and times of files are no part of it, so
    that copies on other hosts agree. A file of safetensors costs a read of 4 KiB for each tensor and for each slice
    of one along the first of three or more dimensions, at least one for every 16 MiB, and one for its header: some
    thousands for a dense model. Another file costs one for every 4 MiB: 25,600 for 100 GB.

    Args:
        path: a folder, a file of weights, or the name of a model that was downloaded.
        revision: of a downloaded model.
        cache_dir: where models are downloaded to; by default where Hugging Face's library puts them.

    Returns:
        None where the files are not on this host, or none of them holds weights.

    Raises:
        ContractError: a file cannot be read.
    """
    folder = _folder(path, revision, cache_dir)
    if folder is None:
        return None
    files = [folder] if folder.is_file() else sorted(_files(folder))
    if folder.is_dir() and not any(file.suffix in _WEIGHTS for file in files):
        return None
    return _digest(path, files, folder.parent if folder.is_file() else folder)


def content_text(name: str, value: str) -> str | None:
    """Return a text for what is in the file or the folder that a value names, wherever it lies.

    Of a folder it has every file below it, by its path in there; of a long file, its size and samples.

    Args:
        name: what has the value, for messages.
        value: a path, or any other text.

    Returns:
        None where the value names neither.

    Raises:
        ContractError: something there cannot be read, or a folder has more than 4096 files and folders in it.
    """
    place = Path(value)
    try:
        if not value or not place.exists():
            return None
    except (OSError, ValueError):  # the text is too long for a path, or has a zero byte
        return None
    if place.is_file():
        return f"file {_digest(value, [place], place)}"
    return f"folder {_digest(value, _tree(name, place), place)}" if place.is_dir() else None


def _tree(name: str, folder: Path) -> list[Path]:
    """Return every file below a folder, in one order; what links lead to is below it too, as for who opens it."""
    found: list[Path] = []
    entries = 0  # folders count too: links may lead round in them for ever
    try:
        for place, folders, names in os.walk(folder, onerror=_raise, followlinks=True):
            entries += len(folders) + len(names)
            if entries > _MOST_ENTRIES:
                msg = (
                    f"{name} names the folder {folder}, which has more than {_MOST_ENTRIES} files and folders: too "
                    f"many to tell its content at each start; unset it, or name a folder of what the server reads alone"
                )
                raise ContractError(msg)
            found += [file for file in (Path(place, item) for item in names) if file.is_file()]
    except OSError as error:
        msg = f"{name} names the folder {folder}, which cannot be read: {error}"
        raise ContractError(msg) from error
    return sorted(found)


def _raise(error: OSError) -> None:
    raise error


def _digest(path: str, files: Iterable[Path], base: Path) -> str:
    try:
        with ThreadPoolExecutor(_READERS) as readers:
            fields = tuple(readers.map(partial(_sampled, base), files))
    except OSError as error:
        msg = f"{path} cannot be read: {error}"
        raise ContractError(msg) from error
    return digest_fields("kvlinker-sglang.checkpoint/3", fields, size=_DIGEST_BYTES).hex()


def _folder(path: str, revision: str | None, cache_dir: str | None) -> Path | None:
    place = Path(path)
    if place.exists():
        return place
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(path, "config.json", revision=revision, cache_dir=cache_dir)
    except ValueError:  # the path is no name of a model
        return None
    return Path(found).parent if isinstance(found, str) else None


def _files(folder: Path) -> Iterator[Path]:
    for file in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
        wanted = file.suffix in _WEIGHTS or file.name.endswith(_FACTS)
        if wanted and not hidden and file.is_file():
            yield file


def _sampled(base: Path, file: Path) -> _Sampled:
    name = str(file.relative_to(base))
    size = file.stat().st_size
    digest = hashlib.blake2b()
    with file.open("rb") as opened:
        if size <= _WHOLE_BYTES:
            digest.update(opened.read())
        else:
            header = _header(opened, size) if file.suffix == ".safetensors" else b""
            digest.update(header)
            for start in _tensor_starts(header, size) or _even_starts(size):
                opened.seek(start)
                digest.update(opened.read(_SAMPLE_BYTES))
    return name, size, digest.digest()


def _header(opened: BinaryIO, size: int) -> bytes:
    """Return the header of a file of safetensors, with its length before it; nothing where it has none."""
    length = opened.read(8)
    count = int.from_bytes(length, "little")
    if count > min(_HEADER_BYTES, size - len(length)):
        return b""
    return length + opened.read(count)


def _tensor_starts(header: bytes, size: int) -> list[int]:
    """Return where samples begin, in the middle of each part of a tensor; nothing where the header says no places."""
    try:
        entries = json.loads(header[8:])
        middles = [
            len(header) + middle
            for name, entry in entries.items()
            if name != "__metadata__"
            for middle in _middles(name, entry["shape"], *map(int, entry["data_offsets"]))
        ]
    except (AttributeError, KeyError, TypeError, ValueError):
        return []
    last = size - _SAMPLE_BYTES
    starts = sorted({min(max(0, middle - _SAMPLE_BYTES // 2), last) for middle in middles})
    return starts if all(start >= 0 for start in starts) else []


def _middles(name: str, shape: Sequence[int], begin: int, end: int) -> list[int]:
    """Return the middle of each part of a tensor: of each slice of a stack, and of each 16 MiB of a large slice.

    Slices that are shorter than a sample share one, which has all of them.
    """
    is_stack = len(shape) > _MATRIX or (len(shape) == _MATRIX and _STACK_OF_EXPERTS.search(name))
    slices = shape[0] if is_stack and 0 < shape[0] <= _MOST_SLICES else 1
    bytes_of_slice = (end - begin) // slices
    parts = slices * max(1, -(-bytes_of_slice // _PART_BYTES))
    parts = max(1, min(parts, -(-(end - begin) // _SAMPLE_BYTES)))
    return [begin + (end - begin) * (2 * part + 1) // (2 * parts) for part in range(parts)]


def _even_starts(size: int) -> list[int]:
    """Return where samples begin: the first at the start, the last at the end, the others evenly between."""
    samples = max(_LEAST_SAMPLES, -(-size // _STEP_BYTES) + 1)
    last = size - _SAMPLE_BYTES
    return [last * number // (samples - 1) for number in range(samples)]
