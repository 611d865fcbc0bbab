"""Launch: a name that all ranks of one start of a server share, and no other start has."""

from __future__ import annotations

import secrets

import torch

__all__ = ["launch_name"]


def launch_name(group: object) -> str:
    """Return the name; every rank of the group calls it at the same point of its start."""
    name: list[str] = [secrets.token_hex(8)]
    if (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and group is not None
    ):
        torch.distributed.broadcast_object_list(name, group=group, group_src=0)  # type: ignore[arg-type]  # SGLang's groups are torch's
    return name[0]
