"use strict";
// One completion, token by token. Model output is only ever set as text.

const MODES = {
  ratio: { label: "new vs. old policy (log-ratio)", of: (c, i) => difference(c.logp_new, c.logp_old, i) },
  mismatch: { label: "learner vs. sampler (log-ratio)", of: (c, i) => difference(c.logp_old, c.logp_sampler, i) },
  surprise: { label: "log-prob", of: (c, i) => (c.logp_new || c.logp_sampler)?.[i] ?? null },
  flips: { label: "expert flips", of: (c, i) => c.flipped_experts?.[i] ?? null },
};

function difference(a, b, i) {
  return a && b && Number.isFinite(a[i]) && Number.isFinite(b[i]) ? a[i] - b[i] : null;
}

function known(value) {
  return value !== null && value !== undefined;
}

function completionClass(completion) {
  const classes = ["completion"];
  if (completion.status === "unscored") classes.push("unscored");
  else if (completion.correct === true) classes.push("right");
  else if (completion.correct === false) classes.push("wrong");
  if (completion.clipped_fraction > 0) classes.push("clipped");
  if (completion.trained === false) classes.push("left");
  return classes.join(" ");
}

function completionSummary(completion) {
  const { advantage, correct, clipped_fraction: clipped } = completion;
  const parts = [`${completion.length} tokens`];
  parts.push(completion.status === "unscored" ? "unscored" : `reward ${format(completion.reward)}`);
  if (known(correct)) parts.push(correct ? "correct" : "wrong");
  if (known(advantage)) parts.push(`advantage ${format(advantage)}`);
  if (clipped > 0) parts.push(clipped < 1 ? `${format(clipped, "share")} of its tokens clipped` : "clipped");
  if (completion.stop === "length") parts.push("truncated");
  if (completion.thinking_cut) parts.push("thinking cut");
  const turns = turnCount(completion);
  if (turns) parts.push(`${turns} turn${turns === 1 ? "" : "s"}`);
  if (completion.trained === false) parts.push(`not trained on: ${completion.drop_reason || "unknown"}`);
  if (completion.computed === false) parts.push("not computed");
  return parts.join(", ");
}

// Whether the completion was clipped, and on which side of the clip range.
function clipSentence(completion) {
  const { sequence_ratio: ratio, clip_low: low, clip_high: high, advantage, clipped_fraction: share } = completion;
  if (completion.evaluation) return "A completion of an evaluation. It is not trained on.";
  if (completion.trained === false) return `The completion was not trained on: ${completion.drop_reason || "unknown"}.`;
  if (completion.computed === false) {
    return "The advantage is 0, so the completion has no gradient. It was not computed: there are no log-probs of the "
      + "learner, and no ratio. It counts in the denominators of the loss.";
  }
  if (!Number.isFinite(ratio)) return "";
  const start = `The sequence ratio is ${ratio.toPrecision(6)}.`;
  const direction = share === 1 ? ""
    : advantage > 0 ? "The advantage is positive, so the update makes the completion more likely."
    : advantage < 0 ? "The advantage is negative, so the update makes the completion less likely."
    : "The advantage is 0, so the completion has no gradient.";
  if (!Number.isFinite(low)) {
    const acted = share > 0 ? ` The trust region acted on ${format(share, "share")} of its tokens.` : "";
    return `${start} ${direction}${acted}`;
  }
  const bounds = (digits) => `${(1 - low).toPrecision(digits)} to ${(1 + high).toPrecision(digits)}`;
  const range = { sequence: `The clip range is ${bounds(6)}.`, token: `The clip range of each token is ${bounds(4)}.` };
  const side = ratio > 1 + high ? " above the clip range" : ratio < 1 - low ? " below the clip range" : "";
  const clipped = share === 1 ? `Clipped${completion.range_of === "sequence" ? side : ""}: no gradient.`
    : share > 0 ? `${format(share, "share")} of its tokens are clipped.` : "Not clipped.";
  return `${start} ${range[completion.range_of] || ""} ${direction} ${clipped}`;
}

