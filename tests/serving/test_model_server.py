"""The model server, over a real socket: responses, errors, and requests that are sampled together."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from gspo.config import ModelConfig
from gspo.model.load import Policy, char_tokenizer, load_policy
from gspo.rollout.engine import EngineContext, GenerateOptions, build_engine
from gspo.serving.server import ModelServer
from gspo.types import Completion, Prompt, Sampling, StopReason

NAME = "tiny/model"
ALPHABET = "".join(map(chr, range(32, 127))) + "\n"
TOOLS = [
    {
        "type": "function",
        "function": {"name": "half", "description": "", "parameters": {"type": "object", "properties": {}}},
    }
]
HERMES = "{% if tools %}{{ tools[0].function.name }}<tool_call>{% endif %}{% for m in messages %}{{ m.role + ':' }}" + (
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments.of + 1 }}{% endfor %}{{ ';' }}"
    "{% endfor %}{{ mood or '' }}"
)


def policy_with(template: str | None = None) -> Policy:
    tokenizer = char_tokenizer(ALPHABET)
    if template is not None:
        tokenizer.chat_template = template or None
    return load_policy(ModelConfig(build="tiny_dense", device="cpu"), tokenizer, seed=0)


def engine_of(policy: Policy, name: str = "local", **options: Any) -> Any:
    context = EngineContext(model=policy.model, tokenizer=policy.tokenizer, stop_ids=policy.stop_ids)
    return build_engine(name, context, options)


class Api:
    """A server whose work is done in another thread, and requests to it."""

    def __init__(self, server: ModelServer, policy: Policy) -> None:
        self.server = server
        self.policy = policy

    def request(
        self, path: str, body: Any = None, *, method: str = "", headers: Mapping[str, str] | None = None
    ) -> tuple[int, str, Any]:
        """Status, media type and content of a response; the content is decoded if it is JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        given = {"Authorization": f"Bearer {self.server.token}"} if headers is None else dict(headers)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        try:
            connection.request(method or ("GET" if data is None else "POST"), path, body=data, headers=given)
            response = connection.getresponse()
            kind, content = str(response.headers["content-type"]), response.read()
            return response.status, kind, json.loads(content) if kind == "application/json" else content.decode()
        finally:
            connection.close()

    def post(self, path: str, **fields: Any) -> Any:
        """The response to a request that must succeed."""
        status, _, content = self.request(path, {"model": NAME, **fields})
        assert status == 200, content
        return content

    def ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.policy.tokenizer(text, add_special_tokens=False)["input_ids"])

    def logp(self, ids: Sequence[int]) -> list[float]:
        """The log-prob of every token after the first, from a plain forward pass."""
        with torch.no_grad():
            logits = self.policy.model(input_ids=torch.tensor([ids])).logits[0, :-1].float()
        return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1).tolist()


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[..., Api]]:
    """Starts servers and stops them after the tests."""
    over = threading.Event()
    servers: list[tuple[ModelServer, threading.Thread]] = []

    def run(policy: Policy, engine: Any, **options: Any) -> Api:
        server = ModelServer(engine, policy, name=NAME, **{"max_tokens": 12, **options}).__enter__()
        thread = threading.Thread(target=server.work, args=(over.is_set,))
        thread.start()
        servers.append((server, thread))
        return Api(server, policy)

    yield run
    over.set()
    for server, thread in servers:
        thread.join()
        server.__exit__()


@pytest.fixture(scope="module")
def api(start: Callable[..., Api]) -> Api:
    policy = policy_with()
    return start(policy, engine_of(policy))


@pytest.fixture(scope="module")
def scripted(start: Callable[..., Api]) -> Api:
    """A model with tools whose completions are written in advance; the key of a completion does not matter."""
    policy = policy_with(HERMES)
    call = '<tool_call>{"name": "half", "arguments": {"of": 4}}</tool_call>'
    return start(policy, engine_of(policy, "scripted", default=call), max_tokens=200)


# ---- access


