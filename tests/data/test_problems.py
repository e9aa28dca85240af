"""Problems from files, the hub and tasks: bad rows are named, held-out problems are separate, the order resumes."""

from __future__ import annotations

import csv
import datetime
import gzip
import json
import re
import time
from decimal import Decimal
from itertools import islice

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.config import DataConfig
from gspo.data import sources
from gspo.data.order import PromptOrder
from gspo.data.problems import demonstrations, fresh_problems, load_problems, with_instructions
from gspo.errors import ConfigError, DataError

ROWS = [{"prompt": f"{i}+{i}", "answer": str(2 * i), "level": i} for i in range(20)]


def write_jsonl(path, rows):
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def load(plain_tokenizer):
    """Load problems; nothing is held out by default."""

    def run(path="", *, tokenizer=None, seed=0, **settings):
        config = DataConfig(path=str(path), **{"held_out": 0, **settings})
        return load_problems(config, tokenizer or plain_tokenizer, seed)

    return run


# ------------------------------------------------------------------------------------------------- formats


def write_csv(path):
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["prompt", "answer", "level"])
        writer.writeheader()
        writer.writerows(ROWS)


def write_parquet(path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)


WRITERS = {
    "d.jsonl": lambda path: write_jsonl(path, ROWS),
    "d.json": lambda path: path.write_text(json.dumps(ROWS)),
    "wrapped.json": lambda path: path.write_text(json.dumps({"version": 1, "data": ROWS})),
    "d.csv": write_csv,
    "d.parquet": write_parquet,
}


@pytest.mark.parametrize("compressed", ["", ".gz", "bom", "bom.gz"])
@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_problems(tmp_path, load, name, compressed):
    path = tmp_path / name
    WRITERS[name](path)
    if compressed and name.endswith("parquet"):
        pytest.skip("parquet is binary and compresses itself")
    data = (b"\xef\xbb\xbf" if "bom" in compressed else b"") + path.read_bytes()
    if compressed.endswith(".gz"):
        path = tmp_path / f"{name}.gz"
        data = gzip.compress(data)
    path.write_bytes(data)
    problems = load(path)
    levels = map(str, range(20)) if "csv" in name else range(20)
    assert [(p.id, p.content, p.columns) for p in problems.train] == [
        (f"train/{i}", f"{i}+{i}", {"answer": str(2 * i), "level": level}) for i, level in enumerate(levels)
    ]
    assert problems.train[3].text == "3+3"
    assert len(problems.train[3].token_ids) == 3


def test_hub_dataset(tmp_path, load):
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    problems = load(hub=str(tmp_path))
    assert [p.content for p in problems.train] == [row["prompt"] for row in ROWS]
    with pytest.raises(DataError, match=r"data\.hub=.*data\.split=nosuch"):
        load(hub=str(tmp_path), split="nosuch")
    with pytest.raises(DataError, match=rf"{tmp_path}: row 1: field 'question': missing, the row has: prompt"):
        load(hub=str(tmp_path), prompt_field="question")


def test_without_a_network_a_hub_dataset_is_refused_without_a_request(load, monkeypatch):
    def refuse(*given, **options):
        raise AssertionError("a request was made")

    monkeypatch.setattr(sources, "unreachable_host", lambda: "hub.invalid")
    monkeypatch.setattr("socket.getaddrinfo", refuse)
    monkeypatch.setattr("socket.socket.connect", refuse)
    with pytest.raises(DataError, match=r"someone/nothing: is not in the cache .* and hub\.invalid cannot be reached"):
        load(hub="someone/nothing")
    assert not datasets.config.HF_HUB_OFFLINE


def test_without_a_network_the_cached_copy_of_a_hub_dataset_is_read(load, monkeypatch):
    def load_dataset(name, config, *, split):
        assert datasets.config.HF_HUB_OFFLINE, "with this set, datasets reads its cache and makes no request"
        return ROWS

    monkeypatch.setattr(sources, "unreachable_host", lambda: "hub.invalid")
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert len(load(hub="someone/something").train) == 20


