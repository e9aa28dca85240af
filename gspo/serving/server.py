"""A model behind an HTTP API on loopback.

    GET  /v1/models                the model, with its number of positions
    POST /v1/completions           OpenAI's API for text, also with log-probs of the prompt (`echo`)
    POST /v1/chat/completions      OpenAI's API for chats, with tools through the chat template
    POST /inference/v1/generate    tokens in; tokens and the log-probs that they were sampled with out

In: an engine, and the policy that it samples from. Out: responses, until the server is closed. Invariant: it listens on
loopback only, and every request needs the token. A thread answers requests; the engine and the model are used only by
the thread that calls `work`. Every failure of a request is an error in OpenAI's form, and the server continues.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import math
import secrets
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import datetime
from typing import Any, TypeVar

from gspo.data.chat import check_template, render, uses_template
from gspo.environment.tool_calls import detect, parse
from gspo.errors import ConfigError, DataError, GspoError, panics_as_errors
from gspo.model.load import Policy
from gspo.network.loopback import AccessControl, loopback_listener, server
from gspo.rollout.engine import Engine, EngineContext
from gspo.serving import responses
from gspo.serving.batcher import Batcher, CompletionJob, LogprobJob
from gspo.serving.requests import (
    ApiError,
    Options,
    chat_request,
    completion_request,
    generate_request,
    parse_body,
)
from gspo.serving.token_logprobs import TokenLogprobs
from gspo.types import Completion

T = TypeVar("T")
_LOOK_S = 1.0
"""Between two looks at whether the client of a request has hung up."""


class Guard(AccessControl):
    """The access control of the server, with errors in OpenAI's form."""

    most_body = 64 * 2**20

    def content(self, status: int, text: str) -> tuple[str, str]:
        code = "invalid_api_key" if status == 401 else None
        return "application/json", json.dumps(ApiError(text.strip(), status=status, code=code).as_data)

    def unauthorized(self, scope: Mapping[str, Any], bearer: str) -> tuple[int, str]:
        return 401, "This server needs the token that it was started with, as the API key."


class ModelServer:
    """Serves a model. Use it as a context manager. It owns neither the engine nor the policy."""

    def __init__(
        self,
        engine: Engine,
        policy: Policy,
        *,
        name: str,
        max_tokens: int,
        token: str = "",
        port: int = 0,
    ) -> None:
        """`name` is the model's name in requests. `max_tokens` limits the completions of requests without a limit."""
        self.name = name
        self.token = token or secrets.token_urlsafe(32)
        self.batcher = Batcher(engine, policy)
        self._app = _Handlers(self.batcher, policy, name=name, max_tokens=max_tokens)
        self._listener = loopback_listener(port)
        self.port: int = self._listener.getsockname()[1]
        self._server = server(Guard(self._app.application(), self.token), response_s=None)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._listener]}, name="model server", daemon=True
        )

    @property
    def address(self) -> str:
        """The base URL of OpenAI's API."""
        return f"http://127.0.0.1:{self.port}/v1"

    def __enter__(self) -> ModelServer:
        self._thread.start()
        return self

    def work(self, until: Callable[[], bool]) -> None:
        """Sample for all clients in this thread until `until` is true."""
        self.batcher.work(until)

    def __exit__(self, *error: object) -> None:
        self._server.should_exit = self._server.force_exit = True
        self.batcher.refuse()
        self._thread.join(timeout=10)
        self._listener.close()