def test_every_request_needs_the_token_and_a_loopback_host(api: Api) -> None:
    for path in ("/v1/models", "/v1/completions", "/inference/v1/generate", "/unknown"):
        status, _, content = api.request(path, headers={})
        assert (status, content["error"]["code"]) == (401, "invalid_api_key")
        status, _, _ = api.request(path, headers={"Authorization": f"Bearer {api.server.token}x"})
        assert status == 401
    own = {"Authorization": f"Bearer {api.server.token}"}
    assert api.request("/v1/models", headers=own | {"Host": "evil.example"})[0] == 421
    assert api.request("/v1/models", headers=own | {"Origin": "http://evil.example"})[0] == 403
    assert api.request("/v1/models", headers=own | {"Sec-Fetch-Site": "cross-site"})[0] == 403
    status, _, content = api.request("/v1/completions", headers=own | {"Content-Length": str(2**40)}, method="POST")
    assert status == 413
    assert "bytes" in content["error"]["message"]
    assert api.request("/v1/models")[0] == 200


def test_the_model_is_listed_with_its_positions(api: Api) -> None:
    _, _, content = api.request("/v1/models")
    assert [(m["id"], m["max_model_len"]) for m in content["data"]] == [(NAME, api.policy.position_limit)]
    assert api.request(f"/v1/models/{NAME}")[2]["id"] == NAME
    assert api.request("/v1/models/other")[0] == 404


# ---- completions


def test_a_completion_is_what_the_engine_samples(api: Api) -> None:
    fields = {"prompt": "1+1=", "max_tokens": 8, "seed": 7, "temperature": 1.3}
    first = api.post("/v1/completions", **fields, n=2)
    assert [c["text"] for c in api.post("/v1/completions", **fields, n=2)["choices"]] == [
        c["text"] for c in first["choices"]
    ]
    assert first["choices"][0]["text"] != first["choices"][1]["text"]
    assert first["usage"]["prompt_tokens"] == 4
    other = api.post("/v1/completions", **fields | {"seed": 8})
    assert other["choices"][0]["text"] != first["choices"][0]["text"]
    tokens = api.post("/v1/completions", **fields | {"prompt": list(api.ids("1+1="))})
    assert tokens["choices"][0]["text"] == first["choices"][0]["text"]


def test_greedy_completions_are_the_most_likely_tokens(api: Api) -> None:
    text = api.post("/v1/completions", prompt="1+1=", max_tokens=5, temperature=0)["choices"][0]["text"]
    prompt = Prompt(id="", content="", text="", token_ids=api.ids("1+1="))
    engine = engine_of(api.policy)
    sampling = Sampling(max_tokens=5, temperature=0.0)
    options = GenerateOptions(samples=1, sampling=sampling, seed=0, stream="", version=0)
    expected = engine.generate([prompt], options)
    assert text == expected[0][0].text


def test_requests_that_come_together_are_sampled_together_and_stay_the_same(api: Api) -> None:
    def ask(i: int) -> str:
        answer = api.post("/v1/completions", prompt=f"{i}+{i}=", max_tokens=4 + i % 5, seed=i)
        assert answer["usage"]["completion_tokens"] <= 4 + i % 5
        return str(answer["choices"][0]["text"])

    alone = [ask(i) for i in range(12)]
    rounds = api.server.batcher.rounds
    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(ask, range(12))) == alone
    assert api.server.batcher.rounds - rounds < 12


def test_a_stop_string_ends_the_text_and_is_not_part_of_it(api: Api) -> None:
    whole = api.post("/v1/completions", prompt="1+1=", max_tokens=12, seed=3)["choices"][0]["text"]
    stop = whole[4]
    ended = api.post("/v1/completions", prompt="1+1=", max_tokens=12, seed=3, stop=[stop])["choices"][0]
    assert (ended["text"], ended["finish_reason"]) == (whole[: whole.index(stop)], "stop")
    cut = api.post("/v1/completions", prompt="1+1=", max_tokens=4, seed=3)["choices"][0]
    assert (cut["text"], cut["finish_reason"]) == (whole[:4], "length")


