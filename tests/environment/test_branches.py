"""Chat templates that rewrite earlier turns: the conversation forks into branches, which are one sequence."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from branch_ids import branch_ids
from conversations import END, TOKENIZER, conversations, rows, sample, written
from tiny_runs import tiny_tree

import gspo
from gspo import config as settings
from gspo.config import Config
from gspo.environment.branches import TokenTree
from gspo.environment.conversation import Transcript
from gspo.errors import DataError
from gspo.learner.batch import prepare_batch
from gspo.model.load import char_tokenizer
from gspo.model.micro_batch import TokenSequence
from gspo.objectives.samples import train_samples
from gspo.ranks.codec import decode, encode
from gspo.step import learn
from gspo.trainer import train
from gspo.types import (
    Branch,
    Completion,
    Conversation,
    ConversationEnd,
    Group,
    Prompt,
    Routes,
    Score,
    Status,
    StopReason,
    Turn,
)
from gspo.view.replay.records import read_step

SPECIAL = ("<user>", "<assistant>")
TEMPLATE = (
    "{% for m in MESSAGES %}{{ '<' + m['role'] + '>' + CONTENT }}"
    "{% if m['role'] == 'assistant' %}{{ '<end>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
DROPS = TEMPLATE.replace("MESSAGES", "messages").replace("CONTENT", "m['content'].split('</think>')[-1].lstrip()")
TRIMS = TEMPLATE.replace("MESSAGES", "messages[-3:]").replace("CONTENT", "m['content']")
STRIPS = TEMPLATE.replace("MESSAGES", "messages").replace("CONTENT", "m['content'].strip()")
ECHO = """
from gspo.environment import Environment

class Echo(Environment):
    def reset(self, row):
        self.steps = 0

    def step(self, message):
        self.steps += 1
        if self.steps == 4: return [], 1.0, True
        return f"so {self.steps}", float(len(message["content"])), False
