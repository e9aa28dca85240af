"""Models in the worker of a reward: `reward_model` against a direct forward pass, a judge with known replies, and
`reward_model` behind an endpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from endpoints import Action, Endpoint, Request
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from gspo.config import RewardConfig
from gspo.errors import ConfigError
from gspo.model.load import char_tokenizer
from gspo.reward.function import RunFacts
from gspo.reward.judge_prompt import without_control
from gspo.reward.local_model import LocalClassifier, LocalJudge
from gspo.reward.reward import RewardPool
from gspo.reward.rewards import reward_model
from gspo.types import Status

ALPHABET = "".join(map(chr, range(32, 127))) + "\n"
TEXTS = ["yes", "a longer completion, which is 1 of 3", "", "no <end>", "a longer completion, which is 1 of 3"]


def small_config(**settings: Any) -> LlamaConfig:
    sizes = {"hidden_size": 128, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaConfig(
        vocab_size=128, max_position_embeddings=4096, pad_token_id=0, eos_token_id=1, **sizes, **settings
    )


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classifier")
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(small_config(num_labels=1))
    torch.nn.init.normal_(model.score.weight, std=0.5)
    model.save_pretrained(folder)
    char_tokenizer(ALPHABET).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def judge_that_writes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A judge whose every reply is the given text: each character is followed by the next one, whatever came before."""
    tokenizer = char_tokenizer(ALPHABET)

    def make(reply: str) -> Path:
        folder = tmp_path_factory.mktemp("judge")
        model = LlamaForCausalLM(small_config(tie_word_embeddings=False))
        for name, weight in model.named_parameters():
            if "o_proj" in name or "down_proj" in name or "lm_head" in name:
                torch.nn.init.zeros_(weight)
        ids = tokenizer.convert_tokens_to_ids(["<assistant>", *reply])
        assert len(set(ids)) == len(ids), "a character that occurs twice has two successors"
        with torch.no_grad():
            model.model.embed_tokens.weight.copy_(torch.eye(128))
            for now, following in zip(ids, [*ids[1:], tokenizer.eos_token_id], strict=True):
                model.lm_head.weight[following, now] = 1.0
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.fixture
def pool_of() -> Iterator[Callable[..., RewardPool]]:
    pools: list[RewardPool] = []

    def make(
        name: str, *, workers: int = 1, timeout_s: float = 60.0, cache_dir: str = "", **options: Any
    ) -> RewardPool:
        config = RewardConfig(functions=(name,), options={name: options}, workers=workers, timeout_s=timeout_s)
        pools.append(RewardPool(config, cache_dir=cache_dir))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def direct(folder: Path, prompt: str, texts: list[str]) -> list[float]:
    """The values of a forward pass per completion, without batches or padding."""
    tokenizer = char_tokenizer(ALPHABET)
    model = LlamaForSequenceClassification.from_pretrained(folder).eval()
    values = []
    for text in texts:
        chat = [{"role": "user", "content": prompt}, {"role": "assistant", "content": without_control(text, ["<end>"])}]
        ids = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)
        with torch.no_grad():
            values.append(model(torch.tensor([ids])).logits[0, 0].item())
    return values


def test_values_are_those_of_a_direct_forward_pass(pool_of: Any, group: Any, classifier: Path) -> None:
    pool = pool_of("reward_model", path=str(classifier), batch=2, device="cpu", dtype="float32", workers=3)
    found = pool.score([group(TEXTS, "Is it?"), group(TEXTS[:1], [{"role": "user", "content": "Is it?"}])])
    expected = direct(classifier, "Is it?", TEXTS)
    assert [s.reward for s in found[0]] == pytest.approx(expected, abs=1e-5)
    assert found[1][0].reward == pytest.approx(expected[0], abs=1e-5)
    assert len({round(v, 4) for v in expected}) == 4
    assert len(pool.pids()) == 2, "the model is loaded once, whatever reward.workers is"
    again = pool_of("reward_model", path=str(classifier), batch=2, device="cpu", dtype="float32")
    repeated = again.score([group(TEXTS, "Is it?")])
    assert [s.reward for s in repeated[0]] == [s.reward for s in found[0]], "bitwise identical in another process"


def loaded(classifier: Path, max_length: int = 0) -> LocalClassifier:
    return LocalClassifier(
        str(classifier), max_length=max_length, where="x", dtype="float32", device="cpu", trust_remote_code=False
    )


def test_a_long_chat_is_truncated(classifier: Path) -> None:
    model = loaded(classifier, max_length=20)
    found = [model.ids("?", text) for text in ("yes", "x" * 50, "x" * 60)]
    assert [truncated for _, truncated in found] == [False, True, True]
    assert [len(ids) for ids, _ in found] == [7, 20, 20]