// The sequence ratio within the clip range.
function gauge(completion) {
  const { sequence_ratio: ratio, clip_low: low, clip_high: high } = completion;
  if (completion.range_of !== "sequence" || ![ratio, low, high].every(Number.isFinite)) return null;
  const reach = 1.25 * Math.max(low, high, Math.abs(ratio - 1)), W = 320;
  const at = (v) => W / 2 + ((v - 1) / reach) * (W / 2 - 8);
  const out = completion.clipped_fraction > 0;
  const text = (x, label, anchor) => node("svg:text", { class: "tick", x, y: 50, "text-anchor": anchor }, label);
  const axis = (x1, x2, y1, y2) => node("svg:line", { class: "axis", x1, x2, y1, y2 });
  const left = at(1 - low), right = at(1 + high);
  const attributes = { class: "gauge", viewBox: `0 0 ${W} 56`, role: "img", "aria-label": clipSentence(completion) };
  return node("svg:svg", attributes,
    node("svg:rect", { class: "range", x: left, width: Math.max(1, right - left), y: 8, height: 24 }),
    axis(0, W, 20, 20), axis(at(1), at(1), 8, 32),
    node("svg:line", { class: out ? "needle out" : "needle", x1: at(ratio), x2: at(ratio), y1: 2, y2: 38 }),
    text(left, `1 − ${low.toPrecision(2)}`, left < 70 ? "start" : "end"),
    text(right, `1 + ${high.toPrecision(2)}`, right > W - 70 ? "end" : "start"));
}

function tableRow(name, value) {
  return node("tr", {}, node("th", {}, name), node("td", {}, value));
}

// The list of completions has the number of turns, a single completion has the turns.
function turnCount(completion) {
  return Array.isArray(completion.turns) ? completion.turns.length : completion.turns || 0;
}

// The tokens of a conversation by who wrote them: [start, end, turn], where turn is null for an observation.
function segments(completion) {
  const found = [];
  let at = 0;
  for (const turn of Array.isArray(completion.turns) ? completion.turns : []) {
    if (turn.start > at || branchAt(completion, at)) found.push([at, turn.start, null]);
    found.push([turn.start, turn.end, turn]);
    at = turn.end;
  }
  if (at < completion.tokens.length) found.push([at, completion.tokens.length, null]);
  return found;
}

// The number and the shared tokens of the branch that begins with this token; null if none does.
function branchAt(completion, at) {
  const branches = completion.branches || [];
  const number = branches.findLastIndex(([start], i) => i && start === at);
  return number > 0 ? [number + 1, branches[number][2], branches[number][1] + 1] : null;
}

function turnHeading(turn, number, branch) {
  if (turn === null && branch) {
    return `Branch ${branch[0]}: the chat template has rewritten earlier turns. It shares ${branch[1]} tokens with branch `
      + `${branch[2]}. What it writes after them, with the observation (given to the model, not trained on)`;
  }
  if (turn === null) return "Observation (given to the model, not trained on)";
  const facts = [`Turn ${number}: ${turn.end - turn.start} tokens`];
  if (turn.calls.length) facts.push(`calls ${turn.calls.join(", ")}`);
  if (turn.failed_calls) facts.push(`${turn.failed_calls} failed`);
  if (turn.other_format) facts.push(`no call, but would be one in format ${turn.other_format}`);
  if (known(turn.reward)) facts.push(`reward ${format(turn.reward)}`);
  return facts.join(", ");
}

class TokenView {
  constructor(completion) {
    this.completion = completion;
    const recorded = (mode) => completion.tokens.some((_, i) => MODES[mode].of(completion, i) !== null);
    this.modes = Object.keys(MODES).filter(recorded);
    this.mode = this.modes[0];
    const hint = node("p", { class: "soft" }, "Point at a token, or move with ← and →.");
    this.inspector = node("div", { class: "inspector", "aria-live": "polite" }, hint);
    this.scaleBar = node("span", { class: "scale" });
    this.text = node("div", { class: "text", dir: "auto" });
    this.spans = completion.tokens.map((_, i) => (
      node("span", { class: "tok", tabindex: i ? -1 : 0, "data-at": i }, this.piece(i))));
    this.arrange();
    if (!completion.tokens.length) this.text.append(node("span", { class: "soft" }, "(empty completion)"));
    this.text.addEventListener("pointerover", (e) => this.inspect(e.target));
    this.text.addEventListener("focusin", (e) => this.inspect(e.target));
    this.text.addEventListener("keydown", (e) => this.key(e));
    this.applyColors();
  }