"""


@pytest.fixture
def echo(tmp_path: Path) -> str:
    return f"{written(tmp_path, ECHO)}:Echo"


def shown(done: Completion, prompt: Prompt) -> list[str]:
    """What the model read and wrote in each branch."""
    return [str(TOKENIZER.decode(ids)) for ids in branch_ids(prompt.token_ids, done)]


def thoughts(content: str, key: str) -> str:
    turn = key.rpartition("\x1f")[2]
    return f"<think>t{turn}</think>a{turn}"


def test_a_tree_holds_every_token_once() -> None:
    rng = random.Random(0)
    for _ in range(30):
        tree = TokenTree([1, 1, 2])
        paths: list[tuple[int, ...]] = []
        current = (1, 1, 2)
        for _ in range(6):
            if rng.random() < 0.5:
                other = rng.choice([*paths, current])
                rewritten = (*other[: rng.randrange(len(other) + 1)], *rng.choices([1, 2, 3], k=rng.randrange(4)))
                expected = tree.new_tokens(rewritten)
                before = len(tree)
                assert tree.fork(rewritten) == expected == len(tree) - before
                common = [sum(1 for _ in zip_equal(path, rewritten)) for path in [*paths, current, (1, 1, 2)]]
                assert expected == len(rewritten) - max(common), "the longest common prefix is shared"
                paths.append(current)
                current = rewritten
            new = tuple(rng.choices([1, 2, 3], k=rng.randrange(1, 4)))
            tree.extend(new)
            current += new
            assert tree.context == current
        done = Completion(
            prompt_id="",
            sample=0,
            token_ids=tree.token_ids,
            text="",
            logp_sampler=(),
            stop=StopReason.EOS,
            version=0,
            branches=tree.branches,
        )
        assert branch_ids((1, 1, 2), done)[-1] == current
        assert set(paths) <= {path[:n] for path in branch_ids((1, 1, 2), done) for n in range(len(path) + 1)}


def zip_equal(a: tuple[int, ...], b: tuple[int, ...]) -> Any:
    for x, y in zip(a, b, strict=False):
        if x != y:
            return
        yield x


class _Read(list[int]):
    """Tokens that count how often they are read."""

    count = 0

    def __getitem__(self, at: Any) -> Any:
        self.count += isinstance(at, int)
        return super().__getitem__(at)


def test_a_fork_shares_the_longest_prefix_and_reads_no_token_for_every_branch() -> None:
    """As in a game of 60 turns whose template drops the thinking of each turn."""
    rng = random.Random(0)
    tree = TokenTree([1, 2])
    paths = [[1, 2]]
    kept = [1, 2]
    for turn in range(60):
        thought, said = [rng.randrange(3) for _ in range(6)], [rng.randrange(3) for _ in range(3)]
        tree.extend(thought + said)
        paths[-1] += thought + said
        # Now and then, the template drops an old message, too.
        kept = [*(kept if turn % 7 else [1, 2, *kept[5:]]), *said, 9]
        longest = max(_shared(path, kept) for path in paths)
        latest = max(i for i, path in enumerate(paths) if _shared(path, kept) == longest)
        read = _Read(kept)
        new = tree.fork(read)
        assert new == len(kept) - longest
        if latest < len(paths) - 1 or longest < len(paths[-1]):
            paths.append(list(kept))
            assert (tree.branches[-1].parent, tree.branches[-1].shared) == (latest, longest)
        else:
            paths[-1] = list(kept)
        assert read.count <= len(kept) + 4 * len(paths)
        assert list(tree.context) == kept


def _shared(path: list[int], ids: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(path, ids, strict=False)) if a != b), min(len(path), len(ids)))


def test_a_template_that_drops_thinking_forks_the_conversation(echo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TOKENIZER, "chat_template", DROPS)
    with conversations(thoughts, echo, rows({"prompt": "q"})) as (engine, below, prompts):
        (done,) = sample(engine, prompts)
        prompt = prompts[0]
    # Each turn was sampled after what the template writes for it...
    contexts = [str(TOKENIZER.decode(round_[0].token_ids)) for round_ in below.rounds]
    dropped = "<user>q<assistant>a0<end><user>so 1<assistant>"
    assert contexts == [
        "<user>q<assistant>",
        dropped,
        f"{dropped}a1<end><user>so 2<assistant>",
        f"{dropped}a1<end><user>so 2<assistant>a2<end><user>so 3<assistant>",
    ]
    # ... and is trained on in that context.
    assert shown(done, prompt) == [f"{c}<think>t{i}</think>a{i}<end>" for i, c in enumerate(contexts)]
    turn = [*TOKENIZER("<think>t0</think>a0", add_special_tokens=False)["input_ids"], END]
    assert done.sampled_count == 4 * len(turn), "each sampled token counts once"
    assert done.logp_sampler == tuple(-1.0 - i for i in range(len(turn))) * 4
    assert done.conversation is not None
    assert [done.token_ids[t.start : t.end][-1] for t in done.conversation.turns] == [END] * 4
    # A branch shares what the one before it has read: only the turn that was rewritten and the observation are new.
    assert [b.parent for b in done.branches] == [-1, 0, 1, 2]
    assert all(b.shared == len(paths) for b, paths in zip(done.branches[2:], map(encoded, contexts[1:]), strict=False))


def encoded(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def test_a_template_that_drops_old_messages_forks_where_it_begins_to(echo: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(TOKENIZER, "chat_template", TRIMS)
    with conversations(thoughts, echo, rows({"prompt": "q"})) as (engine, below, prompts):
        (done,) = sample(engine, prompts)
    contexts = [str(TOKENIZER.decode(round_[0].token_ids)) for round_ in below.rounds]
    assert contexts[1] == "<user>q<assistant><think>t0</think>a0<end><user>so 1<assistant>"
    assert contexts[2] == "<user>so 1<assistant><think>t1</think>a1<end><user>so 2<assistant>"
    assert [b.shared for b in done.branches] == [0, 1, len(encoded("<user>so "))]
    assert len(branch_ids(prompts[0].token_ids, done)) == 3, "the first two turns are one branch"


@pytest.mark.parametrize("rewritten", ["branch", "verbatim"])
def test_conversations_that_are_not_rewritten_have_no_branches(
    rewritten: str, echo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # White space at the ends of a turn is no reason to fork.
    monkeypatch.setattr(TOKENIZER, "chat_template", STRIPS if rewritten == "branch" else DROPS)

    def answer(content: str, key: str) -> str:
        return f" {thoughts(content, key)}\n"

    with conversations(answer, echo, rows({"prompt": "q"}), rewritten_history=rewritten) as (engine, below, prompts):
        (done,) = sample(engine, prompts)
    assert done.branches == ()
    assert (
        below.rounds[1][0].token_ids
        == (*prompts[0].token_ids, *done.token_ids[: len(done.token_ids)])[: len(below.rounds[1][0].token_ids)]
    )
    assert " <think>t0</think>a0\n<end><user>so 1" in str(TOKENIZER.decode(done.token_ids))


def test_the_limit_on_tokens_counts_those_of_all_branches(echo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TOKENIZER, "chat_template", DROPS)
    ends = set()
    with conversations(thoughts, echo, rows({"prompt": "q"})) as (engine, _, prompts):
        for limit in (20, 40, 47, 55, 200):
            (done,) = sample(engine, prompts, max_tokens=limit)
            assert len(done.token_ids) <= limit
            assert done.conversation is not None
            ends.add(done.conversation.end)
            assert [t.start for t in done.conversation.turns] == [
                i for i, own in enumerate(done.sampled or [True]) if own and not (i and done.sampled[i - 1])
            ]
    assert ends == {ConversationEnd.TOKENS, ConversationEnd.DONE}


def test_experts_of_every_turn_are_kept_for_its_own_tokens() -> None:
    """Each forward of the fake engine gives all tokens that it reads the number of the turn as their expert."""
    prompt = Prompt(id="p", content="q", text="q", token_ids=(1, 2, 3))
    transcript = Transcript(prompt, 0, max_tokens=100, version=0)

    def turn(number: int, ids: tuple[int, ...]) -> None:
        read = len(transcript.context) + len(ids) - 1
        done = Completion(
            prompt_id="p",
            sample=0,
            token_ids=ids,
            text="",
            logp_sampler=(0.0,) * len(ids),
            stop=StopReason.EOS,
            version=number,
            routes=Routes(experts=bytes([number]) * read, layers=1, top_k=1, width=1),
        )
        transcript.add_turn(done, f"t{number}")

    turn(1, (4, 5))
    transcript.rewrite("qx", lambda text: (7,))
    turn(2, (8, 9))
    transcript.observe("o", lambda text: (10,))
    turn(3, (11, 12))
    transcript.end = ConversationEnd.DONE
    done = transcript.completion("")
    assert done.token_ids == (4, 5, 7, 8, 9, 10, 11, 12)
    assert done.branches == (Branch(start=0, parent=-1, shared=0), Branch(start=2, parent=0, shared=3))
    assert done.sampled == (True, True, False, True, True, False, True, True)
    assert done.spans == ((1, 0), (2, 3), (3, 6))
    assert done.routes is not None
    # Nothing has read token 5. Token 9 was sampled in turn 2 and read in turn 3.
    assert list(done.routes.experts) == [1, 1, 1, 1, 0, 2, 2, 3, 3, 3]
    row = TokenSequence(prompt_ids=prompt.token_ids, completion_ids=done.token_ids, branches=done.branches)
    assert row.unread.tolist() == [4, 10]


# --- training ---


def conversation(reward: float, rewritten: tuple[int, ...], sample: int) -> tuple[Completion, Score]:
    """Two turns, the second of which was sampled after a rewritten history."""
    first, second = (5, 6, 7), (8, 9)
    ids = (*first, *rewritten, *second)
    split = len(first), len(first) + len(rewritten)
    done = Completion(
        prompt_id="train/0",
        sample=sample,
        token_ids=ids,
        text="",
        logp_sampler=(-1.0, -2.0, -1.5, -0.5, -1.0),
        stop=StopReason.EOS,
        version=0,
        sampled=tuple(not split[0] <= i < split[1] for i in range(len(ids))),
        conversation=Conversation(
            turns=(Turn(start=0, end=split[0], reward=0.5), Turn(start=split[1], end=len(ids), reward=reward)),
            end=ConversationEnd.DONE,
        ),
        branches=(Branch(start=0, parent=-1, shared=0), Branch(start=len(first), parent=0, shared=2)),
    )
    return done, Score(status=Status.SCORED, reward=0.5 + reward, correct=True, step_rewards=((2, 0.5), (4, reward)))


def config_of(folder: Path, echo: str, *overrides: str) -> Config:
    tree: dict[str, Any] = tiny_tree(folder)
    del tree["reward"]["functions"]
    tree["rollout"]["max_tokens"] = 60
    tree["environment"] = {"name": echo, "turn_tokens": 8, "max_turns": 3, "patience_s": 600.0}
    config = settings.override(tree, overrides, where="test")
    settings.check(config)
    return config


@pytest.mark.parametrize("name", ["gspo", "gspo_token", "gspo_turn", "grpo"])
def test_a_conversation_with_branches_is_one_sequence_of_the_models_tokens(
    name: str, echo: str, parts_of: Any, tmp_path: Path
) -> None:
    context = parts_of(config_of(tmp_path / "run", echo, f"objective.name={name}", "objective.kl=0"))

    def batch_of(rewritten: tuple[int, ...]) -> Any:
        pairs = [conversation(float(i), rewritten, i) for i in range(4)]
        prompt = context.problems.train[0]
        groups = [Group(prompt=prompt, completions=[c for c, _ in pairs], scores=[s for _, s in pairs])]
        samples = train_samples(groups, context.objective, max_tokens=60)
        return groups, prepare_batch(context, samples, step=1, complete=True)

    (groups, short), (_, long) = batch_of((10, 11)), batch_of((10, 11, 12, 13, 10))
    # What the template has written is context: nothing that is counted, weighted or compared depends on it...
    assert torch.equal(short.tokens.advantage_N, long.tokens.advantage_N)
    assert short.tokens.sequences.length_B.tolist() == long.tokens.sequences.length_B.tolist() == [5] * 4
    assert short.tokens.turn_N.tolist() == [0, 0, 0, 1, 1] * 4
    # ... but the second turn reads it, and not the first turn.
    first_N = short.tokens.turn_N == 0
    old, other = short.tokens.logp_old_N, long.tokens.logp_old_N
    torch.testing.assert_close(old[first_N], other[first_N])
    assert not torch.isclose(old[~first_N], other[~first_N]).any()
    # The old log-probs are those of a plain forward of each branch.
    model, prompt = context.policy.model, context.problems.train[0]
    expected = []
    for path, own in zip(branch_ids(prompt.token_ids, groups[0].completions[0]), (3, 2), strict=True):
        with torch.no_grad():
            logp = model(input_ids=torch.tensor([path]), use_cache=False).logits[0, :-1].log_softmax(-1)
        expected += [float(logp[i, path[i + 1]]) for i in range(len(path) - 1 - own, len(path) - 1)]
    torch.testing.assert_close(old[:5], torch.tensor(expected), atol=2e-5, rtol=1e-5)
    learned = learn(context, groups, step=1)
    assert learned is not None
    ratio_N = (learned.tokens.logp_N - learned.tokens.logp_old_N).exp()
    torch.testing.assert_close(ratio_N, torch.ones(20), atol=1e-5, rtol=0)


DROPS_LETTERS = TEMPLATE.replace("MESSAGES", "messages").replace(
    "CONTENT", "(m['content'].replace('s', '') if m['role'] == 'assistant' else m['content'])"
)
"""Random models hardly write a closing tag. The trial's thinking contains the letter, too."""


