"""The pages in a real browser: live updates, navigation down to a token, and model output shown as text."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from shown_runs import HOSTILE, completion, make_run, metrics, uncomputed, write_lines

from gspo.view.report import write_report

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert path, "the browser tests need Chromium: apt-get install chromium"
    with sync_playwright() as p:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
        chromium = p.chromium.launch(executable_path=path, args=arguments)
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page that fails the test on any script error or request to another host."""
    context = browser.new_context(viewport={"width": 1300, "height": 900})
    tab = context.new_page()
    problems: list[str] = []
    local = re.compile(r"http://127\.0\.0\.1:|file:|data:")
    tab.on("pageerror", lambda error: problems.append(f"error: {error}"))
    tab.on("console", lambda m: problems.append(f"console: {m.text}") if m.type == "error" else None)
    tab.on("request", lambda r: None if local.match(r.url) else problems.append(f"request: {r.url}"))
    tab.on("dialog", lambda d: problems.append(f"dialog: {d.message}"))
    tab.problems = problems
    yield tab
    assert not problems
    context.close()


def open_dashboard(page: Any, served: Any, where: str = "") -> None:
    page.goto(served.link)
    served.link = served.next_link()
    if where:
        page.goto(f"http://{served.host}/#/{where}")


def last_step(page: Any) -> int:
    return int(re.search(r"step ([\d,]+)", page.locator(".run .state").first.inner_text())[1].replace(",", ""))