class _Handlers:
    """What the paths do."""

    def __init__(self, batcher: Batcher, policy: Policy, *, name: str, max_tokens: int) -> None:
        self._batcher = batcher
        self._policy = policy
        self._name = name
        self._max_tokens = max_tokens
        self._created = int(datetime.now().timestamp())
        # The engine's thread decodes with the original meanwhile, and tokenizers have state.
        self._tokenizer = copy.deepcopy(policy.tokenizer)
        self._lock = threading.Lock()
        self._texts = EngineContext(model=None, tokenizer=self._tokenizer, stop_ids=policy.stop_ids).texts
        self._vocabulary = policy.model.get_input_embeddings().num_embeddings
        longest = max(map(len, self._tokenizer.get_vocab()))
        positions = policy.position_limit
        self._most_characters = math.inf if positions is None else positions * longest
        """No longer text fits into the model's positions."""
        check_template(self._tokenizer, chat="auto")

    def application(self) -> Any:
        from starlette.applications import Starlette
        from starlette.requests import ClientDisconnect
        from starlette.responses import JSONResponse, Response, StreamingResponse
        from starlette.routing import Route

        def refused(failure: ApiError) -> JSONResponse:
            return JSONResponse(failure.as_data, failure.status)

        def route(path: str, respond: Callable[[dict[str, Any], Any], Awaitable[dict[str, Any]]]) -> Route:
            async def handle(request: Any) -> Response:
                try:
                    data = parse_body(await request.body())
                    body = await respond(data, request)
                    if data.get("stream"):
                        return StreamingResponse(_events(body, data), media_type="text/event-stream")
                    return JSONResponse(body)
                except ClientDisconnect:
                    return refused(_hung_up())
                except (Exception, asyncio.CancelledError) as error:
                    # In no variable of this frame: the error refers to the frame, and so to the body of the request.
                    return refused(_api_error(error))

            return Route(path, handle, methods=["POST"])

        async def models(request: Any) -> Response:
            card = {"id": self._name, "object": "model", "created": self._created, "owned_by": "gspo"}
            card["max_model_len"] = self._policy.position_limit
            if "name" in request.path_params:
                if request.path_params["name"] != self._name:
                    return refused(self._no_model(request.path_params["name"]))
                return JSONResponse(card)
            return JSONResponse({"object": "list", "data": [card]})

        async def unknown(request: Any, error: Any) -> Response:
            return refused(ApiError(f"{request.method} {request.url.path}: {error.detail}", status=error.status_code))

        routes = [
            Route("/v1/models", models, methods=["GET"]),
            Route("/v1/models/{name:path}", models, methods=["GET"]),
            route("/v1/completions", self._complete),
            route("/v1/chat/completions", self._chat),
            route("/inference/v1/generate", self._generate),
        ]
        return Starlette(routes=routes, exception_handlers={404: unknown, 405: unknown})

    # ---- the paths

    async def _complete(self, data: dict[str, Any], http: Any) -> dict[str, Any]:
        request = completion_request(data)
        self._check_model(request.model)
        # In a thread, because tokenizing a long text would block all other requests.
        prompts = await asyncio.to_thread(lambda: [self._prompt_ids(prompt) for prompt in request.prompts])
        done = await self._sample(prompts, request.options, http)
        pairs = [(p, c) for p, completions in zip(prompts, done, strict=True) for c in completions]
        scored = await self._logprobs(pairs, request.logprobs, http)

        def body() -> dict[str, Any]:
            choices: list[dict[str, Any]] = []
            # In OpenAI's order: all choices of the first prompt, then those of the second.
            for (prompt_ids, completion), found in zip(pairs, scored, strict=True):
                shown = (*prompt_ids * request.echo, *completion.token_ids)
                text = self._shown_text(completion, request.options.stop)
                if request.echo:
                    text = self._all_text(prompt_ids) + text
                logprobs = None
                if found is not None:
                    logprobs = responses.completion_logprobs(shown, found, self._token_texts, top=request.logprobs or 0)
                choices.append(responses.completion_choice(len(choices), text, completion.stop, logprobs))
            return responses.completion(self._name, choices, responses.usage(prompts, done))

        return await asyncio.to_thread(body)

    async def _chat(self, data: dict[str, Any], http: Any) -> dict[str, Any]:
        request = chat_request(data)
        self._check_model(request.model)
        self._check_length("messages", sum(len(message["content"]) for message in request.messages))

        def rendered() -> tuple[int, ...]:
            with self._lock, panics_as_errors():
                if not uses_template(self._tokenizer, chat="auto"):
                    raise ApiError(f"{self._name} has no chat template; use /v1/completions", param="messages")
                options = {"tools": request.tools, "variables": request.template_options}
                return render(request.messages, self._tokenizer, chat="auto", **options)[1]  # type: ignore[arg-type]

        form = detect(str(self._tokenizer.chat_template or "")) if request.tools else None
        if request.tools and form is None:
            raise ApiError("tools: the chat template shows no known form of tool calls", param="tools")
        prompt_ids = await asyncio.to_thread(rendered)
        done = (await self._sample([prompt_ids], request.options, http))[0]
        scored = await self._logprobs([(prompt_ids, completion) for completion in done], request.logprobs, http)

        def body() -> dict[str, Any]:
            choices: list[dict[str, Any]] = []
            for completion, found in zip(done, scored, strict=True):
                message, finish = self._message(completion, request.options.stop, form, request.tools)
                logprobs = None
                if found is not None:
                    logprobs = responses.chat_logprobs(completion.token_ids, found, self._token_texts)
                choice = {"index": len(choices), "message": message, "logprobs": logprobs, "finish_reason": finish}
                choices.append(choice)
            return responses.chat(self._name, choices, responses.usage([prompt_ids], [done]))

        return await asyncio.to_thread(body)

    async def _generate(self, data: dict[str, Any], http: Any) -> dict[str, Any]:
        request = generate_request(data)
        self._check_model(request.model)
        self._check_tokens("token_ids", request.token_ids)
        options, positions = request.options, self._policy.position_limit
        if options.max_tokens is not None and positions is not None:
            # A conversation has a limit of its own, so a turn gets what is left of the positions.
            room = max(1, positions - len(request.token_ids))
            options = replace(options, max_tokens=min(options.max_tokens, room))
        done = await self._sample([request.token_ids], options, http, request.stop_ids)
        return responses.generated(done[0])

    # ---- what they have in common

    async def _sample(
        self,
        prompts: Sequence[tuple[int, ...]],
        options: Options,
        http: Any,
        stop_ids: frozenset[int] = frozenset(),
    ) -> list[list[Completion]]:
        """The completions of each prompt."""
        groups: list[list[Future[Completion]]] = []
        for prompt_ids in prompts:
            sampling = options.sampling(self._limit(prompt_ids, options))
            if sampling.max_tokens == 0:
                continue
            seed = secrets.token_hex(16) if options.seed is None else str(options.seed)
            digest = hashlib.blake2b(json.dumps(prompt_ids).encode(), digest_size=16).hexdigest()
            jobs = [
                CompletionJob(prompt_ids=prompt_ids, sampling=sampling, key=f"{seed}/{digest}/{i}", stop_ids=stop_ids)
                for i in range(options.n)
            ]
            groups.append([self._batcher.sample(job) for job in jobs])
        if not groups:
            return [[responses.EMPTY] * options.n for _ in prompts]
        flat = await self._wait([future for group in groups for future in group], http)
        return [flat[i : i + options.n] for i in range(0, len(flat), options.n)]

    async def _logprobs(
        self, pairs: Sequence[tuple[tuple[int, ...], Completion]], top: int | None, http: Any
    ) -> Sequence[TokenLogprobs | None]:
        """The log-probs of prompts with their completions; None for each if they are not wanted."""
        if top is None:
            return [None] * len(pairs)
        jobs = [LogprobJob(token_ids=(*prompt, *completion.token_ids), top=top) for prompt, completion in pairs]
        return await self._wait([self._batcher.logprobs(job) for job in jobs], http)

    async def _wait(self, futures: Sequence[Future[T]], http: Any) -> list[T]:
        """The results, unless the client hangs up: then what has not begun is not computed."""
        waiting = [asyncio.wrap_future(future) for future in futures]
        try:
            while True:
                _, pending = await asyncio.wait(waiting, timeout=_LOOK_S)
                if not pending:
                    return [future.result() for future in waiting]
                if await http.is_disconnected():
                    raise _hung_up()
        finally:
            for future in waiting:
                if not future.cancel() and not future.cancelled():
                    future.exception()  # asyncio reports errors that nobody has looked at

    def _limit(self, prompt_ids: tuple[int, ...], options: Options) -> int:
        """How many tokens a completion may have."""
        positions = self._policy.position_limit
        room = None if positions is None else positions - len(prompt_ids)
        wanted = options.max_tokens
        if room is not None and room < (1 if wanted is None else wanted):
            raise ApiError(
                f"the prompt has {len(prompt_ids)} tokens and the model {positions} positions, which leaves no room "
                f"for {1 if wanted is None else wanted} more",
                param="max_tokens",
                code="context_length_exceeded",
            )
        if wanted is not None:
            return wanted
        return self._max_tokens if room is None else min(room, self._max_tokens)

    def _prompt_ids(self, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            self._check_length("prompt", len(prompt))
            with self._lock, panics_as_errors():
                ids = render(prompt, self._tokenizer, chat="no")[1]
            if not ids:
                raise ApiError("prompt: has no tokens; a completion needs at least one to start from", param="prompt")
            return ids
        self._check_tokens("prompt", prompt)
        return prompt

    def _check_tokens(self, name: str, ids: Sequence[int]) -> None:
        if max(ids) >= self._vocabulary:
            raise ApiError(f"{name}: token {max(ids)} is not one of the model's {self._vocabulary}", param=name)

    def _check_length(self, name: str, characters: int) -> None:
        """Refuse a text before it is tokenized if it cannot fit: tokenizing 60 MB takes 20 GB of memory."""
        if characters > self._most_characters:
            raise ApiError(
                f"{name}: {characters} characters do not fit into the model's {self._policy.position_limit} positions",
                param=name,
                code="context_length_exceeded",
            )

    def _check_model(self, name: str) -> None:
        if name != self._name:
            raise self._no_model(name)

    def _no_model(self, name: str) -> ApiError:
        message = f"model: {name!r:.200} is not served here; use {self._name!r}"
        return ApiError(message, status=404, param="model", code="model_not_found")

    # ---- text

    def _shown_text(self, completion: Completion, stop: Sequence[str]) -> str:
        """The text of a completion, without the stop string that ended it."""
        return responses.before_stop(completion.text, stop) if completion.stop == "stop" else completion.text

    def _all_text(self, ids: Sequence[int]) -> str:
        with self._lock:
            return self._texts([ids], special=True)[0]

    def _token_texts(self, ids: Sequence[int]) -> list[str]:
        with self._lock:
            return self._texts([[i] for i in ids], special=True)

    def _message(
        self, completion: Completion, stop: Sequence[str], form: str | None, tools: Sequence[Mapping[str, Any]]
    ) -> tuple[dict[str, Any], str]:
        """The message of the model, and why it ended."""
        text = self._shown_text(completion, stop)
        finish = responses.finish_reason(completion.stop)
        if form is not None:
            ids = completion.token_ids
            ids = ids[:-1] if ids and ids[-1] in self._policy.stop_ids else ids
            whole = self._all_text(ids)
            parsed = parse(form, whole, [tool["function"]["name"] for tool in tools])
            if parsed.calls:
                return responses.calling_message(parsed.content, parsed.calls), "tool_calls"
            # A malformed call stays text, so that the client sees what the model wrote.
            text = whole if parsed.error else parsed.content
            text = responses.before_stop(text, stop) if completion.stop == "stop" else text
        return {"role": "assistant", "content": text, "refusal": None}, finish


def _hung_up() -> ApiError:
    return ApiError("the client has hung up", status=499)


def _api_error(error: BaseException) -> ApiError:
    """The error for the client."""
    if isinstance(error, asyncio.CancelledError):
        return ApiError("the server is stopping", status=503)
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ConfigError | DataError):
        return ApiError(str(error))
    # Only a number: a message may contain private data. It is printed on the terminal with the message.
    number = secrets.token_hex(4)
    print(f"gspo: error {number}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    kind = "the engine failed" if isinstance(error, GspoError) else "internal error"
    return ApiError(f"{kind}: error {number}, see the terminal of the server", status=500)


async def _events(body: dict[str, Any], data: Mapping[str, Any]) -> AsyncIterator[str]:
    """A response as server-sent events. Every choice comes in one piece, because an engine returns whole
    completions."""
    usage = bool((data.get("stream_options") or {}).get("include_usage"))
    for chunk in responses.chunks(body, usage=usage):
        yield f"data: {json.dumps(chunk)}\n\n"
    yield "data: [DONE]\n\n"
