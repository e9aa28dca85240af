"""Stop strings with tokenizers whose tokens are not characters, against a search one token at a time."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from gspo.rollout.controls import TextControls
from gspo.rollout.engine import EngineContext, Tail
from gspo.rollout.local.sampling import tail_of
from gspo.types import Sampling, StopReason

EOS = 0
TEXT = "</answer> <b>終</b> a\n\nb 😀😀 é < / > x y answer an swer </ans"
STOPS = ("</answer>", "終", " a", "é <", "😀😀", "\n\n")


@cache
def byte_level() -> Any:
    """Byte-level BPE: a character can span several tokens, and a token several characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    merges = [("<", "/"), ("a", "n"), ("s", "w"), ("sw", "e"), ("swe", "r"), ("an", "swer"), ("</", "answer")]
    merges += [("r", ">"), ("Ġ", "a"), (">", "Ġ"), ("Ċ", "Ċ")]
    tokens = ["<eos>", *alphabet, *dict.fromkeys(a + b for a, b in merges)]
    inner.model = models.BPE({token: i for i, token in enumerate(tokens)}, merges)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")


@cache
def sentencepiece() -> Any:
    """As in Llama 2: words begin with a space that is dropped at the start, and unknown characters are bytes."""
    pieces = ["<eos>", *(f"<0x{i:02X}>" for i in range(256)), *"▁abnswerxy</>\n", "▁a", "</", "an", "swer", "answer"]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    merges = [("▁", "a"), ("<", "/"), ("a", "n")]
    inner = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")


TOKENIZERS = {"byte_level": byte_level, "sentencepiece": sentencepiece}


def controls(name: str, **changes: Any) -> TextControls:
    context = EngineContext(model=None, tokenizer=TOKENIZERS[name](), stop_ids=(EOS,))
    return TextControls(context, Sampling(**{"max_tokens": 10**6, "stop": STOPS, **changes}))


def naive_end(name: str, ids: list[int], stops: tuple[str, ...]) -> int | None:
    """The shortest prefix whose text contains a stop string, decoding everything from the start."""
    tokenizer = TOKENIZERS[name]()
    for i in range(len(ids)):
        text = tokenizer.decode(ids[: i + 1], clean_up_tokenization_spaces=False)
        if any(stop in text for stop in stops):
            return i
    return None


def encoded(name: str, text: str) -> list[int]:
    """Tokens of a text; what the vocabulary lacks becomes bytes."""
    tokenizer = TOKENIZERS[name]()
    ids: list[int] = []
    for character in text:
        found = tokenizer.get_vocab().get("▁" if character == " " else character)
        if name == "byte_level":
            ids += tokenizer(character, add_special_tokens=False)["input_ids"]
        elif found is not None:
            ids.append(found)
        else:
            ids += [tokenizer.get_vocab()[f"<0x{byte:02X}>"] for byte in character.encode()]
    return ids


def tokens(name: str) -> st.SearchStrategy[list[int]]:
    """Pieces of text, stop strings and stray tokens, in any order."""
    vocabulary = len(TOKENIZERS[name]().get_vocab())
    pieces = st.one_of(
        st.sampled_from([*TEXT, "answer", "</answer", "an swer>", "終 ", " a", "é", "😀"]).map(
            lambda t: encoded(name, t)
        ),
        st.integers(1, vocabulary - 1).map(lambda i: [i]),
    )
    return st.lists(pieces, max_size=90).map(lambda parts: [i for part in parts for i in part])


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("stops", [("</answer>",), ("終",), ("😀😀", "\n\n"), (" a", "é <"), STOPS], ids=str)
def test_an_end_is_the_first_token_after_which_the_text_contains_a_stop_string(
    name: str, stops: tuple[str, ...]
) -> None:
    rules = controls(name, stop=stops)

    @settings(max_examples=60, deadline=None)
    @given(tokens(name))
    def check(ids: list[int]) -> None:
        (found,) = rules.stop_indices([Tail(ids=ids)])
        assert found == naive_end(name, ids, stops)

    check()


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("every", [1, 5, 16])
def test_searches_in_windows_find_the_same_end(name: str, every: int) -> None:
    """As an engine searches: the last tokens, every few steps, with nothing before the window."""
    text = "x y 終端 answer </ans b 😀 é </answer> a </answer>"
    ids = encoded(name, text)
    rules = controls(name, stop=("</answer>", "😀x"))
    (whole,) = rules.stop_indices([Tail(ids=ids)])
    assert whole == naive_end(name, ids, ("</answer>", "😀x"))
    width = rules.window + every
    found = []
    for count in range(every, len(ids) + 1, every):
        tail = tail_of([ids[0]] * (width - count) + ids[max(0, count - width) : count], count, every, cut=False)
        (index,) = rules.stop_indices([tail])
        found += [] if index is None else [tail.start + index]
    assert found[0] == whole


