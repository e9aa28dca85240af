"""What the model reads: chat template or raw text, special tokens once."""

from __future__ import annotations

import pytest

from gspo.data.chat import render, render_all
from gspo.errors import ConfigError, DataError

CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1"}]


def test_text_is_wrapped_when_there_is_a_template(chat_tokenizer):
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


def test_what_the_template_refuses_comes_back_in_its_place(chat_tokenizer):
    bad = [{"role": "forbidden", "content": "x"}]
    with pytest.raises(DataError, match="refuses it: no such role"):
        render(bad, chat_tokenizer, chat="auto")
    first, second, third = render_all(["a", bad, CHAT], chat_tokenizer, chat="auto")
    assert isinstance(second, DataError)
    assert first == render("a", chat_tokenizer, chat="auto")
    assert third == render(CHAT, chat_tokenizer, chat="auto")


def test_many_is_one_at_a_time(plain_tokenizer):
    texts = ["a", "", "abc d"]
    assert render_all(texts, plain_tokenizer, chat="auto") == [render(t, plain_tokenizer, chat="auto") for t in texts]
    assert render_all([], plain_tokenizer, chat="auto") == []