def test_curves_update_while_a_run_trains(page: Any, serve: Callable[..., Any], tmp_path: Path) -> None:
    run = tmp_path / "live"
    options = [
        "--steps=60",
        "--cold_start.steps=0",
        "--rollout.prompts=4",
        "--rollout.group_size=4",
        "--rollout.max_tokens=16",
        "--eval.every=0",
        "--checkpoint.every=60",
        "--model.threads=1",
    ]
    command = [sys.executable, "-m", "gspo.cli", "demo", f"--run-dir={run}", *options]
    trainer = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not (run / "metrics.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        open_dashboard(page, serve(run))
        curve = page.locator(".chart svg path.line").first
        curve.wait_for(state="attached", timeout=60_000)
        assert "running" in page.locator(".run .state").first.inner_text()
        before = last_step(page)
        path = curve.get_attribute("d")
        page.wait_for_timeout(3000)
        while last_step(page) <= before and time.monotonic() < deadline:
            page.wait_for_timeout(300)
        assert last_step(page) > before
        assert page.locator(".chart svg path.line").first.get_attribute("d") != path
        assert trainer.wait(timeout=120) == 0
        page.get_by_text("finished, step 60 of 60").wait_for(timeout=30_000)
    finally:
        trainer.kill()
        trainer.wait()


class Eavesdropper(BaseHTTPRequestHandler):
    """Another program on another port that records the headers that browsers send."""

    headers_seen: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.headers_seen.append(str(self.headers))
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<title>another</title>")

    def log_message(self, *_: Any) -> None:
        pass


def test_the_session_survives_a_reload_and_no_other_port_gets_the_token(
    page: Any, serve: Callable[..., Any], tmp_path: Path
) -> None:
    served = serve(make_run(tmp_path / "made"))
    open_dashboard(page, served)
    page.locator(".chart svg path.line").first.wait_for(state="attached")
    assert "key=" not in page.url
    page.reload()
    page.locator(".chart svg path.line").first.wait_for(state="attached")
    other = page.context.new_page()
    other.goto(f"http://{served.host}/#/made/5")
    other.get_by_role("heading", name="Step 5").wait_for()
    assert page.context.cookies() == []
    token = page.evaluate("localStorage.getItem('gspo-token')")
    assert token
    with ThreadingHTTPServer(("127.0.0.1", 0), Eavesdropper) as listener:
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        other.goto(f"http://127.0.0.1:{listener.server_port}/")
        assert other.title() == "another"
        assert other.evaluate("localStorage.getItem('gspo-token')") is None
        listener.shutdown()
    assert Eavesdropper.headers_seen
    assert token not in "".join(Eavesdropper.headers_seen)


def test_a_used_link_is_refused_and_the_next_one_opens_the_page(
    page: Any, serve: Callable[..., Any], tmp_path: Path
) -> None:
    served = serve(make_run(tmp_path / "made"))
    used = served.link
    served.exchange(used)
    page.goto(used)
    page.get_by_text("each link opens one browser").wait_for()
    page.problems.clear()  # the console reports the two refused requests
    page.goto(served.next_link())
    page.locator(".chart svg path.line").first.wait_for(state="attached")


def test_a_run_with_invalid_numbers_does_not_affect_the_others(
    page: Any, serve: Callable[..., Any], tmp_path: Path
) -> None:
    odd = make_run(tmp_path / "runs" / "odd")
    make_run(tmp_path / "runs" / "good")
    (odd / "config.toml").write_text(f"steps = 1{'0' * 400}\n")
    open_dashboard(page, serve(tmp_path / "runs"))
    page.get_by_text("finished, step 12 of 40").wait_for()
    assert page.locator(".run").count() == 2
    page.goto(page.url.partition("#")[0] + "#/odd/5")
    page.get_by_role("heading", name="Step 5").wait_for()


def test_a_completion_that_was_not_computed_says_why(page: Any, serve: Callable[..., Any], tmp_path: Path) -> None:
    records = [completion("train/1", 0, "answer 0"), uncomputed("train/1", 1, "answer 1")]
    open_dashboard(page, serve(make_run(tmp_path / "made", completions=records)))
    page.goto(page.url.partition("#")[0] + "#/made/5/0/1")
    page.get_by_role("heading", name="Completion 2 of 2 to train/1").wait_for()
    aside = page.locator("aside").inner_text()
    assert "The advantage is 0, so the completion has no gradient. It was not computed" in aside
    assert "ratio is" not in aside
    page.locator(".tok").nth(2).hover()
    assert "not computed (advantage 0)" in page.locator(".inspector").inner_text()


def test_a_conversation_is_shown_turn_by_turn(page: Any, serve: Callable[..., Any], tmp_path: Path) -> None:
    record = completion("train/1", 0, "a" * 12)
    own = [1] * 4 + [0] * 3 + [1] * 5
    for name in ("logp_sampler", "logp_old", "logp_new", "clipped_tokens"):
        record[name] = record[name][: sum(own)]
    call = {"start": 0, "end": 4, "reward": -0.25, "calls": ["calculate"], "failed_calls": 1}
    last = {"start": 7, "end": 12, "reward": 1.0, "calls": [], "failed_calls": 0}
    record |= {"sampled": own, "turns": [call, last], "end": "done"}
    open_dashboard(page, serve(make_run(tmp_path / "made", completions=[record])))
    page.goto(page.url.partition("#")[0] + "#/made/5/0/0")
    page.get_by_role("heading", name="Conversation").wait_for()
    headings = page.locator(".turn > p").all_inner_texts()
    assert headings == [
        "Turn 1: 4 tokens, calls calculate, 1 failed, reward -0.25",
        "Observation (given to the model, not trained on)",
        "Turn 2: 5 tokens, reward 1",
    ]
    assert [block.locator(".tok").count() for block in page.locator(".turn").all()] == [4, 3, 5]
    assert "ended: done, 2 turns" in page.locator("aside").inner_text()


def test_a_branch_says_what_it_shares(page: Any, serve: Callable[..., Any], tmp_path: Path) -> None:
    record = completion("train/1", 0, "a" * 12)
    own = [1] * 4 + [0] * 3 + [1] * 5
    for name in ("logp_sampler", "logp_old", "logp_new", "clipped_tokens"):
        record[name] = record[name][: sum(own)]
    turns = [{"start": s, "end": e, "reward": None, "calls": [], "failed_calls": 0} for s, e in ((0, 4), (7, 12))]
    record |= {"sampled": own, "turns": turns, "end": "done", "branches": [[0, -1, 0], [4, 0, 9]]}
    open_dashboard(page, serve(make_run(tmp_path / "made", completions=[record])))
    page.goto(page.url.partition("#")[0] + "#/made/5/0/0")
    page.get_by_role("heading", name="Conversation").wait_for()
    heading = page.locator(".turn > p").all_inner_texts()[1]
    assert heading == (
        "Branch 2: the chat template has rewritten earlier turns. It shares 9 tokens with branch 1. What it writes "
        "after them, with the observation (given to the model, not trained on)"
    )


def test_the_expected_answer_and_the_columns_are_next_to_the_completion(
    page: Any, serve: Callable[..., Any], tmp_path: Path
) -> None:
    columns = {"level": 3, "tests": HOSTILE[0]}
    records = [completion("train/1", i, f"answer {i}", answer="forty-two", columns=columns) for i in range(2)]
    open_dashboard(page, serve(make_run(tmp_path / "made", completions=records)), "made/5")
    page.get_by_text("expected answer forty-two").wait_for()
    page.locator("a.completion").first.click()
    page.get_by_role("heading", name="Expected answer").wait_for()
    page.get_by_text("forty-two", exact=True).wait_for()
    page.get_by_text("2 other columns of the row").click()
    assert page.locator(".columns tr").all_inner_texts() == ["level\t3", f"tests\t{HOSTILE[0]}"]
    page.keyboard.press("Escape")
    page.goto(page.url.partition("#")[0] + "#/made/6/0/0")
    page.get_by_role("heading", name="Completion 1 of 4").wait_for()
    assert page.get_by_text("Expected answer").count() == 0


def test_from_an_evaluation_to_what_changed(page: Any, serve: Callable[..., Any], tmp_path: Path) -> None:
    open_dashboard(page, serve(make_run(tmp_path / "made")))
    page.get_by_role("link", name="step 10", exact=True).click()
    page.get_by_role("heading", name="Evaluation after step 10").wait_for()
    page.get_by_text("3 of 3 recorded problems", exact=True).wait_for()
    page.get_by_text("Since step 0: 1 better, 1 worse").wait_for()
    page.locator("main .controls select").last.select_option("worse")
    page.get_by_text("1 of 3 recorded problems", exact=True).wait_for()
    assert page.locator("[data-problem]").count() == 1
    row = page.locator("[data-problem]").inner_text()
    for part in (
        "what is held_out/2?",
        "worse than before",
        "0 of 1 correct (before: 1 of 1)",
        "forty-two",
        "greedy 0",
    ):
        assert part in row
    page.get_by_text("text of the 2 completions").click()
    page.get_by_text("held_out/2 at 10").wait_for()
    page.locator("a.completion").first.click()
    page.get_by_role("heading", name="Completion 1 of 2 to held_out/2").wait_for()
    aside = page.locator("aside").inner_text()
    assert "not trained on" in aside
    assert "advantage" not in aside
    assert "held_out/2 at 0" in page.locator(".before").first.inner_text()
    page.locator(".before a").first.click()
    # Not its text: a heading of the page before contains it, too.
    page.get_by_role("link", name="evaluation after step 0", exact=True).wait_for()
    page.keyboard.press("Escape")
    page.get_by_text("There is no recorded evaluation before it").wait_for()
    assert page.evaluate("window.hacked") is None


def test_from_a_curve_to_a_token(page: Any, serve: Callable[..., Any], tmp_path: Path) -> None:
    records = [
        completion("train/1", i, f"answer {i}", clipped_fraction=float(i == 1), sequence_ratio=1 + i / 100)
        for i in range(3)
    ]
    own = [1, 1, 1, 0, 1, 1, 1, 1]
    fields = ("logp_sampler", "logp_old", "logp_new", "clipped_tokens")
    records[1] |= {"sampled": own} | {name: records[1][name][: sum(own)] for name in fields}
    run = make_run(tmp_path / "made", completions=records)
    open_dashboard(page, serve(run))
    page.locator(".chart svg path.line").first.wait_for(state="attached")  # an empty chart has no readout
    chart = page.locator(".chart svg").first
    box = chart.bounding_box()
    chart.hover(position={"x": 60 + (box["width"] - 60) * 5 / 12, "y": 40})
    assert "step 5" in page.locator(".chart .legend").first.inner_text()
    chart.click(position={"x": 60 + (box["width"] - 60) * 5 / 12, "y": 40})
    page.get_by_role("heading", name="Step 5").wait_for()
    page.locator("a.completion.clipped").click()
    page.get_by_role("heading", name="Completion 2 of 3 to train/1").wait_for()
    assert "Clipped above the clip range: no gradient." in page.locator("aside").inner_text()
    page.locator(".tok").nth(2).hover()
    inspector = page.locator(".inspector").inner_text()
    policies = [f"log-prob, {name}" for name in ("new policy", "old policy", "sampler", "reference")]
    for part in ("token 3 of 8", *policies, "not recorded", "-0.5000"):
        assert part in inspector
    assert "given to the model" not in inspector
    assert page.locator(".tok.t4, .tok.t-4").count() > 0
    page.locator(".tok").nth(3).hover()
    given = page.locator(".inspector").inner_text()
    assert "it was given to the model" in given
    assert "not trained on" in given
    assert "-0.5000" not in given


def test_a_completion_of_the_first_update_has_no_scale(page: Any, serve: Callable[..., Any], tmp_path: Path) -> None:
    record = completion("train/1", 0, "answer", sequence_ratio=1.0)
    record["logp_new"] = record["logp_old"]
    make_run(tmp_path / "made", completions=[record])
    open_dashboard(page, serve(tmp_path / "made"), "made/5/0/0")
    page.get_by_text("0 for every token").wait_for()
    page.get_by_label("color by").select_option(label="log-prob")
    page.locator(".scale i").first.wait_for()


def test_a_run_without_completions_promises_none(page: Any, serve: Callable[..., Any], tmp_path: Path) -> None:
    shutil.rmtree(make_run(tmp_path / "made") / "rollouts")
    open_dashboard(page, serve(tmp_path / "made"), "made/5")
    page.get_by_text("No other step has any.").wait_for()


def test_a_report_shows_the_problems_of_the_last_evaluation(page: Any, tmp_path: Path) -> None:
    page.goto(write_report([make_run(tmp_path / "made")], tmp_path / "report.html").as_uri())
    page.get_by_text("held-out problems after step 10").click()
    page.locator(".evaluation .controls select").select_option("wrong")
    assert page.locator("[data-problem]").count() == 1
    page.get_by_text("text of the 2 completions").click()
    page.get_by_text("held_out/2 at 10").wait_for()
    assert page.locator(".evaluation a").count() == 0


def test_the_keyboard_reaches_everything(page: Any, serve: Callable[..., Any], tmp_path: Path) -> None:
    served = serve(make_run(tmp_path / "made"))
    open_dashboard(page, served)
    page.locator(".chart svg path.line").first.wait_for(state="attached")
    page.locator(".chart svg").first.focus()
    page.keyboard.press("Home")
    for _ in range(5):
        page.keyboard.press("ArrowRight")
    assert "step 6" in page.locator(".chart .legend").first.inner_text()
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Step 6").wait_for()
    page.keyboard.press("k")
    page.get_by_role("heading", name="Step 5").wait_for()
    page.keyboard.press("/")
    page.keyboard.type("evil")
    page.get_by_text("1 of 7 completions").wait_for()
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Completion 6 of 7").wait_for()
    page.locator(".tok").first.focus()
    page.keyboard.press("ArrowRight")
    assert "token 2 of" in page.locator(".inspector").inner_text()
    page.keyboard.press("Escape")
    page.get_by_role("heading", name="Step 5").wait_for()
    page.keyboard.press("Escape")
    page.get_by_text("Diagnosis").wait_for()


def test_model_output_is_shown_as_text(page: Any, serve: Callable[..., Any], tmp_path: Path) -> None:
    """In the events, the groups, the search and the completion, for each hostile text."""
    open_dashboard(page, serve(make_run(tmp_path / "made")))
    page.get_by_text("window.hacked = 1").first.wait_for()
    for number in range(len(HOSTILE)):
        page.goto(page.url.partition("#")[0] + f"#/made/5/0/{number}")
        page.get_by_role("heading", name=f"Completion {number + 1} of").wait_for()
        page.wait_for_timeout(50)
    page.goto(page.url.partition("#")[0] + "#/made/5")
    page.get_by_label("search prompts and completions").fill("script")
    page.get_by_text("4 of 7 completions").wait_for()
    assert page.evaluate("window.hacked") is None
    assert page.locator("main img, main script, main iframe, main svg[onload]").count() == 0
    page.goto(page.url.partition("#")[0] + "#/made/5/0/5")
    page.locator(".tok").first.wait_for()
    shown = page.locator("main").inner_text()
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e]", shown)