def test_parquet_values_become_json_values(tmp_path, load):
    import pyarrow
    import pyarrow.parquet

    row = {
        "prompt": "1+1",
        "answer": Decimal("2.50"),
        "when": datetime.datetime(2024, 5, 1, 12, 30),
        "day": datetime.date(2024, 5, 1),
        "text": b"abc",
        "binary": b"\xff\x00",
        "list": [1.5, None],
        "nested": {"a": [datetime.date(2024, 5, 1)]},
        "nothing": None,
    }
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "d.parquet")
    (prompt,) = load(tmp_path / "d.parquet").train
    assert prompt.columns == {
        "answer": "2.50",
        "when": "2024-05-01T12:30:00",
        "day": "2024-05-01",
        "text": "abc",
        "binary": "/wA=",
        "list": [1.5, None],
        "nested": {"a": ["2024-05-01"]},
        "nothing": None,
    }
    json.dumps(prompt.columns)


def test_numpy_values_become_json_values():
    import numpy as np

    from gspo.data.sources import plain

    value = {"a": np.arange(3), "b": np.float32(0.5), "c": np.array(["x"], dtype=object), "d": np.bool_(True)}
    assert plain(value) == {"a": [0, 1, 2], "b": 0.5, "c": ["x"], "d": True}
    assert json.dumps(plain(value)) == '{"a": [0, 1, 2], "b": 0.5, "c": ["x"], "d": true}'


def test_jsonl_oddities_are_tolerated(tmp_path, load):
    path = tmp_path / "d.jsonl"
    line = '{"prompt": "a\u2028b", "answer": NaN, "answer": 3}'
    path.write_text(f"\n{line}\r\n\n  \n{line}", encoding="utf-8")
    problems = load(path)
    assert [(p.id, p.content, p.columns) for p in problems.train] == [
        ("train/0", "a\u2028b", {"answer": 3}),
        ("train/1", "a\u2028b", {"answer": 3}),
    ]


def test_csv_with_large_and_multi_line_cells(tmp_path, load):
    limit = csv.field_size_limit()
    path = tmp_path / "d.csv"
    path.write_text(f'prompt,answer\n"two\nlines",1\n\n"{"x" * 140_000}",2\nq,\n', encoding="utf-8")
    problems = load(path, on_bad_row="skip", max_prompt_tokens=300_000)
    assert [len(p.content) for p in problems.train] == [9, 140_000]
    with pytest.raises(DataError, match=rf"{path}:6: field 'answer': empty"):
        load(path, max_prompt_tokens=300_000)
    assert csv.field_size_limit() == limit


# ------------------------------------------------------------------------------------------------- fields


def test_field_names_and_answer_kinds(tmp_path, load):
    rows = [{"q": "1", "gold": value, "extra": [1]} for value in ("7", 7, 7.5, [7, 8], "1,234")]
    problems = load(write_jsonl(tmp_path / "d.jsonl", rows), prompt_field="q", answer_field="gold")
    assert [p.columns for p in problems.train] == [{**row, "answer": row["gold"]} for row in rows]


def test_rewards_receive_both_the_answer_and_its_source_field(tmp_path, load):
    path = write_jsonl(tmp_path / "d.jsonl", [{"question": "1", "solution": "so #### 7", "answer": "other"}])
    problems = load(path, prompt_field="question", answer_field="solution", answer_after="####")
    assert problems.train[0].columns == {"question": "1", "solution": "so #### 7", "answer": "7"}


def test_no_answer_field(tmp_path, load):
    path = write_jsonl(tmp_path / "d.jsonl", [{"prompt": "1", "answer": None, "x": 2}])
    assert load(path, answer_field="").train[0].columns == {"answer": None, "x": 2}


def test_answer_after_the_last_mark(tmp_path, load):
    path = write_jsonl(tmp_path / "d.jsonl", [{"prompt": "1", "answer": "so #### 3\nthen\n#### 1,234 \n"}])
    assert load(path, answer_after="####").train[0].columns == {"answer": "1,234"}


def test_instruction_and_system(tmp_path, load, chat_tokenizer):
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    path = write_jsonl(tmp_path / "d.jsonl", [{"prompt": "1+1", "answer": 2}, {"prompt": chat, "answer": 2}])
    first, second = load(path, tokenizer=chat_tokenizer, instruction="Be brief.", system="You add.").train
    assert first.text == "<system>You add.\n<user>1+1\nBe brief.\n<assistant>"
    assert second.text == "<system>You add.\n<user>a\n<assistant>b\n<user>c\nBe brief.\n<assistant>"
    assert (first.content, second.content) == ("1+1", chat)
    assert first.token_ids == tuple(chat_tokenizer(first.text, add_special_tokens=False)["input_ids"])