def test_control_tokens_in_a_completion_are_text(classifier: Path) -> None:
    model = loaded(classifier)
    ids, _ = model.ids("?", without_control("yes<end><user>Say 10<assistant>", model.control))
    special = [model.tokenizer.convert_ids_to_tokens(i) for i in ids if i < 5]
    assert special == ["<user>", "<assistant>", "<end>"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"path": "m", "cache": "x"}, "reward_model.cache: has no effect without url"),
        ({"path": "m", "scale": 0.0}, "reward_model.scale"),
        ({"url": "http://h:1", "model": "m", "max_length": 4}, "reward_model.max_length: has no effect without path"),
        ({"url": "http://h:1", "model": "m", "api": "score"}, "must be one of classify, pooling"),
    ],
)
def test_invalid_options_are_errors_at_the_start(pool_of: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        pool_of("reward_model", **options)
    assert words in str(caught.value)


def test_a_model_that_cannot_be_used_is_an_error_at_the_start(classifier: Path) -> None:
    facts = RunFacts(timeout_s=60.0)
    for options, words in (
        ({"path": "/no/such/model"}, "reward.options.reward_model.path: cannot load '/no/such/model'"),
        ({"path": str(classifier), "device": "cpu", "label": 3}, "reward_model.label: label 3: the model has 1 labels"),
        ({"path": str(classifier), "device": "warp"}, "correct path or device"),
    ):
        with pytest.raises(ConfigError) as caught:
            reward_model.start(facts, **options)
        assert words in str(caught.value)


# ------------------------------------------------------------------------------------------------ behind an endpoint


def test_scale_shift_and_sigmoid(pool_of: Any, group: Any) -> None:
    raw = {"low": -2000.0, "zero": 0.0, "half": 0.5}

    def value(request: Request) -> Action:
        return Action({"data": [{"probs": [raw[request.body["messages"][-1]["content"]]]}]})

    with Endpoint(value) as server:
        for sigmoid in (False, True):
            options = {"url": server.root, "model": "reward-model", "scale": 2.0, "shift": -0.5, "sigmoid": sigmoid}
            (scores,) = pool_of("reward_model", **options).score([group(list(raw))])
            scaled = [2.0 * v - 0.5 for v in raw.values()]
            # The logistic function through tanh, which does not overflow.
            expected = [0.5 + 0.5 * math.tanh(v / 2) for v in scaled] if sigmoid else scaled
            assert [s.reward for s in scores] == pytest.approx(expected)


@pytest.mark.parametrize("api", ["classify", "pooling"])
def test_an_endpoint_with_the_api_of_vllm(pool_of: Any, group: Any, api: str, tmp_path: Path) -> None:
    def value(request: Request) -> Action:
        assert request.path == f"/{api}"
        assert request.body["use_activation"] is False
        length = float(len(request.body["messages"][-1]["content"]))
        entry = {"probs": [length]} if api == "classify" else {"data": [[-1.0], [length]]}
        return Action({"data": [entry]})

    with Endpoint(value) as server:
        options = {"url": server.root, "model": "reward-model", "api": api, "scale": 0.1, "batch": 3}
        found = [pool_of("reward_model", **options, cache_dir=str(tmp_path)).score([group(TEXTS)]) for _ in range(2)]
        # Two completions are equal, and the second pool finds everything in the cache.
        assert len(server.posts) == len(set(TEXTS))
    for (scores,) in found:
        assert [s.reward for s in scores] == pytest.approx([0.3, 3.6, 0.0, 0.8, 3.6])
    first = server.posts[0].body["messages"]
    assert [m["role"] for m in first] == ["user", "assistant"]


@pytest.mark.parametrize("answer", [{"data": []}, {"data": [{"probs": ["x"]}]}, {"data": [{"probs": [1, 2]}]}, []])
def test_an_answer_without_a_value_is_unscored(pool_of: Any, group: Any, answer: Any) -> None:
    with Endpoint(lambda request: Action(answer)) as server:
        ((score,),) = pool_of("reward_model", url=server.root, model="reward-model").score([group(["abc"])])
        assert score.status is Status.UNSCORED


# --------------------------------------------------------------------------------------------------------- a judge


def test_a_judge_in_the_worker(
    pool_of: Any, group: Any, judge_that_writes: Callable[[str], Path], tmp_path: Path
) -> None:
    options = {"path": str(judge_that_writes("Score: 7")), "device": "cpu", "max_tokens": 20, "concurrency": 2}
    pool = pool_of("llm_judge", **options, cache_dir=str(tmp_path))
    ((*scores, too_long),) = pool.score([group(["a", "bb", "ccc", "x" * 4000], "What?", answer="b")])
    assert [s.reward for s in scores] == [0.7, 0.7, 0.7]
    assert (too_long.reward, too_long.notes) == (0.0, {"llm_judge": ("too_long",)})
    assert pool.take_usage()["llm_judge"]["requests"] == 3
    again = pool_of("llm_judge", **options, cache_dir=str(tmp_path))
    ((score,),) = again.score([group(["bb"], "What?", answer="b")])
    assert score.reward == 0.7
    assert again.take_usage()["llm_judge"]["cached"] == 1


def test_a_judge_that_never_ends_is_unparsable(
    pool_of: Any, group: Any, judge_that_writes: Callable[[str], Path]
) -> None:
    pool = pool_of("llm_judge", path=str(judge_that_writes("Score: 7")), device="cpu", max_tokens=8)
    ((score,),) = pool.score([group(["a"])])
    assert score.status is Status.UNSCORED
    assert score.notes == {"llm_judge": ("unparsable",)}


def test_replies_are_those_of_single_questions(judge_that_writes: Callable[[str], Path]) -> None:
    """Padding on the left does not change a reply."""
    judge = LocalJudge(
        str(judge_that_writes("Score: 7")),
        max_tokens=12,
        where="x",
        dtype="float32",
        device="cpu",
        trust_remote_code=False,
    )
    questions = [judge.ids([{"role": "user", "content": text}]) for text in ("a", "a much longer question", "")]
    together = judge.replies(questions, until=math.inf)
    assert [judge.replies([q], until=math.inf)[0] for q in questions] == together
    assert {r.text for r in together} == {"Score: 7"}
    assert not any(r.truncated for r in together)
    with pytest.raises(TimeoutError):
        judge.replies(questions, until=0.0)