def test_logprobs_of_an_echoed_prompt_are_those_of_a_forward_pass(api: Api) -> None:
    choice = api.post("/v1/completions", prompt="12+34=", max_tokens=3, echo=True, logprobs=2, temperature=0)["choices"]
    found = choice[0]["logprobs"]
    assert choice[0]["text"] == "".join(found["tokens"])
    ids = [api.policy.tokenizer.convert_tokens_to_ids(token) for token in found["tokens"]]
    assert found["token_logprobs"][0] is None
    assert found["token_logprobs"][1:] == pytest.approx(api.logp(ids), abs=1e-4)
    assert found["text_offset"] == list(range(9))
    # A greedy token is the most likely one.
    for token, top in zip(found["tokens"][6:], found["top_logprobs"][6:], strict=True):
        assert max(top, key=top.__getitem__) == token
    alone = api.post("/v1/completions", prompt="12+34=", max_tokens=0, echo=True, logprobs=1)["choices"][0]
    assert alone["text"] == "12+34="
    assert alone["logprobs"]["token_logprobs"][1:] == pytest.approx(found["token_logprobs"][1:6], abs=1e-4)


def test_several_prompts_are_answered_in_their_order(api: Api) -> None:
    done = api.post("/v1/completions", prompt=["1", "22", "333"], n=2, max_tokens=1, echo=True, seed=1)
    expected = ["1", "1", "22", "22", "333", "333"]
    assert [choice["index"] for choice in done["choices"]] == list(range(6))
    assert all(c["text"].startswith(text) for c, text in zip(done["choices"], expected, strict=True))
    assert all(len(c["text"]) <= len(text) + 1 for c, text in zip(done["choices"], expected, strict=True))


# ---- chats


def test_a_chat_goes_through_the_chat_template(api: Api) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "2+2"}]}]
    chat = api.post("/v1/chat/completions", messages=messages, max_tokens=6, seed=5, logprobs=True, top_logprobs=3)
    text = api.policy.tokenizer.apply_chat_template([{"role": "user", "content": "2+2"}], tokenize=False)
    prompt_ids = api.ids(f"{text}<assistant>")
    assert chat["usage"]["prompt_tokens"] == len(prompt_ids)
    plain = api.post("/v1/completions", prompt=list(prompt_ids), max_tokens=6, seed=5)["choices"][0]
    assert chat["choices"][0]["message"]["content"] == plain["text"]
    content = chat["choices"][0]["logprobs"]["content"]
    ids = [api.policy.tokenizer.convert_tokens_to_ids(entry["token"]) for entry in content]
    expected = api.logp([*prompt_ids, *ids])[len(prompt_ids) - 1 :]
    assert [entry["logprob"] for entry in content] == pytest.approx(expected, abs=1e-4)
    assert all(len(entry["top_logprobs"]) == 3 for entry in content)


