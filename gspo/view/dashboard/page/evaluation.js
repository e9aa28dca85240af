"use strict";
// An evaluation: its problems, what the model answered, and what changed since the evaluation before.

const CHANGES = { better: ["mixed", "better than before"], worse: ["worse", "worse than before"] };

function setName(name) {
  return name || "held-out problems";
}

// "accuracy 45 % [40 %, 50 %], reward 0.5 [0.4, 0.6]"
function evaluationNumbers(numbers) {
  const forms = { accuracy: "share", accuracy_greedy: "share", reward: "number" };
  const labels = { accuracy_greedy: "greedy accuracy" };
  return Object.entries(numbers).map(([measure, [value, low, high]]) => {
    const interval = known(low) && known(high) ? ` [${format(low, forms[measure])}, ${format(high, forms[measure])}]` : "";
    return `${labels[measure] || measure} ${format(value, forms[measure])}${interval}`;
  }).join(", ");
}

function changeSummary(found) {
  if (!known(found.before_step)) return "There is no recorded evaluation before it to compare with.";
  return `Since step ${found.before_step}: ${found.better} better, ${found.worse} worse, `
    + `${found.total - found.better - found.worse} of ${found.total} recorded problems unchanged or not comparable.`;
}

function completionLabel(completion) {
  const value = completion.status === "unscored" ? "?" : format(completion.reward);
  return completion.greedy ? `greedy ${value}` : value;
}

// `href`: the address of a completion by its number; null where there is none, as in the report.
function completionLink(completion, index, href) {
  const summary = completionSummary(completion);
  const attributes = {
    class: completionClass(completion), href, title: summary, "aria-label": `completion ${index + 1}: ${summary}`,
  };
  return node(href ? "a" : "span", attributes, completionLabel(completion));
}

function answerText(completion, index) {
  return node("div", { class: "answer" },
    node("span", { class: completionClass(completion) }, completionLabel(completion)),
    node("span", { class: "text", dir: "auto", "data-number": index }, completion.excerpt || "(empty completion)"));
}

// `href(group, number)`: the address of a completion, or null.
function problemRow(problem, href) {
  const { before } = problem;
  const verdict = problem.judged ? `${problem.correct} of ${problem.judged} correct` : `reward ${format(problem.reward)}`;
  const was = before?.judged ? ` (before: ${before.correct} of ${before.judged})` : "";
  const change = CHANGES[problem.change];
  const boxes = problem.completions.map((c, i) => completionLink(c, i, href(problem.group, i)));
  const count = `${problem.completions.length} completion${problem.completions.length === 1 ? "" : "s"}`;
  return node("div", { class: "group", "data-problem": problem.prompt_id },
    node("div", {},
      node("div", { class: "prompt" }, problem.prompt),
      change ? node("span", { class: `tag ${change[0]}` }, change[1]) : null,
      node("span", { class: "soft" }, `${change ? "  " : ""}${verdict}${was}, ${problem.prompt_id}`),
      known(problem.answer) ? node("span", {}, ", expected answer ", node("b", {}, problem.answer)) : null),
    node("div", { class: "completions" }, ...boxes),
    node("details", { class: "answers" }, node("summary", { class: "soft" }, `text of the ${count}`),
      ...problem.completions.map(answerText)));
}

function problemRows(found, kind, href) {
  const problems = found.problems.filter((p) => !kind || p.kinds.includes(kind));
  const unlisted = found.found > found.problems.length ? `; the first ${found.problems.length} are searched` : "";
  const head = node("p", { class: "soft" }, `${problems.length} of ${found.total} recorded problems${unlisted}`);
  return [head, ...problems.map((p) => problemRow(p, href))];
}

// Which problems to list: all, or a kind of them.
function problemChooser(filters, chosen, onchange) {
  const options = Object.entries(filters).map(([value, label]) => node("option", { value, selected: value === chosen }, label));
  return node("label", {}, "show ", node("select", { onchange: (e) => onchange(e.target.value) },
    node("option", { value: "" }, "all problems"), ...options));
}

// The completions of the same problem in the evaluation before; null if there are none.
function beforeCard(completion, href) {
  const { before } = completion;
  if (!before?.length) return null;
  const link = (c) => (href ? node("a", { href: href(c) }, completionSummary(c)) : completionSummary(c));
  return node("section", { class: "card" }, node("h2", {}, `The same problem in the evaluation after step ${before[0].step}`),
    ...before.map((c) => node("div", { class: "before" }, node("p", { class: "soft" }, c.greedy ? "greedy: " : "", link(c)),
      node("p", { class: "text", dir: "auto" }, c.excerpt))));
}