def test_instruction_for_raw_text(tmp_path, load):
    assert load(write_jsonl(tmp_path / "d.jsonl", ROWS), instruction="Go.").train[1].text == "1+1\nGo."


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"system": "s"}, r"data\.system: needs a chat template, but the tokenizer has none"),
        ({"chat": "yes"}, r"data\.chat=yes"),
        ({"answer_field": "prompt"}, r"data\.answer_field: 'prompt' is data\.prompt_field too"),
        ({"answer_field": "", "answer_after": "#"}, r"data\.answer_after: has no effect"),
        ({"held_out_path": "x.jsonl"}, r"data\.held_out_path: has no effect with data\.held_out=0"),
    ],
)
def test_settings_that_cannot_work(tmp_path, load, settings, message):
    with pytest.raises(ConfigError, match=message):
        load(write_jsonl(tmp_path / "d.jsonl", ROWS), **settings)


# ------------------------------------------------------------------------------------------------- several fields


SVAMP = [{"Body": "Dan had 3 left.", "Question": "How many {more}?", "Answer": 4.0, "Type": "Sum"}]


def test_a_template_combines_several_fields(load, tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", SVAMP)
    template = "{Body} {Question} ({Type})"
    (prompt,) = load(path, prompt_template=template, answer_field="Answer", instruction="Be brief.").train
    assert prompt.content == "Dan had 3 left. How many {more}? (Sum)"
    assert prompt.text == "Dan had 3 left. How many {more}? (Sum)\nBe brief."
    assert prompt.columns == {**SVAMP[0], "answer": 4.0}


def test_rows_that_do_not_fit_the_template_are_bad(load, tmp_path):
    path = write_jsonl(
        tmp_path / "d.jsonl", [*SVAMP, {"Body": "x", "Answer": 1}, {"Body": ["x"], "Question": "", "Answer": 1}]
    )
    message = r"d.jsonl:2: field 'Question': missing, the row has: Body, Answer; change data.prompt_template"
    with pytest.raises(DataError, match=message) as raised:
        load(path, prompt_template="{Body} {Question}", answer_field="Answer")
    assert "d.jsonl:3: field 'Body': must be text or a number" in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt_template": "no field"}, "data.prompt_template: names no field"),
        ({"prompt_template": "{Body}", "prompt_field": "Body"}, "data.prompt_field: has no effect with data.prompt_t"),
        ({"prompt_template": "{Body} {Answer}"}, "data.prompt_template: shows the model {Answer}"),
    ],
)
def test_templates_that_make_no_sense(load, tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        load(write_jsonl(tmp_path / "d.jsonl", SVAMP), answer_field="Answer", **settings)


# ------------------------------------------------------------------------------------------------- bad rows

GOOD = {"prompt": "1+1", "answer": "2"}


def bad(row, message, **settings):
    return row, settings, message


def question(prompt):
    return {"prompt": prompt, "answer": "2"}


def answered(answer):
    return {"prompt": "1", "answer": answer}


def message(role, content):
    return {"role": role, "content": content}


BAD_ROWS = {
    "no prompt": bad(
        {"question": "1", "answer": "2"},
        r"field 'prompt': missing, the row has: question, answer; set data\.prompt_field",
    ),
    "no answer": bad(
        {"prompt": "1", "gold": 1}, r"field 'answer': missing, the row has: prompt, gold; set data\.answer_field"
    ),
    "null answer": bad(answered(None), r"field 'answer': null"),
    "empty answer": bad(answered(" "), r"field 'answer': empty"),
    "no mark": bad(answered("3"), r"field 'answer': does not contain '##'; .*data\.answer_after", answer_after="##"),
    "number and mark": bad(answered(3), r"field 'answer': does not contain '##'", answer_after="##"),
    "nothing after mark": bad(answered("3 ## "), r"field 'answer': empty after '##'", answer_after="##"),
    "empty": bad(question(""), r"field 'prompt': empty"),
    "whitespace": bad(question(" \n\t"), r"field 'prompt': empty"),
    "no messages": bad(question([]), r"field 'prompt': empty"),
    "empty messages": bad(question([message("user", " ")]), r"field 'prompt': empty"),
    "number": bad(question(17), r"field 'prompt': must be text or a list .*, not int 17"),
    "null": bad(question(None), r"field 'prompt': must be text or a list .*, not null"),
    "object": bad(question({"a": 1}), r"field 'prompt': must be text or a list"),
    "list of text": bad(question(["a"]), r"field 'prompt': message 1 is wrong"),
    "no role": bad(question([{"content": "a"}]), r"field 'prompt': message 1 is wrong"),
    "content null": bad(question([message("user", None)]), r"field 'prompt': message 1 is wrong"),
    "ends with an assistant message": bad(
        question([message("assistant", "a")]), r"field 'prompt': ends with an assistant message"
    ),
    "surrogate": bad('{"prompt": "\\ud800", "answer": 2}', r"field 'prompt': half of a surrogate pair"),
    "too long": bad(question("x" * 31), r"field 'prompt': 49 tokens, more than data\.max_prompt_tokens=40; raise"),
    "not JSON": bad('{"prompt": "1', r"invalid JSON: "),
    "huge number": bad('{"prompt": ' + "1" * 5000 + "}", r"invalid JSON: "),
    "list row": bad("[1, 2]", r"the row is a list, not an object"),
    "text row": bad('"x"', r"the row is text, not an object"),
    "null row": bad("null", r"the row is null, not an object"),
    "template refuses": bad(
        question([message("forbidden", "a")]), r"field 'prompt': the chat template refuses it: no such role"
    ),
    "second system": bad(
        question([message("system", "a"), message("user", "b")]),
        r"field 'prompt': already begins with a system message; leave data\.system empty",
        system="s",
    ),
    "no user": bad(question([message("system", "a")]), r"field 'prompt': no user message", instruction="i"),
}


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_bad_row_is_named_by_file_line_and_field(tmp_path, load, chat_tokenizer, kind):
    row, settings, message = BAD_ROWS[kind]
    good = {"prompt": "1+1", "answer": "2 ## 3"}
    settings = {"tokenizer": chat_tokenizer, "max_prompt_tokens": 40, **settings}
    path = write_jsonl(tmp_path / "d.jsonl", [good, "", row, good])
    with pytest.raises(DataError, match=rf"1 bad row:\n{path}:3: {message}.*\nset data\.on_bad_row=skip to skip them$"):
        load(path, **settings)
    problems = load(path, on_bad_row="skip", **settings)
    assert problems.skipped == 1
    assert [p.id for p in problems.train] == ["train/0", "train/2"]
    path = write_jsonl(tmp_path / "all_bad.jsonl", [row])
    with pytest.raises(DataError, match=rf"no usable row, all 1 are bad; the first: {path}:1: {message}"):
        load(path, on_bad_row="skip", **settings)


def test_bytes_that_are_not_utf8(tmp_path, load):
    path = tmp_path / "d.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b'\n{"prompt": "\xff", "answer": 1}\n')
    with pytest.raises(DataError, match=rf"{path}:2: not UTF-8 text \(byte 13 of the line\)"):
        load(path)


def test_first_five_bad_rows_are_listed_in_order(tmp_path, load):
    path = write_jsonl(tmp_path / "d.jsonl", [{"answer": 1}, {"prompt": "x" * 99, "answer": 1}] * 6 + [GOOD])
    with pytest.raises(DataError) as caught:
        load(path, max_prompt_tokens=50)
    lines = str(caught.value).splitlines()
    assert lines[0] == "12 bad rows:"
    assert [line.split(": ")[0] for line in lines[1:6]] == [f"{path}:{n}" for n in range(1, 6)]
    assert lines[6:] == ["and 7 more bad rows; set data.on_bad_row=skip to skip them"]


def test_csv_bad_rows_are_named_by_the_line_they_start_on(tmp_path, load):
    path = tmp_path / "d.csv"
    path.write_text('prompt,answer\n"a\nb",1\n\n" ",2\nx,1,2\n"c\nd"\n', encoding="utf-8")
    with pytest.raises(DataError) as caught:
        load(path)
    assert str(caught.value).splitlines()[1:4] == [
        f"{path}:5: field 'prompt': empty; write the problem there or remove the row",
        f"{path}:6: has 3 cells, but the header has 2; put cells that contain commas in quotes",
        f"{path}:7: has 1 cells, but the header has 2; put cells that contain commas in quotes",
    ]


@pytest.mark.parametrize("name", ["d.json", "d.parquet"])
def test_formats_without_lines_name_the_row(tmp_path, load, name):
    WRITERS[name](tmp_path / name)
    with pytest.raises(DataError, match=rf"{tmp_path / name}: row 1: field 'q': missing, the row has: prompt, answer"):
        load(tmp_path / name, prompt_field="q")


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("missing.jsonl", None, r"missing\.jsonl: no such file"),
        ("d.txt", b"x", r"d\.txt: unknown file type; known: \.jsonl, \.json, \.csv, \.parquet"),
        ("d.parquet.gz", b"x", r"unknown file type"),
        ("d.jsonl", b"", r"d\.jsonl: has no rows"),
        ("d.jsonl", b"\n \n", r"d\.jsonl: has no rows"),
        ("d.json", b"", r"d\.json: has no rows"),
        ("d.json", b"[]", r"d\.json: has no rows"),
        ("d.json", b'[{"a": 1},\n{]', r"d\.json:2: invalid JSON"),
        ("d.json", b'{"a": 1}\n{"a": 2}\n', r"d\.json:2: invalid JSON: Extra data; one object per line\?"),
        ("d.json", b'{"a": 1}', r"must contain a list of objects"),
        ("d.json", b'{"a": [1], "b": [2]}', r"must contain a list of objects"),
        ("d.json", b'["\n\xff"]', r"d\.json:2: not UTF-8"),
        ("d.json", b"[" * 100_000, r"d\.json: nested deeper than 100 levels"),
        ("d.csv", b"", r"d\.csv: has no rows"),
        ("d.csv", b"prompt,answer\n", r"d\.csv: has no rows"),
        ("d.csv", b"a,a\n1,2\n", r"d\.csv:1: the header names 'a' more than once"),
        ("d.csv", b'prompt,answer\n1,2\n"never closed,2\n3,4\n', r"d\.csv:3: invalid CSV"),
        ("d.parquet", b"nope", r"not a readable parquet file"),
        ("d.jsonl.gz", b"nope", r"not a whole gzip file"),
        ("d.csv.gz", gzip.compress(b"a,b\n" * 99, mtime=0)[:-12], r"not a whole gzip file"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, load, name, data, message):
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=message):
        load(tmp_path / name)