def test_tools_and_template_variables_reach_the_template_and_calls_are_parsed(scripted: Api) -> None:
    before = {"id": "c1", "type": "function", "function": {"name": "half", "arguments": '{"of": 41}'}}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [before]},
        {"role": "tool", "tool_call_id": "c1", "content": "21"},
    ]
    fields = {"messages": messages, "tools": TOOLS, "chat_template_kwargs": {"mood": "calm"}}
    chat = scripted.post("/v1/chat/completions", **fields)
    prompt = "half<tool_call>user:go;assistant:42;tool:21;calm"
    assert chat["usage"]["prompt_tokens"] == len(scripted.ids(prompt))
    choice = chat["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("half", {"of": 4})
    assert choice["message"]["content"] is None
    unused = scripted.post("/v1/chat/completions", **fields, tool_choice="none")["choices"][0]
    assert unused["message"]["content"].startswith("<tool_call>")
    assert unused["finish_reason"] == "stop"


def test_a_call_may_contain_what_no_text_can(start: Callable[..., Api]) -> None:
    policy = policy_with(HERMES)
    call = '<tool_call>{"name": "half", "arguments": {"of": "\\ud800"}}</tool_call>'
    api = start(policy, engine_of(policy, "scripted", default=call), max_tokens=200)
    chat = api.post("/v1/chat/completions", messages=[{"role": "user", "content": "4"}], tools=TOOLS)
    (made,) = chat["choices"][0]["message"]["tool_calls"]
    assert made["function"]["arguments"] == '{"of": "\\ud800"}'


def test_a_stream_has_the_same_content(api: Api, scripted: Api) -> None:
    fields = {"model": NAME, "prompt": "1+1=", "max_tokens": 6, "seed": 2}
    whole = api.post("/v1/completions", **fields)["choices"][0]["text"]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    status, kind, content = api.request("/v1/completions", fields | options)
    assert (status, kind.partition(";")[0]) == (200, "text/event-stream")
    *events, last = [line.removeprefix("data: ") for line in content.split("\n\n") if line]
    chunks = [json.loads(event) for event in events]
    assert last == "[DONE]"
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == whole
    assert chunks[-1]["usage"]["prompt_tokens"] == 4
    chat = {"model": NAME, "messages": [{"role": "user", "content": "go"}], "tools": TOOLS, "stream": True}
    _, _, content = scripted.request("/v1/chat/completions", chat)
    first, second = [json.loads(line[6:])["choices"][0] for line in content.split("\n\n")[:2]]
    assert first["delta"]["tool_calls"][0]["index"] == 0
    assert (first["finish_reason"], second["finish_reason"]) == (None, "tool_calls")


# ---- tokens in and out


def test_tokens_come_with_the_log_probs_that_they_were_sampled_with(api: Api) -> None:
    ids = api.ids("1+1=")
    options = {"max_tokens": 6, "temperature": 2.0, "logprobs": 1, "skip_special_tokens": False, "seed": 4}
    done = api.post("/inference/v1/generate", token_ids=list(ids), sampling_params=options)
    (choice,) = done["choices"]
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{i}" for i in choice["token_ids"]]
    with torch.no_grad():
        logits = api.policy.model(input_ids=torch.tensor([[*ids, *choice["token_ids"]]])).logits[0].float() / 2.0
    logp = logits.log_softmax(-1)[len(ids) - 1 : -1].gather(1, torch.tensor(choice["token_ids"])[:, None]).squeeze(1)
    assert [entry["logprob"] for entry in content] == pytest.approx(logp.tolist(), abs=1e-4)
    # A stop token of the request ends it, and is part of it.
    token = choice["token_ids"][2]
    ended = api.post(
        "/inference/v1/generate", token_ids=list(ids), sampling_params={**options, "stop_token_ids": [token]}
    )["choices"][0]
    first = choice["token_ids"].index(token)
    assert (ended["token_ids"], ended["finish_reason"]) == (choice["token_ids"][: first + 1], "stop")
    assert ended["logprobs"]["content"] == content[: first + 1]


# ---- errors

WRONG = [
    ("/v1/completions", {"prompt": "1", "presence_penalty": 0.5}, "presence_penalty"),
    ("/v1/completions", {"prompt": "1", "typical_p": 0.5}, "typical_p"),
    ("/v1/completions", {"prompt": "1", "best_of": 3}, "best_of"),
    ("/v1/completions", {"prompt": "1", "n": 0}, "n"),
    ("/v1/completions", {"prompt": "1", "max_tokens": True}, "max_tokens"),
    ("/v1/completions", {"prompt": "1", "temperature": "hot"}, "temperature"),
    ("/v1/completions", {"prompt": "1", "stop": [1]}, "stop"),
    ("/v1/completions", {"prompt": []}, "prompt"),
    ("/v1/completions", {"prompt": ""}, "prompt"),
    ("/v1/completions", {"prompt": [10**6]}, "prompt"),
    ("/v1/completions", {"prompt": "1", "max_tokens": 100_000}, "max_tokens"),
    ("/v1/completions", {"prompt": "1" * 10**6}, "prompt"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "1" * 10**6}]}, "messages"),
    ("/v1/chat/completions", {}, "messages"),
    ("/v1/chat/completions", {"messages": [{"content": "no role"}]}, "messages[0]"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content",
    ),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "1"}], "top_logprobs": 2}, "top_logprobs"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "1"}], "tools": TOOLS}, "tools"),
    ("/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages[0].tool_calls"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "1"}], "chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        "chat_template_kwargs",
    ),
    ("/v1/completions", {"prompt": "1", "stream": True, "stream_options": 5}, "stream_options"),
    ("/inference/v1/generate", {"token_ids": []}, "token_ids"),
    ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"min_p": 0.1}}, "sampling_params.min_p"),
]


