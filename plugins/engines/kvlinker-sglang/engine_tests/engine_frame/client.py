"""A client of one server's HTTP interface: plain token ids in, what was answered and what came from a cache out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from itertools import repeat
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from pydantic import BaseModel

__all__ = ["Answer", "Client", "Load", "RequestFailed"]

SECONDS = 300.0
"""Longer than any request of these tests takes, so that a server that hangs fails its test."""


class RequestFailed(Exception):  # noqa: N818 - a request that failed, as servers mean it
    """A server refused or gave up a request."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP status {status}: {text}")
        self.status = status
        self.text = text


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a server says to one prompt."""

    tokens: tuple[int, ...]
    """What it generated."""
    logprobs: tuple[float, ...]
    """Of each of them; empty where they were not asked for."""
    prompt_tokens: int
    cached_tokens: int
    """Tokens of the prompt that were not computed."""
    device_tokens: int
    """Cached tokens that were in the engine's own pools."""
    host_tokens: int
    """Cached tokens that were read from elsewhere: an external linker's."""
    finish: str
    """`length`, `stop` or `abort`."""

    @property
    def output(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """What must not depend on any cache."""
        return self.tokens, self.logprobs


class _Finish(BaseModel):
    type: str


class _Cached(BaseModel):
    device: int = 0
    host: int = 0


class _Meta(BaseModel):
    prompt_tokens: int = 0  # absent where a request was aborted while it waited
    cached_tokens: int = 0
    cached_tokens_details: _Cached | None = None
    finish_reason: _Finish
    output_token_logprobs: list[tuple[float, int, str | None]] = []


class _Generated(BaseModel):
    output_ids: list[int]
    meta_info: _Meta

    def answer(self) -> Answer:
        cached = self.meta_info.cached_tokens_details or _Cached()
        return Answer(
            tokens=tuple(self.output_ids),
            logprobs=tuple(logprob for logprob, _, _ in self.meta_info.output_token_logprobs),
            prompt_tokens=self.meta_info.prompt_tokens,
            cached_tokens=self.meta_info.cached_tokens,
            device_tokens=cached.device,
            host_tokens=cached.host,
            finish=self.meta_info.finish_reason.type,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests that a server has at one moment."""

    running: int
    waiting: int


class _LoadOfRank(BaseModel):
    num_running_reqs: int
    num_waiting_reqs: int


class _Loads(BaseModel):
    loads: list[_LoadOfRank]


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """Talks to the server at one port of this machine."""

    port: int

    def generate(
        self,
        prompt: Sequence[int],
        *,
        new_tokens: int = 8,
        logprobs: bool = True,
        request_id: str | None = None,
        extra: Mapping[str, object] | None = None,
    ) -> Answer:
        """Let the server go on from a prompt, greedily.

        `extra` is added to the body: `{"extra_key": salt}`, `{"lora_path": name}` and the like.

        Raises:
            RequestFailed: the server refused it, gave it up, or was told to abort it while it waited.
        """
        body: dict[str, object] = {
            "input_ids": list(prompt),
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": new_tokens,
                "ignore_eos": True,
            },
            "return_logprob": logprobs,
            **(extra or {}),
        }
        if request_id is not None:
            body["rid"] = request_id
        return _Generated.model_validate_json(self.post("generate", body)).answer()

    def generate_all(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        new_tokens: int = 8,
        extra: Mapping[str, object] | None = None,
    ) -> list[Answer | RequestFailed]:
        """Send all prompts at the same time, and return what came of each, in their order."""
        with ThreadPoolExecutor(len(prompts)) as threads:
            return list(threads.map(self._outcome, prompts, repeat(new_tokens), repeat(extra)))

    def flush_cache(self) -> None:
        """Let the server forget what is in its pools, once nothing runs any more."""
        self.post(f"flush_cache?timeout={SECONDS / 2}", None)

    def abort(self, request_id: str) -> None:
        """Stop one request."""
        self.post("abort_request", {"rid": request_id})

    def load(self) -> Load:
        """Return how many requests the server has."""
        loads = _Loads.model_validate_json(self.get("v1/loads")).loads
        return Load(
            running=sum(load.num_running_reqs for load in loads),
            waiting=sum(load.num_waiting_reqs for load in loads),
        )

    def is_healthy(self) -> bool:
        """Say whether the server takes requests."""
        try:
            self.get("health")
        except (RequestFailed, OSError):
            return False
        return True

    def get(self, path: str) -> bytes:
        """Return what the server says to a GET request.

        Raises:
            RequestFailed: its status is not 200.
        """
        return self._send(Request(self._url(path), method="GET"))  # noqa: S310 - always http

    def post(self, path: str, body: Mapping[str, object] | None) -> bytes:
        """Return what the server says to a POST request.

        Raises:
            RequestFailed: its status is not 200.
        """
        return self._send(
            Request(  # noqa: S310 - always http
                self._url(path),
                data=b"" if body is None else json.dumps(body).encode(),
                headers={"Content-Type": "application/json"},
                method="POST",
            )
        )

    def _url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}/{path}"

    def _send(self, request: Request) -> bytes:
        opener = build_opener(ProxyHandler({}))
        try:
            with opener.open(request, timeout=SECONDS) as response:
                if response.status != HTTPStatus.OK:
                    raise RequestFailed(response.status, response.read().decode())
                content: bytes = response.read()
        except HTTPError as error:
            raise RequestFailed(error.code, error.read().decode()) from error
        return content

    def _outcome(
        self, prompt: Sequence[int], new_tokens: int, extra: Mapping[str, object] | None
    ) -> Answer | RequestFailed:
        try:
            return self.generate(prompt, new_tokens=new_tokens, extra=extra)
        except RequestFailed as failure:
            return failure