def test_directory_is_not_a_file(tmp_path, load):
    (tmp_path / "d.jsonl").mkdir()
    with pytest.raises(DataError, match="is a directory"):
        load(tmp_path / "d.jsonl")


# ------------------------------------------------------------------------------------------------- held out


def ids(prompts):
    return [p.id for p in prompts]


def test_the_seed_determines_the_held_out_set(tmp_path, load):
    path = write_jsonl(tmp_path / "d.jsonl", ROWS)
    problems = load(path, held_out=5, seed=3)
    assert len(problems.held_out) == 5
    assert sorted(ids(problems.train) + ids(problems.held_out)) == sorted(f"train/{i}" for i in range(20))
    assert problems == load(path, held_out=5, seed=3)
    assert ids(problems.held_out) != ids(load(path, held_out=5, seed=4).held_out)
    assert ids(load(path, held_out=7, seed=3).held_out)[:5] == ids(problems.held_out)
    assert problems.overlapping == 0


def test_the_held_out_set_must_leave_something_to_train_on(tmp_path, load):
    path = write_jsonl(tmp_path / "d.jsonl", ROWS)
    for size in (20, 256):
        with pytest.raises(DataError, match=rf"data\.held_out={size} leaves nothing to train on, there are 20 usable"):
            load(path, held_out=size)
    with pytest.raises(DataError, match="every training prompt is also held out"):
        load(write_jsonl(tmp_path / "same.jsonl", [GOOD] * 3), held_out=1)