def names_drawn(page: Any) -> set[str]:
    """The runs whose curves are in the first chart."""
    groups = page.locator(".chart svg").first.locator("g.series")
    return set(groups.evaluate_all("(all) => all.map((g) => g.dataset.run)"))


def draws(page: Any, *names: str) -> None:
    """Wait until the first chart has the curves of these runs."""
    for _ in range(100):
        if names_drawn(page) == set(names):
            return
        page.wait_for_timeout(100)
    assert names_drawn(page) == set(names)


def test_runs_are_selected_in_the_sidebar_and_the_address_keeps_them(
    page: Any, serve: Callable[..., Any], tmp_path: Path
) -> None:
    for name in ("first", "second", "third"):
        make_run(tmp_path / "runs" / name)
    open_dashboard(page, serve(tmp_path / "runs"))
    draws(page, "first", "second", "third")
    dots = [
        page.locator(f'.run[data-run="{n}"] .dot').evaluate("(e) => getComputedStyle(e).color")
        for n in ("first", "second", "third")
    ]
    assert len(set(dots)) == 3
    page.get_by_role("checkbox", name="first").uncheck()
    draws(page, "second", "third")
    assert page.locator("#shown").inner_text() == "2 of 3"
    assert page.url.endswith("#/?runs=second,third")
    page.reload()
    draws(page, "second", "third")
    assert not page.get_by_role("checkbox", name="first").is_checked()
    page.locator('.run[data-run="second"]').hover()
    assert page.locator("g.series.faded").evaluate_all("(all) => [...new Set(all.map((g) => g.dataset.run))]") == [
        "third"
    ]
    page.get_by_role("button", name="show only second").click()
    draws(page, "second")
    page.evaluate("location.hash = '#/second/5'")
    page.get_by_role("heading", name="Step 5").wait_for()
    page.locator("#sidebar").wait_for(state="hidden")
    page.keyboard.press("Escape")
    draws(page, "second")
    assert page.url.endswith("#/?runs=second")
    page.get_by_role("button", name="none").click()
    page.get_by_text("Select a run to see its curves.").wait_for()
    assert page.locator(".chart:visible").count() == 0
    page.reload()
    page.get_by_text("Select a run to see its curves.").wait_for()
    page.get_by_role("button", name="all", exact=True).click()
    draws(page, "first", "second", "third")
    assert page.url.endswith("#/")