  // All tokens, or a block for each turn and observation of a conversation.
  arrange() {
    if (!turnCount(this.completion)) {
      this.text.append(...this.spans);
      return;
    }
    let number = 0;
    for (const [start, end, turn] of segments(this.completion)) {
      number += turn ? 1 : 0;
      const heading = node("p", { class: "soft" }, turnHeading(turn, number, branchAt(this.completion, start)));
      const block = node("div", { class: turn ? "turn" : "turn given" }, heading, ...this.spans.slice(start, end));
      this.text.append(block);
    }
  }

  piece(i) {
    const text = this.completion.pieces ? this.completion.pieces[i] : `[${this.completion.tokens[i]}]`;
    return text || "·";
  }

  chooser() {
    if (!this.modes.length) return null;
    const choose = (e) => { this.mode = e.target.value; this.applyColors(); };
    const options = this.modes.map((m) => node("option", { value: m }, MODES[m].label));
    return node("label", {}, "color by ", node("select", { onchange: choose }, ...options));
  }

  applyColors() {
    const { tokens, clipped_tokens: clipped } = this.completion;
    const values = tokens.map((_, i) => (this.mode ? MODES[this.mode].of(this.completion, i) : null));
    const most = Math.max(...values.map((v) => Math.abs(v ?? 0)), 0);
    this.spans.forEach((span, i) => {
      const level = values[i] && Math.round((4 * values[i]) / most);
      span.className = `tok${level ? ` t${level}` : ""}${clipped?.[i] ? " clip" : ""}`;
    });
    // The first update of a batch has a ratio of exactly 1.
    if (!most) {
      this.scaleBar.replaceChildren("0 for every token");
      return;
    }
    const signed = this.mode === "ratio" || this.mode === "mismatch";
    const negative = this.mode === "surprise";
    const levels = signed ? [-4, -3, -2, -1, 0, 1, 2, 3, 4] : negative ? [-4, -3, -2, -1, 0] : [0, 1, 2, 3, 4];
    const [low, high] = signed ? [-most, most] : negative ? [-most, 0] : [0, most];
    const swatches = levels.map((l) => node("i", { class: `t${l}` }));
    this.scaleBar.replaceChildren(`${format(low)} `, ...swatches, ` ${high > 0 && signed ? "+" : ""}${format(high)}`);
  }

  inspect(span) {
    const i = Number(span.dataset?.at ?? NaN);
    if (!Number.isInteger(i)) return;
    this.text.querySelector(".at")?.classList.remove("at");
    span.classList.add("at");
    const c = this.completion;
    const logp = (list) => (
      Number.isFinite(list?.[i]) ? `${list[i].toFixed(4)}  (p ${Math.exp(list[i]).toPrecision(3)})` : "not recorded");
    const log = difference(c.logp_new, c.logp_old, i);
    const trained = !c.evaluation;
    const missing = c.computed === false ? "not computed (advantage 0)" : "not trained on";
    const ratio = log === null ? missing : `${Math.exp(log).toPrecision(6)}  (log ${log.toExponential(2)})`;
    const given = c.sampled?.[i] === 0;
    const clipped = c.clipped_tokens && !given ? (c.clipped_tokens[i] ? "yes" : "no") : missing;
    const position = `  token ${i + 1} of ${c.tokens.length + c.omitted_tokens}, id ${c.tokens[i]}`;
    this.inspector.replaceChildren(
      node("p", {},
        node("span", { class: "text" }, `“${this.piece(i)}”`), node("span", { class: "soft" }, position)),
      node("table", {}, node("tbody", {},
        trained ? tableRow("log-prob, new policy", logp(c.logp_new)) : null,
        trained ? tableRow("log-prob, old policy", logp(c.logp_old)) : null,
        tableRow("log-prob, sampler", logp(c.logp_sampler)),
        trained ? tableRow("log-prob, reference", logp(c.logp_ref)) : null,
        trained ? tableRow("ratio new / old", ratio) : null,
        trained ? tableRow("clipped", clipped) : null,
        given ? tableRow("sampled", "no, it was given to the model") : null,
        c.flipped_experts && !given ? tableRow("expert flips", String(c.flipped_experts[i])) : null,
      )));
  }