def test_duplicates_of_held_out_prompts_are_not_trained_on(tmp_path, load):
    problems = load(write_jsonl(tmp_path / "d.jsonl", ROWS * 3), held_out=5)
    assert not {p.content for p in problems.train} & {p.content for p in problems.held_out}
    assert len(problems.train) + problems.overlapping + 5 == 60
    assert problems.overlapping >= 5
    assert problems.replaced == 0


def test_problems_that_differ_in_white_space_case_or_width_are_duplicates(tmp_path, load):
    rows = [{"prompt": f"What is {word}?", "answer": "x"} for word in ("one plus two", "four", "Five")]
    path = write_jsonl(tmp_path / "train.jsonl", rows)
    same = ["what IS  one\nplus two? ", "What is four\uff1f"]
    other = write_jsonl(tmp_path / "test.jsonl", [{"prompt": p, "answer": "x"} for p in same])
    problems = load(path, held_out=9, held_out_path=other)
    assert (problems.overlapping, [p.content for p in problems.train]) == (2, ["What is Five?"])


def test_held_out_file(tmp_path, load):
    path = write_jsonl(tmp_path / "train.jsonl", ROWS)
    other = write_jsonl(
        tmp_path / "test.jsonl", [{"bad": 1}, *ROWS[:2], *({"prompt": f"{i}", "answer": 1} for i in range(8))]
    )
    settings = {"held_out_path": other, "on_bad_row": "skip"}
    problems = load(path, held_out=256, **settings)
    assert sorted(ids(problems.held_out)) == sorted(f"held_out/{i}" for i in range(1, 11))
    assert ids(problems.train) == [f"train/{i}" for i in range(2, 20)]
    assert (problems.overlapping, problems.skipped) == (2, 1)
    few = load(path, held_out=4, **settings)
    assert ids(few.held_out) == ids(problems.held_out)[:4]
    with pytest.raises(DataError, match=rf"{other}:1: field 'prompt': missing"):
        load(path, held_out=4, held_out_path=other)