@pytest.mark.parametrize(("path", "fields", "param"), WRONG)
def test_a_request_that_cannot_be_served_is_an_error_that_names_the_field(
    api: Api, path: str, fields: dict[str, Any], param: str
) -> None:
    status, _, content = api.request(path, {"model": NAME, **fields})
    assert status == 400, content
    assert content["error"]["type"] == "invalid_request_error"
    assert content["error"]["param"] == param
    assert (
        param.split(".")[-1].split("[")[0] in content["error"]["message"] or "positions" in content["error"]["message"]
    )


def test_other_errors_have_the_same_form(api: Api, start: Callable[..., Api]) -> None:
    assert api.request("/v1/completions", {"model": "other", "prompt": "1"})[2]["error"]["code"] == "model_not_found"
    assert api.request("/v1/completions", b"{")[0] == 400
    assert api.request("/v1/completions", b"[]")[0] == 400
    # Half of a surrogate pair, escaped and as bytes: no tokenizer accepts it, and no response can repeat it.
    for half in (b"\\ud800", b"\xed\xa0\x80"):
        for field in (b'"prompt": "%s"', b'"prompt": "1", "stop": "%s"', b'"prompt": "1", "%s": 1'):
            body = b'{"model": "%s", %s}' % (NAME.encode(), field % half)
            status, _, content = api.request("/v1/completions", body)
            assert (status, content["error"]["type"]) == (400, "invalid_request_error"), body
    assert api.request("/v1/completions", b'{"model": "%s", "prompt": "\\ud83d\\ude00"}' % NAME.encode())[0] == 200
    assert api.request("/v1/completions")[0] == 405
    assert api.request("/v1/nothing", {})[0] == 404
    # Neutral values of what is not supported, and what changes nothing, are accepted.
    api.post("/v1/completions", prompt="1", presence_penalty=0, logit_bias={}, user="me", suffix=None)
    policy = policy_with("")
    bare = start(policy, engine_of(policy))
    status, _, content = bare.request("/v1/chat/completions", {"model": NAME, "messages": [{"role": "user"}]})
    assert status == 400
    assert "no chat template" in content["error"]["message"]


class FailingEngine:
    """Fails once, then answers with an empty completion."""

    def __init__(self) -> None:
        self.failed = False

    def generate(self, prompts: Sequence[Prompt], options: GenerateOptions) -> list[list[Completion]]:
        if not self.failed:
            self.failed = True
            raise RuntimeError("the secret of the engine")
        empty = Completion(
            prompt_id="", sample=0, token_ids=(), text="", logp_sampler=(), stop=StopReason.EOS, version=options.version
        )
        return [[replace(empty, prompt_id=prompt.id)] for prompt in prompts]


def test_a_failure_of_the_engine_is_an_error_and_the_server_continues(
    start: Callable[..., Api], capsys: pytest.CaptureFixture[str]
) -> None:
    api = start(policy_with(), FailingEngine())
    status, _, content = api.request("/v1/completions", {"model": NAME, "prompt": "1"})
    assert (status, content["error"]["type"]) == (500, "server_error")
    assert "secret" not in content["error"]["message"]
    assert "the secret of the engine" in capsys.readouterr().err
    assert api.post("/v1/completions", prompt="1")["choices"][0]["finish_reason"] == "stop"


def test_the_client_of_openai_works(api: Api) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=api.server.address, api_key=api.server.token)
    assert [model.id for model in client.models.list()] == [NAME]
    messages = [{"role": "user", "content": "1"}]
    chat = client.chat.completions.create(model=NAME, messages=messages, seed=1, logprobs=True)
    stream = client.chat.completions.create(model=NAME, messages=messages, seed=1, stream=True)
    parts = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(parts) == chat.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="presence_penalty"):
        client.completions.create(model=NAME, prompt="1", presence_penalty=1)