def test_a_curve_has_one_legend_entry_with_a_value_of_each_run(
    page: Any, serve: Callable[..., Any], tmp_path: Path
) -> None:
    for name in ("first", "second"):
        make_run(tmp_path / "runs" / name)
    open_dashboard(page, serve(tmp_path / "runs"))
    draws(page, "first", "second")
    legend = page.locator(".chart .legend").first
    keys = legend.locator(".key")
    assert keys.locator("button").all_inner_texts() == ["reward", "held-out, sampled"]
    assert [k.locator(".value").count() for k in keys.all()] == [2, 2]
    lines = page.locator(".chart svg").first.locator("path.line:not(.faint)")
    assert lines.count() == 4
    legend.get_by_role("button", name="reward").click()
    assert lines.count() == 2
    legend.get_by_role("button", name="reward").click()
    assert lines.count() == 4
    page.locator(".chart svg").first.focus()
    page.keyboard.press("Home")
    values = keys.first.locator(".value").all_inner_texts()
    assert values == ["0.31", "0.31"]
    assert "step 1" in legend.inner_text()
    # On a narrow screen, the values of a curve are in one line, behind its name or below it.
    page.set_viewport_size({"width": 300, "height": 800})
    tops = "keys => keys.map(key => [...key.querySelectorAll('.value')].map(v => v.getBoundingClientRect().top))"
    found = page.locator(".chart .legend .key").evaluate_all(tops)
    assert any(len(line) == 2 for line in found)
    assert all(len(set(line)) <= 1 for line in found)