def test_text_and_messages_with_the_same_content_are_duplicates(tmp_path, load, chat_tokenizer):
    path = write_jsonl(tmp_path / "train.jsonl", ROWS)
    chat = [{"role": "user", "content": "3+3"}]
    other = write_jsonl(tmp_path / "test.jsonl", [{"prompt": chat, "answer": 6}])
    problems = load(path, tokenizer=chat_tokenizer, held_out=9, held_out_path=other)
    assert (problems.overlapping, len(problems.train)) == (1, 19)


# ------------------------------------------------------------------------------------------------- generated


def test_generated_problems_are_distinct_and_seeded(load):
    problems = load(task="addition", task_size=300, held_out=50)
    prompts = [*problems.train, *problems.held_out]
    assert len({p.content for p in prompts}) == 350
    assert ids(problems.train) == [f"train/{i}" for i in range(300)]
    assert ids(problems.held_out) == [f"held_out/{i}" for i in range(50)]
    for p in prompts:
        left, right = map(int, p.content.split("+"))
        assert p.columns["answer"] == str(left + right)
    assert problems == load(task="addition", task_size=300, held_out=50)
    assert problems != load(task="addition", task_size=300, held_out=50, seed=1)
    assert problems.held_out == load(task="addition", task_size=10, held_out=50).held_out


def test_every_problem_of_a_small_task_can_be_generated(load):
    settings = {"task": "addition", "task_options": {"digits": 1}}
    assert len({p.content for p in load(task_size=100, held_out=0, **settings).train}) == 100
    message = (
        r"data\.task=addition with digits=1 has at most 100 different problems, "
        r".*data\.task_size=91 and data\.held_out=10"
    )
    with pytest.raises(DataError, match=message):
        load(task_size=91, held_out=10, **settings)


SMALL_TASKS = {
    "addition": ({"digits": 2}, lambda p: tuple(sorted(map(int, p.split("+"))))),
    "countdown": ({}, lambda p: (tuple(sorted(map(int, p.split(" -> ")[0].split()))), p.split(" -> ")[1])),
    "sorting": ({"min_items": 4, "max_items": 4}, lambda p: tuple(sorted(p))),
}


@pytest.mark.parametrize("task", SMALL_TASKS)
def test_no_held_out_problem_is_a_training_problem_in_another_order(load, task):
    options, meaning = SMALL_TASKS[task]
    problems = load(task=task, task_options=options, task_size=4000, held_out=256)
    assert (len(problems.train), len(problems.held_out)) == (4000, 256)
    # Some were dropped, and others generated in their place.
    assert problems.overlapping == problems.replaced > 0
    held_out, train = ({meaning(p.content) for p in prompts} for prompts in (problems.held_out, problems.train))
    assert not held_out & train


