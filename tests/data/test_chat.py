"""The model's input: chat template or raw text, special tokens exactly once."""

from __future__ import annotations

import json
import re

import pytest
from tokenizers import Regex
from tokenizers.normalizers import Replace
from tokenizers.pre_tokenizers import Split

from gspo.config import DataConfig
from gspo.data.chat import render, render_all
from gspo.data.problems import load_problems
from gspo.errors import ConfigError, DataError

CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1"}]


def test_text_is_wrapped_in_the_template(chat_tokenizer):
    text, ids = render("1+1", chat_tokenizer, chat="auto")
    assert text == "<user>1+1\n<assistant>"
    assert ids == tuple(chat_tokenizer(text, add_special_tokens=False)["input_ids"])
    assert render("1+1", chat_tokenizer, chat="yes") == (text, ids)


def test_text_stays_raw_without_a_template_or_by_setting(plain_tokenizer, chat_tokenizer):
    assert render("1+1", plain_tokenizer, chat="auto")[0] == "1+1"
    assert render("1+1", chat_tokenizer, chat="no")[0] == "1+1"


def test_messages_keep_their_roles(chat_tokenizer):
    assert render(CHAT, chat_tokenizer, chat="auto")[0] == "<system>be brief\n<user>1+1\n<assistant>"


def test_chat_yes_without_template_names_the_setting(plain_tokenizer):
    with pytest.raises(ConfigError, match=r"data\.chat=yes: .* no chat template"):
        render("1+1", plain_tokenizer, chat="yes")


def test_messages_need_a_template(plain_tokenizer, chat_tokenizer):
    with pytest.raises(ConfigError, match=r"no chat template; use a chat model"):
        render(CHAT, plain_tokenizer, chat="auto")
    with pytest.raises(ConfigError, match=r"data\.chat=no: .*set data\.chat=auto"):
        render(CHAT, chat_tokenizer, chat="no")


def test_raw_text_has_bos_but_never_ends_in_eos(make_tokenizer):
    plain = make_tokenizer()("ab")["input_ids"]
    assert render("ab", make_tokenizer(bos=True, eos=True), chat="auto")[1] == (1, *plain)
    assert render("ab", make_tokenizer(bos=True), chat="auto")[1] == (1, *plain)


def test_template_adds_its_own_special_tokens_only(make_tokenizer):
    tokenizer = make_tokenizer(template="{{ messages[0].content }}", bos=True, eos=True)
    assert render("ab", tokenizer, chat="auto")[1] == tuple(make_tokenizer()("ab")["input_ids"])


def test_a_prompt_that_the_template_refuses_comes_back_as_its_error(chat_tokenizer):
    bad = [{"role": "forbidden", "content": "x"}]
    with pytest.raises(DataError, match="refuses it: no such role"):
        render(bad, chat_tokenizer, chat="auto")
    first, second, third = render_all(["a", bad, CHAT], chat_tokenizer, chat="auto")
    assert isinstance(second, DataError)
    assert first == render("a", chat_tokenizer, chat="auto")
    assert third == render(CHAT, chat_tokenizer, chat="auto")


def test_many_prompts_render_as_one_at_a_time(plain_tokenizer):
    texts = ["a", "", "abc d"]
    assert render_all(texts, plain_tokenizer, chat="auto") == [render(t, plain_tokenizer, chat="auto") for t in texts]
    assert render_all([], plain_tokenizer, chat="auto") == []


ENDLESS = {
    "loops": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}"
        "{% endfor %}{% endfor %}{% endfor %}"
    ),
    "one operation": "{% set x = 10 ** 9000000 // 7 ** 6000000 %}",
}


@pytest.mark.parametrize("name", list(ENDLESS))
def test_an_endless_template_is_an_error_that_names_the_model(make_tokenizer, monkeypatch, name):
    monkeypatch.setattr("gspo.data.chat.MOST_SECONDS", 1)
    tokenizer = make_tokenizer(template=ENDLESS[name])
    tokenizer.name_or_path = "some/model"
    with pytest.raises(
        ConfigError, match=r"some/model: the chat template takes more than 1 s .* prompt 1; fix chat_te"
    ):
        render_all(["a", "b"], tokenizer, chat="auto")