def test_of_several_runs_a_panel_shows_its_main_curves_first(
    page: Any, serve: Callable[..., Any], tmp_path: Path
) -> None:
    names = ("first", "second")
    for name in names:
        path = make_run(tmp_path / "runs" / name)
        more = {"ratio__sequence_log_abs_mean": 1e-3, "noise__log_ratio": 1e-7}
        write_lines(path / "metrics.jsonl", [metrics(s, **more) for s in range(1, 13)])
    open_dashboard(page, serve(tmp_path / "runs"))
    draws(page, *names)
    chart = page.locator(".chart", has=page.get_by_role("heading", name="Importance ratio"))
    lines = chart.locator("path.line:not(.faint)")
    entries = chart.locator(".legend .key button")
    off = chart.locator(".legend .key button[aria-pressed=false]")
    assert (entries.count(), off.count(), lines.count()) == (5, 2, 6)
    off.last.click()
    assert (off.count(), lines.count()) == (1, 8)
    # What was chosen stays, and a single run shows all.
    page.get_by_role("button", name="show only first").click()
    off.first.wait_for(state="detached")
    assert lines.count() == 5
    page.get_by_role("button", name="all", exact=True).click()
    draws(page, *names)
    assert (off.count(), lines.count()) == (1, 8)


def test_step_times_use_the_width_of_their_card(page: Any, serve: Callable[..., Any], tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "first")
    open_dashboard(page, serve(tmp_path / "runs"))
    # Looked up and measured in one call: an update of the page replaces the chart.
    share = """() => {
        const [card, chart] = [".card.times", ".card.times svg"].map((what) => document.querySelector(what));
        return chart && chart.getBoundingClientRect().width / card.getBoundingClientRect().width;
    }"""
    assert page.wait_for_function(share).json_value() > 0.9


def test_sections_close_and_stay_closed(page: Any, serve: Callable[..., Any], tmp_path: Path) -> None:
    open_dashboard(page, serve(make_run(tmp_path / "made")))
    page.locator(".chart svg path.line").first.wait_for(state="attached")
    titles = page.locator(".section:visible > summary h2").all_inner_texts()
    assert titles == ["Reward", "Optimization", "Lengths", "Mixture of experts", "System"]
    page.get_by_role("heading", name="Expert load").wait_for()
    page.locator("summary", has_text="Mixture of experts").click()
    page.get_by_role("heading", name="Expert load").wait_for(state="hidden")
    page.reload()
    page.locator(".chart svg path.line").first.wait_for(state="attached")
    page.get_by_role("heading", name="Entropy").wait_for()
    page.get_by_role("heading", name="Expert load").wait_for(state="hidden")
    page.locator("summary", has_text="Mixture of experts").click()
    page.locator('.section[data-section="Mixture of experts"] path.line').first.wait_for(state="attached")
    page.get_by_role("button", name="What Expert load shows").click()
    page.get_by_text("1 is perfectly balanced").wait_for()


def test_a_section_without_curves_is_hidden(page: Any, serve: Callable[..., Any], tmp_path: Path) -> None:
    run = make_run(tmp_path / "dense")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    write_lines(run / "metrics.jsonl", [{k: v for k, v in r.items() if "routing" not in k} for r in rows])
    open_dashboard(page, serve(run))
    page.locator(".chart svg path.line").first.wait_for(state="attached")
    assert "Mixture of experts" not in page.locator(".section:visible > summary h2").all_inner_texts()


