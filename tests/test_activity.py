"""Signs of life: what a process says that it is doing, and who shows it."""

from __future__ import annotations

import gc
import io
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console
from tiny_runs import tiny_config
from torch.nn.modules.module import register_module_forward_hook

from gspo.activity import activity, counted, current
from gspo.record.progress import LiveDisplay, PlainDisplay, doing, life_signs
from gspo.trainer import train


def names() -> list[list[str]]:
    return [[one.name for one in path] for path in current()]


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_activities_nest_and_end_with_their_context() -> None:
    def interrupted() -> None:
        with activity("inner"):
            assert names() == [["outer", "inner"]]
            raise KeyboardInterrupt

    with activity("outer"):
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert names() == [["outer"]]
    assert names() == []


def test_each_thread_has_its_own() -> None:
    started, done = threading.Event(), threading.Event()

    def other() -> None:
        with activity("other"):
            started.set()
            done.wait(60)

    with activity("own"):
        thread = threading.Thread(target=other)
        thread.start()
        started.wait(60)
        assert names() == [["own"], ["other"]]
        done.set()
        thread.join()
        assert names() == [["own"]]


def test_an_abandoned_generator_leaves_what_began_later() -> None:
    items: Iterator[int] | None = counted(range(3), "abandoned", total=3, unit="items")
    assert items is not None
    next(items)
    with activity("later"):
        items = None
        gc.collect()
        assert names() == [["later"]]
    assert names() == []


def test_a_line_says_how_far_the_work_has_come() -> None:
    with activity("step 3/10"), activity("sampling", total=2048, unit="completions") as sampling:
        sampling.done, sampling.tokens = 1024, 30000
        sampling.since -= 100
        assert doing() == ["step 3/10: sampling, 1,024/2,048 completions, 30,000 tokens at 300/s (1:40)"]


def test_plain_output_says_what_it_does_when_nothing_else_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []

    def heard() -> bool:
        said.append(capsys.readouterr().out)
        return "... loading" in "".join(said)

    display = PlainDisplay(quiet_s=0.05)
    try:
        with activity("loading"):
            wait_for(heard)
    finally:
        display.close()
    assert re.fullmatch(r"(\.\.\. loading \(0:\d\d\)\n)+", "".join(said))


def test_plain_output_is_silent_while_steps_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    display = PlainDisplay(quiet_s=3600)
    with activity("loading"):
        display.message("a message")
        display.close()
    assert capsys.readouterr().out == "a message\n"


def test_the_live_panel_shows_it_before_the_first_step_and_below_the_numbers() -> None:
    display = LiveDisplay()

    def shown() -> list[str]:
        out = io.StringIO()
        Console(file=out, width=100).print(display)
        return out.getvalue().splitlines()

    with activity("loading the model"):
        assert shown() == ["loading the model (0:00)"]
        display.step(1, 2, {"reward/mean": 0.5}, {"time/step_s": 1.0})
        *numbers, last = shown()
    assert "0.500" in "".join(numbers)
    assert last == "loading the model (0:00)"
    display.close()
    assert "loading" not in "".join(shown())


def test_a_command_with_a_result_says_it_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []

    def heard() -> bool:
        said.append(capsys.readouterr().err)
        return "... sampling" in "".join(said)

    with life_signs(quiet_s=0.05) as out:
        with activity("sampling"):
            wait_for(heard)
        print("result", file=out)
    assert capsys.readouterr().out == "result\n"


def test_a_run_says_what_it_does_in_every_phase(tmp_path: Path) -> None:
    seen: list[str] = []

    def look(*_: object) -> None:
        path = ": ".join(f"{one.name}, {one.done}/{one.total}" if one.total else one.name for one in current()[0])
        if not seen or seen[-1] != path:
            seen.append(path)

    handle = register_module_forward_hook(look)
    try:
        train(tiny_config(tmp_path, "steps=2", "eval.every=1", "learner.micro_batch_tokens=40"), PlainDisplay())
    finally:
        handle.remove()
    assert seen[0] == "loading the model"
    first, *rest = [s for s in seen if s.startswith("first evaluation: sampling")]
    assert first == "first evaluation: sampling, 0/16"  # 8 problems, each with a greedy completion, too
    assert rest
    assert "step 2/2: sampling, 0/16" in seen
    assert "step 2/2: evaluation: sampling, 0/16" in seen
    updates = [re.fullmatch(r"step 1/2: update (\d)/2, (\d+)/(\d+)", s) for s in seen]
    found = [tuple(map(int, m.groups())) for m in updates if m]
    assert {update for update, _, _ in found} == {1, 2}
    assert any(done and total > 1 for _, done, total in found)
    assert current() == []