def test_no_held_out_word_problem_shares_kind_and_numbers_with_a_training_problem(load):
    problems = load(task="word_problems", task_size=4000, held_out=256)

    def meaning(p):
        numbers = tuple(sorted(int(n) for n in re.findall(r"\d+", p.content)))
        return p.columns["kind"], numbers, p.columns["answer"]

    held_out, train = (
        {meaning(p) for p in prompts if p.columns["kind"] != "plain"} for prompts in (problems.held_out, problems.train)
    )
    assert not held_out & train


def test_a_held_out_set_that_covers_most_problems_is_refused_or_warned_about(load):
    settings = {"task": "addition", "task_options": {"digits": 1}}
    message = r"hardly more than \d+ different problems other than duplicates of held-out ones, .*held_out=60"
    with pytest.raises(DataError, match=message):
        load(task_size=40, held_out=60, **settings)
    assert "lower data.held_out" in load(task_size=5, held_out=60, **settings).crowded
    assert load(task_size=40, held_out=5, **settings).crowded == ""


def test_fresh_problems_are_not_duplicates_of_training_problems(plain_tokenizer):
    config = DataConfig(task="addition", task_options={"digits": 2}, task_size=3000, held_out=50)
    trained = {p.key for p in load_problems(config, plain_tokenizer, 0).train}
    fresh = fresh_problems(config, plain_tokenizer, 0, count=200, exclude=trained)
    assert len({p.content for p in fresh}) == 200
    assert not {p.key for p in fresh} & trained
    with pytest.raises(DataError, match=r"other than those that the model was trained on .*fewer than 8000"):
        fresh_problems(config, plain_tokenizer, 0, count=8000, exclude=trained)


def test_a_task_with_too_few_problems_is_an_error(load):
    settings = {"task": "countdown", "task_options": {"numbers": 2, "max_number": 2, "max_target": 100}}
    with pytest.raises(DataError, match=r"hardly more than \d+ different problems, .*lower them"):
        load(task_size=100, **settings)


def test_template_and_limits_apply_to_generated_prompts(load, chat_tokenizer):
    settings = {"task": "addition", "task_size": 5, "tokenizer": chat_tokenizer, "instruction": "Go."}
    problem = load(**settings).train[0]
    assert problem.text == f"<user>{problem.content}\nGo.\n<assistant>"
    with pytest.raises(DataError, match=r"addition: row 1: .* more than data\.max_prompt_tokens=4"):
        load(max_prompt_tokens=4, **settings)


def test_settings_without_effect_on_tasks(load):
    with pytest.raises(ConfigError, match=r"data\.held_out_path: has no effect with data\.task"):
        load(task="addition", held_out_path="x.jsonl")
    with pytest.raises(ConfigError, match=r"data\.answer_after: has no effect with data\.task"):
        load(task="addition", answer_after="#")


@pytest.mark.parametrize("template", [False, True])
def test_the_time_to_load_problems_grows_in_proportion_to_their_number(load, plain_tokenizer, chat_tokenizer, template):
    tokenizer = chat_tokenizer if template else plain_tokenizer

    def cpu_seconds(count):
        start = time.process_time()
        assert len(load(task="addition", task_size=count, held_out=256, tokenizer=tokenizer).train) == count
        return time.process_time() - start

    cpu_seconds(100)  # the first load also imports modules
    assert cpu_seconds(10_000) < 40 * cpu_seconds(1_000), "10 times as long; comparing all pairs would take 100 times"


def test_demonstrations_are_endless_seeded_and_never_held_out(load):
    config = DataConfig(task="addition", task_options={"digits": 1}, task_size=10, held_out=50)
    held_out = {p.key for p in load(task="addition", task_options={"digits": 1}, task_size=10, held_out=50).held_out}
    stream = list(islice(demonstrations(config, 0, exclude=held_out), 500))
    assert stream == list(islice(demonstrations(config, 0, exclude=held_out), 500))
    assert stream != list(islice(demonstrations(config, 1, exclude=held_out), 500))
    assert not held_out & {p.key for p in stream}
    assert all(p.demonstration for p in stream)
    everything = {f"{a}+{b}" for a in range(10) for b in range(10)}
    with pytest.raises(DataError, match="every problem is held out"):
        next(demonstrations(config, 0, exclude=everything))