def test_findings_of_several_runs_are_grouped(page: Any, serve: Callable[..., Any], tmp_path: Path) -> None:
    for name in ("first", "second"):
        make_run(tmp_path / "runs" / name)
    events = [{"time": "2026-01-01T00:00:09", "event": "error", "error": "RewardError", "message": "broken"}]
    write_lines(tmp_path / "runs" / "second" / "events.jsonl", events)
    open_dashboard(page, serve(tmp_path / "runs"))
    draws(page, "first", "second")
    groups = page.locator(".findings > li")
    titles = groups.locator("summary strong").all_inner_texts()
    assert len(titles) == len(set(titles))
    levels = [title.partition(":")[0] for title in titles]
    assert levels == sorted(levels, key=["Problem", "Warning", "Note", "Good"].index)
    for title, runs in {"Problem: error": ["second"], "Problem: alarm": ["first"]}.items():
        assert groups.filter(has_text=title).locator("summary .name").all_inner_texts() == runs
    page.get_by_text("The run stopped with an error").wait_for()
    groups.filter(has_text="Problem: error").locator("summary").click()
    page.get_by_text("The run stopped with an error").wait_for(state="hidden")
    page.locator("input[type=range]").fill("0.9")  # draws everything again
    page.get_by_text("The run stopped with an error").wait_for(state="hidden")


def test_the_list_of_many_runs_scrolls_and_can_be_searched(
    page: Any, serve: Callable[..., Any], tmp_path: Path
) -> None:
    for i in range(30):
        make_run(tmp_path / "runs" / f"a-run-with-a-longer-name-{i}", steps=2)
    open_dashboard(page, serve(tmp_path / "runs"))
    page.locator(".run").nth(29).wait_for(state="attached")
    assert page.locator("#shown").inner_text() == "1 of 30"
    assert page.locator(".run input").first.is_checked(), "the newest run is the first of the list"
    assert page.evaluate("(box => box.scrollHeight > box.clientHeight)(document.getElementById('sidebar'))")
    assert page.evaluate("document.documentElement.scrollWidth") <= 1300
    page.get_by_label("find a run").fill("name-17")
    assert page.locator(".run:visible .name").all_inner_texts() == ["a-run-with-a-longer-name-17"]
    page.locator(".run:visible input").check()
    page.locator('g.series[data-run="a-run-with-a-longer-name-17"]').first.wait_for(state="attached")


def test_an_event_label_is_never_broken(page: Any, serve: Callable[..., Any], tmp_path: Path) -> None:
    for name in ("first", "a-run-with-a-much-longer-name-than-the-other"):
        run = make_run(tmp_path / "runs" / name)
        event = {"time": "2026-01-01T00:00:07", "event": "no_trainable_samples", "step": 7, "reasons": "x" * 300}
        write_lines(run / "events.jsonl", [event])
    served = serve(tmp_path / "runs")
    for width in (420, 1300):
        page.set_viewport_size({"width": width, "height": 900})
        if width == 420:
            open_dashboard(page, served)
        # Looked up and measured in one call: an update of the page replaces the cell.
        lines = """() => {
            const cells = [...document.querySelectorAll(".events td")];
            const label = cells.find((cell) => cell.textContent.includes("no trainable samples"));
            if (!label) return 0;
            const range = document.createRange();
            range.selectNodeContents(label);
            return new Set([...range.getClientRects()].map((box) => box.top)).size;
        }"""
        assert page.wait_for_function(lines).json_value() == 1
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_zoom_smoothing_and_log_axis_change_the_curves(page: Any, serve: Callable[..., Any], tmp_path: Path) -> None:
    open_dashboard(page, serve(make_run(tmp_path / "made", steps=40)))
    line = page.locator(".chart svg path.line:not(.faint)").first
    line.wait_for(state="attached")
    paths = [line.get_attribute("d")]
    page.locator("input[type=range]").fill("0.9")
    paths.append(line.get_attribute("d"))
    page.get_by_role("button", name="log").first.click()
    paths.append(line.get_attribute("d"))
    box = page.locator(".chart svg").first.bounding_box()
    page.mouse.move(box["x"] + 100, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 220, box["y"] + 60, steps=4)
    page.mouse.up()
    page.get_by_role("button", name="show all steps").wait_for()
    paths.append(page.locator(".chart svg path.line:not(.faint)").first.get_attribute("d"))
    assert len(set(paths)) == 4
    page.mouse.dblclick(box["x"] + 150, box["y"] + 60)
    page.get_by_role("button", name="show all steps").wait_for(state="hidden")
    assert page.url.endswith("/")


@pytest.mark.parametrize("width", [360, 1300])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_the_window_in_both_color_schemes(
    browser: Any, serve: Callable[..., Any], tmp_path: Path, width: int, scheme: str
) -> None:
    served = serve(make_run(tmp_path / "made"))
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = context.new_page()
    open_dashboard(page, served)
    page.locator(".chart svg path.line").first.wait_for(state="attached")
    for where in ("", "#/made/5", "#/made/5/0/0"):
        page.goto(f"http://{served.host}/{where}")
        page.locator("main h1, main h2").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        text, back = (page.evaluate(f"getComputedStyle(document.body).{name}") for name in ("color", "backgroundColor"))
        light = [sum(map(int, re.findall(r"\d+", c)[:3])) for c in (text, back)]
        assert (light[0] < light[1]) == (scheme == "light")
    context.close()