@pytest.fixture
def rewriting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models whose chat template rewrites earlier turns."""
    import gspo.model.load as load

    plain = load.char_tokenizer

    def made(alphabet: str) -> Any:
        tokenizer = plain(alphabet)
        tokenizer.chat_template = DROPS_LETTERS
        return tokenizer

    monkeypatch.setattr(load, "char_tokenizer", made)


def test_a_run_trains_on_branches_and_its_record_has_them(
    rewriting: None, echo: str, tmp_path: Path, display: Any
) -> None:
    # Replay of the engine's experts would be refused if they did not fit the tokens of every branch.
    overrides = ("model.build=tiny_moe", "data.chat=yes", "routing.replay=sampler", "steps=1")
    config = config_of(tmp_path / "run", echo, *overrides)
    train(config, display=display)
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert all(row["conversation/branches"] > 1 for row in metrics if row["step"])
    (file,) = (tmp_path / "run/rollouts").glob("*1.jsonl")
    tokenizer = char_tokenizer("0123456789")
    read = read_step(file, tokenizer, chat={"": "auto"}, objective=gspo.objective("gspo"), routes=True)
    found = [c for group in read.rollouts.groups for c in group.completions]
    assert any(c.branches for c in found)
    file.write_text(re.sub(r'("branches": ?\[\[0, ?)-1', r"\g<1>5", file.read_text()))
    with pytest.raises(DataError, match="branches must be"):
        read_step(file, tokenizer, chat={"": "auto"}, objective=gspo.objective("gspo"), routes=True)


def test_branches_are_sent_between_ranks_unchanged() -> None:
    done, score = conversation(1.0, (10, 11), 0)
    group = Group(prompt=Prompt(id="p", content="", text="", token_ids=(1, 2)), completions=[done], scores=[score])
    assert decode(Group, encode(group)) == group
    assert replace(done, branches=()) != done