@pytest.mark.parametrize(
    "template", ["{{ 'x' * 10 ** 10 }}", "{{ ('x' * 10 ** 8) | center(10 ** 10) }}", "{{ 'x' * 10 ** 8 }}"]
)
def test_a_template_that_allocates_too_much_memory_is_refused(make_tokenizer, template):
    done = render_all(["a", "b"], make_tokenizer(template=template), chat="auto")
    assert all(isinstance(row, DataError) for row in done)
    assert re.search(r"memory|characters|refuses", str(done[0]))


@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_template_with_a_syntax_error_is_one_error_that_names_its_file(make_tokenizer, tmp_path, file):
    tokenizer = make_tokenizer(template="{% for m in messages %}\n{{ m.content }")
    tokenizer.name_or_path = str(tmp_path)
    (tmp_path / file).touch()
    with pytest.raises(
        ConfigError, match=rf"{tmp_path}/{file}.*: the chat template cannot be read: line 2: .*data.chat=no"
    ):
        render_all(["a", "b"], tokenizer, chat="auto")
    with pytest.raises(
        ConfigError, match="the chat template cannot be read"
    ):  # before the file, which is not there, is read
        load_problems(DataConfig(path=str(tmp_path / "missing.jsonl")), tokenizer, 0)


@pytest.mark.parametrize("place", ["pre_tokenizer", "normalizer"])
def test_a_pattern_of_a_tokenizer_that_backtracks_without_end_is_an_error(make_tokenizer, place):
    pattern = Regex("(a+)+b|(a|a)*c")
    tokenizer = make_tokenizer()
    made = Split(pattern, "isolated") if place == "pre_tokenizer" else Replace(pattern, "x")
    setattr(tokenizer.backend_tokenizer, place, made)
    with pytest.raises(ConfigError, match=r"its tokenizer cannot read a prompt: .*retry-limit"):
        render_all(["a" * 200], tokenizer, chat="auto")


def test_a_range_without_end_is_refused(make_tokenizer):
    done = render_all(["a"], make_tokenizer(template="{% for i in range(10 ** 12) %}{% endfor %}"), chat="auto")
    assert "the chat template refuses it: Range too big" in str(done[0])


def test_the_error_names_the_prompt_that_kills_the_template_process(make_tokenizer, monkeypatch):
    monkeypatch.setattr("gspo.data.chat.MOST_SECONDS", 1)
    template = f"{{% if messages[0].content == 'b' %}}{ENDLESS['loops']}{{% endif %}}ok"
    with pytest.raises(ConfigError, match="for prompt 3"):
        render_all(["a", "c", "b", "a"], make_tokenizer(template=template), chat="auto")


def test_the_template_process_returns_any_text_unchanged(chat_tokenizer):
    for text in ("a\nb\r\n\t", "\u2028 \x00 \x85", "東京 👩", '"quotes" \\ {{ x }}', ""):
        assert render_all([text], chat_tokenizer, chat="auto")[0][0] == render(text, chat_tokenizer, chat="auto")[0]
        assert text in render_all([text], chat_tokenizer, chat="auto")[0][0]


def test_a_tokenizer_that_panics_is_an_error_that_names_the_model(make_tokenizer):
    from tokenizers import Tokenizer

    tokenizer = make_tokenizer(bos=True)
    inner = json.loads(tokenizer.backend_tokenizer.to_str())
    inner["post_processor"]["special_tokens"] = {}
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(inner))
    tokenizer.name_or_path = "some/model"
    with pytest.raises(ConfigError, match=r"some/model: its tokenizer cannot read a prompt.*tokenizer.json is damaged"):
        render_all(["a"], tokenizer, chat="auto")