def test_a_stopped_server_is_reported(browser: Any, serve: Callable[..., Any], tmp_path: Path) -> None:
    served = serve(make_run(tmp_path / "made"))
    page = browser.new_context().new_page()
    open_dashboard(page, served)
    page.locator(".chart svg path.line").first.wait_for(state="attached")
    served.process.kill()
    page.get_by_text("The server does not respond").wait_for(timeout=15_000)


def test_the_report_is_one_file_that_runs_only_its_own_script(page: Any, tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "runs" / name) for name in ("<b>odd", "two")]
    out = write_report(runs, tmp_path / "report.html")
    page.goto(f"file://{out}")
    page.locator(".chart svg path.line").first.wait_for(state="attached")
    page.locator("details.example summary").first.click()
    page.locator("details.example .tok").first.wait_for()
    page.locator("details.example .tok").first.hover()
    assert "log-prob, old policy" in page.locator(".inspector").first.inner_text()
    assert page.evaluate("window.hacked") is None
    assert page.locator("b", has_text="odd").count() == 0


def test_a_rollback_is_marked_and_the_marks_of_abandoned_steps_are_gone(page: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "made")
    alarm = {"time": "2026-01-01T00:00:05", "event": "alarm", "name": "repetition", "message": "in a loop"}
    rollback = {"time": "2026-01-01T00:00:06", "event": "rollback", "step": 4, "name": "repetition", "message": "back"}
    write_lines(run / "events.jsonl", [alarm | {"step": 3}, alarm | {"step": 9}, rollback, alarm | {"step": 11}])
    page.goto(f"file://{write_report([run], tmp_path / 'report.html')}")
    page.locator(".chart svg path.line").first.wait_for(state="attached")
    marks = page.locator(".chart svg").first.locator("line.mark title").all_text_contents()
    assert [mark.split(":")[0] for mark in marks] == ["3", "4", "11"]
    page.get_by_text("Events", exact=True).click()
    assert page.get_by_text("step 9", exact=True).count() == 1
    assert "The run was rolled back. Back." in page.locator("main").inner_text()


def test_the_timeline_has_a_bar_for_each_sampling_and_training(page: Any, tmp_path: Path) -> None:
    """At its place in time: batch 3 is sampled while the learner trains on batch 2, and trained on after that."""
    run = make_run(tmp_path / "made", steps=4)
    rows = [json.loads(line) for line in (run / "timings.jsonl").read_text().splitlines()]
    for row in rows:
        start = 2.0 * row["step"]
        times = {"sample_start": start, "sample_end": start + 2, "learn_start": start + 2, "learn_end": start + 3}
        row |= {f"lag/{name}_s": at for name, at in times.items()}
    write_lines(run / "timings.jsonl", rows)
    page.goto(f"file://{write_report([run], tmp_path / 'report.html')}")
    card = page.locator("section.card", has_text="Sampling and training")
    card.locator("svg path").first.wait_for(state="attached")
    texts = card.locator("svg path title").all_text_contents()
    assert len(texts) == 8
    assert sum(": sampled and scored for 2.00 s" in text for text in texts) == 4
    bars = {}
    for bar in card.locator("svg path").all():
        box = bar.evaluate("path => { const b = path.getBBox(); return [b.x, b.y, b.width]; }")
        bars[bar.locator("title").text_content().split(" for")[0]] = box
    sampled, trained = bars["step 3: sampled and scored"], bars["step 2: trained on"]
    assert sampled[0] == pytest.approx(trained[0], abs=0.1)
    assert sampled[1] < trained[1], "sampling is above training"
    assert sampled[2] == pytest.approx(2 * trained[2], abs=0.1)
    assert "Steps 1 to 4, 9.00 s" in card.inner_text()


