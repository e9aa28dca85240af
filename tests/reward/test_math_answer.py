"""`math_answer` on answers of real data sets, in formats that models use: right answers score 1, others 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gspo.config import RewardConfig
from gspo.reward.reward import RewardPool

ROWS: list[tuple[Any, int]] = [
    # GSM8K (the text after ####), AMC 2023 (floats) and AIME 2024 (leading zeros), each with its value
    ("72", 72),
    ("18", 18),
    ("3", 3),
    ("70000", 70000),
    ("1,080", 1080),
    ("109,200,000", 109_200_000),
    ("-7", -7),
    (27.0, 27),
    (3159.0, 3159),
    ("025", 25),
    ("204", 204),
]

OTHER_DIGITS = str.maketrans("0123456789-", "０１２３４５６７８９－"), str.maketrans("0123456789", "٠١٢٣٤٥٦٧٨٩")

FORMATS: dict[str, Callable[[int], str]] = {
    "bare": lambda n: f"{n}",
    "after working": lambda n: f"She sold 48 + 24 = {n} clips.",
    "boxed": lambda n: f"So $\\boxed{{{n}}}$.",
    "full stop in the box": lambda n: f"\\boxed{{{n}.}}",
    "decimal": lambda n: f"\\boxed{{{n}.0}}",
    "thousands": lambda n: f"\\boxed{{{n:,}}}",
    "thousands in braces": lambda n: "\\boxed{" + f"{n:,}".replace(",", "{,}") + "}",
    "thousands by LaTeX": lambda n: "\\boxed{" + f"{n:,}".replace(",", "\\,") + "}",
    "thousands by MATH": lambda n: "\\boxed{" + f"{n:,}".replace(",", ",\\! ") + "}",
    "thousands by a thin space": lambda n: f"{n:,}".replace(",", "\u2009"),
    "thousands by a narrow space": lambda n: "#### " + f"{n:,}".replace(",", "\u202f"),
    "thousands by a space": lambda n: "#### " + f"{n:,}".replace(",", " "),
    "escaped dollar": lambda n: f"She makes \\${n} a day.",
    "boxed dollar": lambda n: f"\\boxed{{\\${n}}}",
    "dollar": lambda n: f"The total is ${n}.",
    "euro": lambda n: f"\\boxed{{€{n}}}",
    "pound": lambda n: f"<answer>£{n}</answer>",
    "currency after it": lambda n: f"<answer>{n} €</answer>",
    "dollars": lambda n: f"\\boxed{{{n}\\text{{ dollars}}}}",
    "plus": lambda n: f"<answer>{n:+d}</answer>",
    "minus sign": lambda n: f"\\boxed{{{n}}}".replace("-", "\u2212"),
    "tag": lambda n: f"<answer>{n}</answer>",
    "tag after wrong thinking": lambda n: f"<think>It is {n + 3}: \\boxed{{{n + 3}}}</think><answer>{n}</answer>",
    "after wrong thinking": lambda n: f"<think>\\boxed{{{n + 3}}} #### {n + 3}</think>\nThere are {n}.",
    "thinking that the prompt began": lambda n: f"maybe {n + 3}</think> {n}",
    "box in a tag": lambda n: f"<answer>\\boxed{{{n}}}</answer>",
    "open tag": lambda n: f"<answer>{n}",
    "tag over lines": lambda n: f"<answer>\n{n}\n</answer>\n",
    "hashes": lambda n: f"so {n + 5} - 5\n#### {n}",
    "hashes and unit": lambda n: f"#### {n} clips",
    "said": lambda n: f"The answer is {n}.",
    "said after wrong working": lambda n: f"That is {n + 4}. No: the answer is {n}.",
    "said in bold": lambda n: f"**Answer:** {n}",
    "said in full": lambda n: f"The final answer is: ${n}$. I hope it is correct.",
    "said with a sum": lambda n: f"The answer is {n - 1} + 1 = {n}",
    "said with a reason": lambda n: f"The answer is {n}, because {n + 3} less 3 is that.",
    "said with pride": lambda n: f"The answer is {n}!",
    "said with an emoji": lambda n: f"✅ **Answer: {n}** 🎉",
    "said with a reason in brackets": lambda n: f"The answer is {n} clips ({n + 3} in April, less 3).",
    "said with a formula in brackets": lambda n: f"Answer: ${n}$ (since {n - 4} + 4 is that)",
    "after an arrow": lambda n: f"⇒ {n}",
    "heading": lambda n: f"### Final Answer\n{n}",
    "equation": lambda n: f"$x = {n}$",
    "equation in the box": lambda n: f"\\boxed{{x={n}}}",
    "full-width digits": lambda n: str(n).translate(OTHER_DIGITS[0]),
    "Arabic-Indic digits": lambda n: "#### " + str(n).translate(OTHER_DIGITS[1]),
    "scientific": lambda n: f"\\boxed{{{n / 1000!r}e3}}",
    "scientific LaTeX": lambda n: f"\\boxed{{{n / 100!r} \\times 10^2}}",
    "scientific with braces": lambda n: f"${n / 10!r} \\cdot 10^{{1}}$",
    "frac": lambda n: f"\\boxed{{\\frac{{{3 * n}}}{{3}}}}",
    "dfrac": lambda n: f"\\boxed{{\\dfrac{{{2 * n}}}{{2}}}}",
    "slash": lambda n: f"<answer>{2 * n}/2</answer>",
    "boxed twice": lambda n: f"\\boxed{{{n}}} and once more \\boxed{{{n}}}",
    "leading zeros": lambda n: f"\\boxed{{{n:05d}}}",
    "degrees": lambda n: f"\\boxed{{{n}^\\circ}}",
    "percent": lambda n: f"\\boxed{{{n}\\%}}",
    "unit": lambda n: f"\\boxed{{{n}\\text{{ cm}}^2}}",
    "upright unit": lambda n: f"\\boxed{{{n}\\,\\mathrm{{km/h}}}}",
    "joined unit": lambda n: f"#### {n}cm",
    "inline": lambda n: f"so \\({n}\\).",
    "display": lambda n: f"\\[ {n} \\]",
    "bold": lambda n: f"It is **{n}**.",
    "bold in the box": lambda n: f"\\boxed{{\\textbf{{{n}}}}}",
    "difference": lambda n: f"The answer is {n + 4} - 4.",
    "words after it": lambda n: f"<answer>{n} clips altogether</answer>",
    "words before it": lambda n: f"<answer>She has {n} clips.</answer>",
}

MATH: list[tuple[str, list[str], list[str]]] = [
    # expected (answers as in MATH), right completions, wrong completions
    (
        r"\frac{3}{4}",
        [
            r"\boxed{\frac34}",
            "3/4",
            "0.75",
            r"\boxed{\tfrac{3}{4}}",
            "75%",
            r"$\frac{6}{8}$",
            "<answer>3/4</answer>",
            "so it is ¾ of it",
            r"\boxed{.75}",
        ],
        ["4", "3", r"\boxed{\frac{4}{3}}", "0.76", r"\boxed{\frac{3}{5}}", "7.5%"],
    ),
    (
        "3/4",
        ["#### 3/4", r"\boxed{\dfrac{3}{4}}"],
        ["#### 4", "#### 3", "4/3"],
    ),
    (
        r"2\sqrt{3}",
        [
            r"\boxed{2\sqrt{3}}",
            r"\boxed{\sqrt{12}}",
            r"$2 \sqrt 3$",
            "The answer is 2*sqrt(3).",
            r"\boxed{2\sqrt{3}\text{ cm}}",
            "3.46410162",
            r"\boxed{x = 2\sqrt{3}}",
            r"\boxed{2√3}",
        ],
        [r"\boxed{3\sqrt{2}}", r"\boxed{\sqrt{3}}", "3.46", "3.46410262", r"\boxed{2}"],
    ),
    (
        r"\left( 3, \frac{\pi}{2} \right)",
        [r"\boxed{(3, \frac{\pi}{2})}", r"\boxed{\left(3,\pi/2\right)}", r"The answer is $(3, \tfrac{\pi}{2})$."],
        [r"\boxed{(\frac{\pi}{2}, 3)}", r"\boxed{(3, \frac{\pi}{3})}", r"\boxed{3}"],
    ),
    (
        "p - q",
        [r"\boxed{p - q}", "$-q+p$"],
        [r"\boxed{q-p}", r"\boxed{p+q}"],
    ),
    (
        "1,-2",
        [
            r"\boxed{-2, 1}",
            r"\boxed{1} and \boxed{-2}",
            r"\boxed{1 \text{ and } -2}",
            "x = 1 or x = -2",
            r"\boxed{\{1,-2\}}",
        ],
        [r"\boxed{1}", r"\boxed{-1,2}", r"\boxed{1,-2,3}", r"\boxed{1,1}"],
    ),
    (
        r"\{1,2\}",
        [r"\boxed{\{2,1\}}", r"\boxed{1,2}"],
        [r"\boxed{\{1\}}", r"\boxed{\{1,3\}}"],
    ),
    (
        r"[0,\infty)",
        [r"\boxed{[0, \infty)}"],
        [r"\boxed{(0,\infty)}", r"\boxed{[0,\infty]}", r"\boxed{[1,\infty)}"],
    ),
    (
        r"(-\infty,2)\cup(3,\infty)",
        [r"\boxed{(-\infty, 2) \cup (3, \infty)}"],
        [r"\boxed{(-\infty, 2) \cup (4, \infty)}", r"\boxed{(3,\infty)}"],
    ),
    (
        "(1,2)",
        [r"\boxed{(1,2)}"],
        [r"\boxed{(2,1)}", r"\boxed{[1,2]}", r"\boxed{12}"],
    ),
    (
        "x=5",
        [r"\boxed{5}", r"\boxed{x=5}", "x = 5"],
        [r"\boxed{y=5}", r"\boxed{x=6}", "6"],
    ),
    (
        "y=2x+3",
        [r"\boxed{y = 2x + 3}", r"\boxed{y=3+2x}"],
        [r"\boxed{y=2x-3}", r"\boxed{3}", r"\boxed{5}"],
    ),
    (
        "A",
        [
            r"\boxed{A}",
            r"\boxed{\text{(A)}}",
            "The answer is (A).",
            "<answer>A</answer>",
            "(A)",
            r"\boxed{\textbf{(A) }72}",
            "The answer is A) 72",
        ],
        [r"\boxed{B}", "The answer is (B).", "(B)", "A or B", "The answer is not A", r"\boxed{AB}"],
    ),
    (
        "(C)",
        [r"\boxed{C}", "Answer: C"],
        [r"\boxed{D}"],
    ),
    (
        r"1\frac{1}{2}",
        ["1.5", "3/2", r"\boxed{1\frac12}", "#### 1 1/2", "1½"],
        ["1", r"\boxed{\frac{11}{2}}", "1/2", "2"],
    ),
    (
        "-3/4",
        [r"\boxed{-\frac{3}{4}}", r"\boxed{\frac{-3}{4}}", "-0.75", r"\boxed{\frac{3}{-4}}"],
        ["0.75", "3/4", "4"],
    ),
    (
        "50%",
        ["50%", r"\boxed{50\%}", "0.5", "50", "1/2", "50 percent"],
        ["5%", "49%", "0.49"],
    ),
    (
        "0.5",
        ["50%"],
        ["5%", "51%"],
    ),
    (
        "12000",
        ["1.2e4", r"\boxed{1.2\times 10^4}", "12 thousand", "$12,000", "12k", "12 000", r"\boxed{12\,000}"],
        ["1.2e5", "1.2", "12", "12 million"],
    ),
    (
        "72",
        [
            "seventy-two is wrong. #### 72",
            "<answer>seventy-two</answer>",
            r"\boxed{\text{seventy-two}}",
            "The answer is seventy-two clips.",
            "6 dozen",
            r"\boxed{8 \cdot 9}",
            r"\boxed{72 \text{ hours}}",
            r"I think that $\boxed{72}$ is the answer.",
        ],
        [
            "72 million",
            "72 dozen",
            r"\boxed{72 \text{ million}}",
            "72 or 73",
            "73 or 72",
            r"\boxed{72} or \boxed{73}",
            r"\boxed{73}\boxed{72}",
            "either 71 or 72",
            "The answer is 72 or 73.",
            "between 71 and 72",
            "not 72",
            "<answer>71</answer> 72",
            "<think>72",
            "<think>72</think>",
            r"<think>\boxed{72}</think> 71",
            "<answer>72</answer><answer>73</answer>",
            "72k",
            "72 hundred",
            r"\boxed{72 \pm 1}",
            r"\boxed{72, 73}",
            r"\boxed{>72}",
            r"\boxed{x > 72}",
            "at least 72",
            "The answer is more than 72",
            r"\boxed{72x}",
            r"\boxed{72\pi}",
            r"\boxed{72!}",
            "72/73",
            r"\boxed{\text{72 or 73}}",
            "seventy-three",
            r"\boxed{}",
            "<answer></answer>",
            "x",
            r"\boxed{72} #### 73 \boxed{71}",
            r"\boxed{72 + x}",
            "72 and 73",
            "<answer>73 = 72</answer>",
            "<answer>72 73</answer>",
            "<answer>any of 71 72</answer>",
            "So it is \\pm 72",
            "72 hundredths",
            "72 / 73",
            "<answer>73\n72</answer>",
            "72 rather than 73",
            "72, maybe 73",
            r"\boxed{71.9999999}",
            r"\boxed{72.0000001}",
            "The answer is negative 72.",
            "<answer>minus 72</answer>",
            "twice 72",
            r"\boxed{\text{half of }72}",
            "72 squared",
            "The answer is 72 or more.",
            "The answer is 71 to 72.",
            "It is not equal to 72",
            "The answer cannot be 72.",
            "72 is wrong",
            "The answer is almost 72",
            "The answer is 73 (or 72).",
        ],
    ),
    (
        "-72",
        ["The answer is negative 72.", "<answer>minus 72</answer>", "-$72"],
        ["72", "100 minus 72", "The answer is negative 73."],
    ),
    (
        "1e-8",
        ["1e-8", r"\boxed{10^{-8}}", "0.00000001", r"\boxed{\frac{1}{10^8}}", r"\boxed{1\times10^{-8}}"],
        ["2e-8", "0", r"\boxed{10^{-9}}", "0.00000002", r"\boxed{\frac{2}{10^8}}"],
    ),
    (
        "1/3",
        ["0.333333", "0.3333333333", r"\boxed{\frac{1}{3}}", "33.333333%"],
        ["0.33", "0.333", "0.333334", "0.3"],
    ),
    (
        "0.3333333333333333",
        ["1/3", "0.333333"],
        ["0.33"],
    ),
    (
        "1000000",
        ["1,000,000", "1 million", "10^6", r"\boxed{10^6}"],
        ["1000001", "999999", "1000000.5"],
    ),
    (
        "1234567.89",
        ["1,234,567.89"],
        ["1234567.90", "1234568"],
    ),
    (
        r"\pi",
        [r"\boxed{\pi}", "3.14159265", "3.141593", "π"],
        ["3.14", "3", "3.15"],
    ),
    (
        r"\sqrt{2}\text{ inches}",
        [r"\boxed{\sqrt 2}"],
        [r"\boxed{2}"],
    ),
    (
        r"90^\circ",
        ["90", "90°", r"\boxed{90^{\circ}}", "90 degrees"],
        ["91", r"\boxed{89^\circ}"],
    ),
    (
        r"\$18",
        ["18", r"\$18", "$18", "18 dollars", r"\boxed{\$18.00}"],
        ["€18", "$19"],
    ),
    (
        "x^2+2x+1",
        [r"\boxed{(x+1)^2}", "$x^2 + 2x + 1$", "x^2+2x+1"],
        [r"\boxed{x^2+2x}", r"\boxed{1}", "1", "2"],
    ),
    (
        "3+4i",
        [r"\boxed{4i+3}"],
        [r"\boxed{3-4i}", r"\boxed{3}"],
    ),
    (
        r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
        [r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}"],
        [r"\boxed{\begin{pmatrix} 2 \\ 1 \end{pmatrix}}", r"\boxed{2}"],
    ),
    (
        r"\frac{\sqrt{2}}{2}",
        [r"\boxed{\frac{1}{\sqrt{2}}}"],
        [r"\boxed{\frac{\sqrt{2}}{3}}"],
    ),
    (
        "2^{10}",
        ["1024", r"\boxed{2^{10}}"],
        ["1023"],
    ),
    (
        "2^{2^{3}}",
        ["256", r"\boxed{2^{2^{3}}}"],
        ["255"],
    ),
    (
        "2^{2023}",
        [r"\boxed{2^{2023}}"],
        [r"\boxed{2^{2022}}"],
    ),
    (
        "100!",
        [r"\boxed{100!}"],
        [r"\boxed{99!}"],
    ),
    (
        "x > 5",
        [r"\boxed{x>5}", r"\boxed{5 < x}"],
        [r"\boxed{x<5}", r"\boxed{x\ge 5}", r"\boxed{5}"],
    ),
    (
        r"11,\! 111,\! 100",
        ["11111100", "11,111,100"],
        ["11111101"],
    ),
    (
        "3, 5, 7",
        ["3, 5, 7", r"\boxed{3,5,7}"],
        [r"\boxed{3,5}", "7", r"\boxed{3,5,8}"],
    ),
    (
        "6 - 5i",
        [r"\boxed{6-5i}"],
        [r"\boxed{6+5i}"],
    ),
    (
        "0",
        ["0", "0.0", r"\boxed{0}"],
        ["1e-9", "0.0000001", "-1"],
    ),
    (
        "4210_{5}",
        [r"\boxed{4210_5}"],
        [r"\boxed{4211_5}"],
    ),
    (
        "2k+2",
        [r"\boxed{2k+2}", r"\boxed{2(k+1)}"],
        ["2000", "2002", r"\boxed{2}"],
    ),
    (
        "3R^2",
        [r"\boxed{3R^2}"],
        ["3", r"\boxed{2R^2}"],
    ),
    (
        r"10 \text{ square units}",
        ["10"],
        ["11"],
    ),
    (
        "3xy",
        [r"\boxed{3xy}"],
        ["3", r"\boxed{3x}"],
    ),
    (
        "5 m",
        ["5", r"\boxed{5\text{ m}}", "5 meters"],
        ["6 m"],
    ),
    (
        r"8\%",
        ["8", "8%"],
        ["9"],
    ),
]


@pytest.fixture(scope="module")
def scored(group: Callable[..., Any]) -> Iterator[Callable[..., list[float | None]]]:
    with RewardPool(RewardConfig(functions=("math_answer",), timeout_s=60.0, workers=1)) as pool:

        def score(answer: Any, texts: list[str]) -> list[float | None]:
            return [s.reward for s in pool.score([group(texts, answer=answer)])[0]]

        yield score


@pytest.mark.parametrize(("answer", "value"), ROWS)
def test_numbers_in_every_format_right_and_off_by_one(scored: Any, answer: Any, value: int) -> None:
    assert len(FORMATS) >= 20
    given = [(name, n) for name in FORMATS for n in (value, value + 1, value - 1, -value, 10 * value)]
    values = scored(answer, [FORMATS[name](n) for name, n in given])
    assert [(g, v) for g, v in zip(given, values, strict=True) if v != float(g[1] == value)] == []


@pytest.mark.parametrize(("answer", "right", "wrong"), MATH, ids=[row[0] for row in MATH])
def test_formulas(scored: Any, answer: str, right: list[str], wrong: list[str]) -> None:
    values = scored(answer, [*right, *wrong])
    expected = [1.0] * len(right) + [0.0] * len(wrong)
    both = zip([*right, *wrong], values, expected, strict=True)
    assert [(text, value) for text, value, wanted in both if value != wanted] == []


@pytest.mark.parametrize(
    "form", ["<answer>{}</answer>", "\\boxed{{{}}}", "#### {}", "The answer is {}.", "So {} in all."]
)
def test_only_the_final_answer_counts_not_the_working_before_it(scored: Any, form: str) -> None:
    thoughts = ["48 + 24 = {}", "so \\boxed{{{}}}", "#### {}", "The answer is {}.", "<answer>{}</answer>"]
    for n, last, value in ((72, 73, 0.0), (73, 72, 1.0)):
        texts = [f"<think>{thought.format(n)}</think>\n{form.format(last)}" for thought in thoughts]
        texts.append(f"48 + 24 = {n}, so she has {n}.\n{form.format(last)}")
        assert scored("72", texts) == [value] * len(texts)


def test_thinking_that_never_ends_has_no_final_answer(scored: Any) -> None:
    assert scored("72", ["<think>72", "<think>\\boxed{72}", "72 <think> or 73", "<think>72</think>", ""]) == [0.0] * 5


def test_expected_answer_that_is_not_mathematics_leaves_the_completion_unscored(scored: Any) -> None:
    for answer in ("Paris", "\\text{Evelyn}", "", "None", "between 12 and 13 clips", "No solution"):
        assert scored(answer, ["5", "Paris"]) == [None, None]


def test_expected_answer_may_be_a_whole_solution(scored: Any) -> None:
    for answer in ("48 + 24 = <<48+24=72>>72\n#### 72", "We get $48 + 24 = \\boxed{72}$ in 2 months."):
        assert scored(answer, ["72", "48", "2"]) == [1.0, 0.0, 0.0]


def test_the_table_of_the_docs(scored: Any, group: Callable[..., Any]) -> None:
    texts = [
        "The answer is 24 in May, so 48+24=72.\n#### 72",
        "48 + 24 = 72\n#### 72 clips",
        "72 of them. #### 71",
        "#### 71, no wait: #### 72",
        "The answer is 72",
        "The answer is 24 in May, so 48+24=72.",
    ]
    assert scored("72", texts) == [1.0, 1.0, 0.0, 1.0, 1.0, 0.0]
    options = {"math_answer": {"marker": "####"}}
    with RewardPool(RewardConfig(functions=("math_answer",), options=options, timeout_s=60.0, workers=1)) as pool:
        assert [s.reward for s in pool.score([group(texts, answer="72")])[0]] == [1.0, 1.0, 0.0, 1.0, 0.0, 0.0]