  key(event) {
    const at = Number(event.target.dataset?.at ?? NaN);
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: this.spans.length - 1 }[event.key];
    if (to === undefined || !this.spans[to]) return;
    event.preventDefault();
    event.target.setAttribute("tabindex", "-1");
    this.spans[to].setAttribute("tabindex", "0");
    this.spans[to].focus();
  }
}

function factTable(completion) {
  const { correct, reward, shaped_reward: shaped } = completion;
  const reasons = { eos: "end of sequence", stop: "stop string", length: "token limit" };
  const stop = reasons[completion.stop] || String(completion.stop);
  const unscored = `unscored: ${completion.failure || ""}`;
  const parts = Object.entries(completion.parts || {}).map(([name, value]) => (
    tableRow(`reward: ${name}`, value === null ? "none" : format(value))));
  return node("table", {}, node("tbody", {},
    tableRow("reward", completion.status === "unscored" ? unscored : format(reward)),
    ...parts,
    known(shaped) && shaped !== reward ? tableRow("shaped reward", format(shaped)) : null,
    tableRow("correct", known(correct) ? (correct ? "yes" : "no") : "no verdict"),
    completion.evaluation ? null : tableRow("advantage", format(completion.advantage)),
    completion.evaluation ? tableRow("sampling", completion.greedy ? "greedy" : "as in training") : null,
    tableRow("length", `${completion.length} tokens`),
    tableRow("stop reason", stop),
    completion.end ? tableRow("conversation", `ended: ${completion.end}, ${turnCount(completion)} turns`) : null,
    completion.thinking_cut ? tableRow("thinking", "cut at its budget") : null,
    tableRow("policy version", `${completion.version} updates`),
    completion.flips ? tableRow("expert flips", String(completion.flips)) : null,
  ));
}

// The expected answer and the other columns of the row; null if none is recorded.
function rowCard(completion) {
  const { answer, columns } = completion;
  const text = (value) => node("span", { class: "text", dir: "auto" }, value);
  const others = Object.entries(columns || {}).map(([name, value]) => tableRow(name, text(value)));
  if (!known(answer) && !others.length) return null;
  const title = `${others.length} ${known(answer) ? "other " : ""}column${others.length === 1 ? "" : "s"} of the row`;
  return node("section", { class: "card" },
    known(answer) ? node("h2", {}, "Expected answer") : null,
    known(answer) ? node("p", { class: "text", dir: "auto" }, answer) : null,
    others.length ? node("details", { class: "columns" }, node("summary", {}, title),
      node("table", {}, node("tbody", {}, ...others))) : null);
}

// `more`: cards below the completion.
function completionView(completion, ...below) {
  const view = new TokenView(completion);
  const prompt = node("p", { class: "text", dir: "auto" }, completion.prompt || "");
  const more = `${completion.omitted_tokens?.toLocaleString("en")} more tokens are not shown.`;
  const scale = view.modes.length ? view.scaleBar : null;
  const controls = node("div", { class: "controls" }, node("h2", {}, turnCount(completion) ? "Conversation" : "Completion"), view.chooser(), scale);
  const card = (...children) => node("section", { class: "card" }, ...children);
  return node("div", { class: "sides" },
    node("div", {},
      card(node("h2", {}, "Prompt"), prompt),
      rowCard(completion),
      card(controls, view.text, completion.omitted_tokens ? node("p", { class: "soft" }, more) : null),
      ...below),
    node("aside", {},
      card(node("h2", {}, "Token"), view.inspector),
      card(node("h2", {}, "Details"),
        gauge(completion), node("p", {}, clipSentence(completion)), factTable(completion))));
}