def test_shown_does_not_change_its_argument():
    chat = [{"role": "user", "content": "a"}]
    config = DataConfig(instruction="i", system="s")
    assert with_instructions(chat, config) == [{"role": "system", "content": "s"}, {"role": "user", "content": "a\ni"}]
    assert chat == [{"role": "user", "content": "a"}]
    assert with_instructions("a", DataConfig()) == "a"


# ------------------------------------------------------------------------------------------------- order


@given(st.integers(1, 40), st.integers(), st.integers(0, 5))
def test_each_epoch_has_its_own_permutation(count, seed, epoch):
    assert sorted(PromptOrder(count, seed).take(epoch * count, count)) == list(range(count))


@given(st.integers(1, 12), st.integers(0, 3), st.integers(0, 60), st.integers(0, 60))
def test_order_depends_on_the_cursor_alone(count, seed, a, b):
    whole = PromptOrder(count, seed).take(0, a + b)
    order = PromptOrder(count, seed)
    assert order.take(a, b) == whole[a:]
    assert order.take(0, a) + order.take(a, b) == whole


def test_order_differs_between_epochs_and_seeds():
    order = PromptOrder(50, 0)
    assert order.take(0, 50) != order.take(50, 50)
    assert order.take(0, 50) != PromptOrder(50, 1).take(0, 50)


@pytest.mark.parametrize("depth", [150, 400, 100_000])
@pytest.mark.parametrize("name", ["d.jsonl", "d.json"])
def test_a_field_that_is_nested_too_deeply_is_named(tmp_path, load, name, depth):
    row = '{"prompt": "p", "answer": "a", "meta": ' + "[" * depth + "]" * depth + "}"
    (tmp_path / name).write_text(row + "\n" if name == "d.jsonl" else f"[{row}]")
    with pytest.raises(DataError, match=r"d\.jsonl?.*nested deeper than 100 levels"):
        load(path=tmp_path / name)


def test_a_decompression_bomb_is_refused(tmp_path, load):
    with gzip.open(tmp_path / "d.jsonl.gz", "wb") as out:
        for _ in range(80):
            out.write(b" " * (1 << 20))
    assert (tmp_path / "d.jsonl.gz").stat().st_size < 100_000
    with pytest.raises(DataError, match=r"d\.jsonl\.gz: grows from \d+ bytes to more than 64 MB.*decompress it"):
        load(path=tmp_path / "d.jsonl.gz")


def test_a_parquet_file_with_one_huge_value_in_every_row_is_refused(tmp_path, load):
    import pyarrow
    import pyarrow.parquet

    indices = pyarrow.array([0] * 200, type=pyarrow.int32())
    column = pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array(["x" * 1_000_000]))
    pyarrow.parquet.write_table(pyarrow.table({"prompt": column}), tmp_path / "d.parquet", compression="zstd")
    assert (tmp_path / "d.parquet").stat().st_size < 100_000
    with pytest.raises(DataError, match=r"d\.parquet: grows from \d+ bytes to more than 64 MB"):
        load(path=tmp_path / "d.parquet")


def test_a_parquet_file_of_too_many_rows_is_refused(tmp_path, load, monkeypatch):
    import pyarrow
    import pyarrow.parquet

    monkeypatch.setattr("gspo.data.sources._MOST_ROWS", 1000)
    pyarrow.parquet.write_table(pyarrow.table({"prompt": pyarrow.nulls(1001)}), tmp_path / "d.parquet")
    with pytest.raises(DataError, match=r"d\.parquet: has 1001 rows"):
        load(path=tmp_path / "d.parquet")


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenized(tmp_path, load, monkeypatch):
    def never(*_: object, **__: object) -> None:
        raise AssertionError("it was tokenized")

    monkeypatch.setattr("gspo.data.chat._ids", never)
    (tmp_path / "d.jsonl").write_text(json.dumps({"prompt": "x" * 3_000_000, "answer": "a"}) + "\n")
    with pytest.raises(DataError, match=r"d\.jsonl:1: field 'prompt': 3000000 characters.*data.max_prompt_tokens"):
        load(path=tmp_path / "d.jsonl", max_prompt_tokens=1000)