def test_a_token_may_contain_more_than_the_stop_string() -> None:
    tokenizer = byte_level()
    ids = tokenizer("x</answer y", add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids)[:3] == ["x", "</", "answer"]
    rules = controls("byte_level", stop=("</an",))
    (end,) = rules.ends([ids], [False])
    assert (end.length, end.stop) == (3, StopReason.STOP)
    assert rules.fields(ids, [-1.0] * len(ids), end)["token_ids"] == tuple(ids[:3])


@pytest.mark.parametrize("before", ["日" * 12, "終" + "🙂" * 9])
def test_a_stop_string_is_found_if_the_decoded_window_starts_inside_a_character(before: str) -> None:
    """Byte fallback writes a whole run of byte tokens as invalid if it starts inside a character."""
    for shift in range(4):
        text = "ab"[:shift] + "é" * (shift > 1) + before + "本"
        ids = encoded("sentencepiece", text)
        (end,) = controls("sentencepiece", stop=("本",)).ends([[*ids, *encoded("sentencepiece", "xy")]], [False])
        assert (end.length, end.stop) == (len(ids), StopReason.STOP), shift


def test_only_what_is_completed_after_min_tokens_counts() -> None:
    ids = encoded("byte_level", "ab ab ab")
    for min_tokens, length in ((0, 2), (1, 2), (2, 5), (4, 5), (5, 8), (8, 8)):
        (end,) = controls("byte_level", stop=("ab",), min_tokens=min_tokens).ends([ids], [False])
        assert end.length == length, min_tokens
        assert end.stop is (StopReason.CUT if min_tokens == 8 else StopReason.STOP)


def test_an_end_token_is_an_end_token_whatever_its_name_contains() -> None:
    ids = [*encoded("byte_level", "ab"), EOS]
    (end,) = controls("byte_level", stop=("<eos>",)).ends([ids], [False])
    assert (end.length, end.stop) == (3, StopReason.EOS)


def test_inserted_tokens_neither_end_a_completion_nor_have_log_probs() -> None:
    rules = controls("byte_level", stop=(">x", "k"), thinking_budget=3, thinking_end="</think>")
    forced = list(rules.forced_ids)
    ids = [*encoded("byte_level", "abc"), *forced, *encoded("byte_level", "y>xyz")]
    assert "k" in byte_level().decode(forced)
    (end,) = rules.ends([ids], [True])
    assert end.length == 3 + len(forced) + 3
    fields = rules.fields(ids, [float(-i) for i in range(len(ids))], end)
    assert fields["thinking_cut"]
    assert fields["sampled"] == (*[True] * 3, *[False] * len(forced), *[True] * 3)
    after = 3 + len(forced)
    assert fields["logp_sampler"] == (0, -1, -2, -after, -after - 1, -after - 2)


def test_thinking_is_closed_by_the_text_without_the_whitespace_around_it() -> None:
    rules = controls("byte_level", stop=(), thinking_budget=12, thinking_end="\n</think>\n\n")
    assert byte_level().decode(rules.forced_ids) == "\n</think>\n\n"
    texts = ("ab</think>c", "ab</think", "abcdefg</think>")  # the last is closed after the budget
    assert rules.unclosed([encoded("byte_level", text) for text in texts]) == [False, True, True]