def test_a_new_run_appears_without_a_reload(page: Any, serve: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    open_dashboard(page, serve(tmp_path / "runs"))
    page.wait_for_timeout(500)
    make_run(tmp_path / "runs" / "late")
    page.locator(".chart svg path.line").first.wait_for(state="attached", timeout=20_000)


def test_a_constant_curve_is_drawn(page: Any, serve: Callable[..., Any], tmp_path: Path) -> None:
    """Also one that differs only in the last bit, where the distance between ticks rounds to 0."""
    run = make_run(tmp_path / "made", steps=30)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    extreme = {
        "entropy/mean": lambda s: 0.1 + 0.2 if s % 2 else 0.3,
        "length/mean": lambda s: 1e308 * (-1) ** s,
        "grad/norm": lambda s: 0,
        "kl/old_new": lambda s: 1e-300,
    }
    write_lines(run / "metrics.jsonl", [row | {k: v(row["step"]) for k, v in extreme.items()} for row in rows])
    open_dashboard(page, serve(run))
    page.locator(".chart svg path.line").first.wait_for(state="attached")
    page.get_by_role("heading", name="Gradient norm").wait_for()
    assert page.locator(".chart svg path.line").count() > 25


def test_a_failing_run_does_not_affect_the_others(browser: Any, serve: Callable[..., Any], tmp_path: Path) -> None:
    """The server fails for one of two runs: the other's curves are shown, and the page names the failing one."""
    for name in ("bad", "good"):
        make_run(tmp_path / "runs" / name)
    context = browser.new_context()
    page = context.new_page()
    page.route("**/api/runs/bad?*", lambda route: route.fulfill(status=500, body="error 1234"))
    open_dashboard(page, serve(tmp_path / "runs"))
    page.locator(".chart svg path.line").first.wait_for(state="attached")
    page.get_by_text("bad: error 1234").wait_for()
    context.close()


def test_the_readout_is_empty_beyond_the_end_of_a_run(page: Any, serve: Callable[..., Any], tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "short", steps=5)
    make_run(tmp_path / "runs" / "long", steps=40)
    open_dashboard(page, serve(tmp_path / "runs"))
    page.locator(".chart svg path.line").first.wait_for(state="attached")
    page.locator(".chart svg").first.focus()
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    readout = page.locator(".chart .legend").first.locator(".key").first
    assert readout.locator('[data-run="short"]').inner_text() == "–"
    assert readout.locator('[data-run="long"]').inner_text() == "0.69"


def test_a_late_response_does_not_replace_a_newer_one(browser: Any, serve: Callable[..., Any], tmp_path: Path) -> None:
    records = [completion("train/1", i, f"word {i}", clipped_fraction=float(i in (1, 4))) for i in range(6)]
    served = serve(make_run(tmp_path / "made", completions=records))
    context = browser.new_context()
    page = context.new_page()
    held: list[Any] = []
    open_dashboard(page, served)
    page.get_by_text("Diagnosis").wait_for()

    def hold(pattern: str) -> None:
        held.clear()
        page.route(re.compile(pattern), lambda route: route.continue_() if held else held.append(route))

    def answer() -> None:
        with page.expect_response(lambda response: response.url == held[0].request.url):
            held[0].continue_()
        page.wait_for_timeout(300)

    hold(r"/steps/5\?$")
    page.goto(f"http://{served.host}/#/made/5")
    page.locator("main select", has=page.locator("option[value=clipped]")).select_option("clipped")
    page.get_by_text("2 of 6 completions").wait_for()
    answer()
    assert page.get_by_text("2 of 6 completions").is_visible(), "the whole step was requested first and arrived last"

    hold(r"/steps/5/0/1$")
    for number in (1, 3):
        page.evaluate(f"location.hash = '#/made/5/0/{number}'")
    page.get_by_role("heading", name="Completion 4 of 6").wait_for()
    answer()
    page.get_by_role("heading", name="Completion 4 of 6").wait_for()

    hold(r"/api/runs/made\?.*from=")
    page.goto(f"http://{served.host}/#/")
    page.locator(".chart svg path.line").first.wait_for(state="attached")
    chart = page.locator(".chart svg").first.bounding_box()
    page.mouse.move(chart["x"] + 0.4 * chart["width"], chart["y"] + chart["height"] / 2)
    page.mouse.down()
    page.mouse.move(chart["x"] + 0.8 * chart["width"], chart["y"] + chart["height"] / 2, steps=4)
    page.mouse.up()
    page.wait_for_timeout(300)
    assert held
    line = page.locator(".chart svg path.line:not(.faint)").first
    page.keyboard.press("Escape")
    page.get_by_role("button", name="show all steps").wait_for(state="hidden")
    page.wait_for_timeout(300)
    whole = line.get_attribute("d")
    answer()
    page.locator("input[type=range]").fill("0.62")
    page.locator("input[type=range]").fill("0.6")
    assert line.get_attribute("d") == whole, "redrawn from the data of the last request"
    context.close()


def test_filters_persist_and_navigation_follows_them(page: Any, serve: Callable[..., Any], tmp_path: Path) -> None:
    records = [completion("train/1", i, f"word {i}", clipped_fraction=float(i in (1, 4))) for i in range(6)]
    served = serve(make_run(tmp_path / "made", completions=records))
    open_dashboard(page, served, "made/5")
    page.locator("main select", has=page.locator("option[value=clipped]")).select_option("clipped")
    page.get_by_text("2 of 6 completions").wait_for()
    page.locator("a.match").first.click()
    page.get_by_role("heading", name="Completion 2 of 6").wait_for()
    page.keyboard.press("j")
    page.get_by_role("heading", name="Completion 5 of 6").wait_for()
    page.keyboard.press("Escape")
    page.get_by_text("2 of 6 completions").wait_for()
