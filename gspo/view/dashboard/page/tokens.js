"use strict";
// One reply, token by token. What the model wrote is only ever set as text.

const MODES = {
  ratio: { label: "new against old policy (log-ratio)", of: (r, i) => difference(r.logp_new, r.logp_old, i) },
  mismatch: { label: "learner against sampler (log-ratio)", of: (r, i) => difference(r.logp_old, r.logp_sampler, i) },
  surprise: { label: "how unlikely it was (log-probability)", of: (r, i) => (r.logp_new || r.logp_sampler)?.[i] ?? null },
  flips: { label: "experts that flipped", of: (r, i) => r.flipped_experts?.[i] ?? null },
};

function difference(a, b, i) {
  return a && b && Number.isFinite(a[i]) && Number.isFinite(b[i]) ? a[i] - b[i] : null;
}

function replyClass(reply) {
  const classes = ["reply"];
  if (reply.status === "unscored") classes.push("unscored");
  else if (reply.correct === true) classes.push("right");
  else if (reply.correct === false) classes.push("wrong");
  if (reply.clipped_fraction > 0) classes.push("clipped");
  if (!reply.trained) classes.push("left");
  return classes.join(" ");
}

function replyWords(reply) {
  const words = [`${reply.length} tokens`];
  words.push(reply.status === "unscored" ? "unscored" : `reward ${format(reply.reward)}`);
  if (reply.correct !== null && reply.correct !== undefined) words.push(reply.correct ? "correct" : "wrong");
  if (reply.advantage !== null && reply.advantage !== undefined) words.push(`advantage ${format(reply.advantage)}`);
  if (reply.clipped_fraction > 0) words.push(reply.clipped_fraction < 1 ? `${format(reply.clipped_fraction, "share")} of its tokens clipped` : "clipped");
  if (reply.stop === "length") words.push("cut at the limit");
  if (!reply.trained) words.push(`not learned from: ${reply.left_out || "unknown"}`);
  return words.join(", ");
}

// Whether the trust region took the reply's gradient, and on which side, in a sentence.
function clipSentence(reply) {
  const { sequence_ratio: ratio, clip_low: low, clip_high: high, advantage, clipped_fraction: share } = reply;
  if (!reply.trained) return `It was not learned from: ${reply.left_out || "unknown"}.`;
  if (!Number.isFinite(ratio)) return "";
  const moved = `Its sequence ratio is ${ratio.toPrecision(6)}.`;
  const way = advantage > 0 ? "It is better than its group, so it is pushed up." : advantage < 0 ? "It is worse than its group, so it is pushed down." : "Its advantage is 0, so it has no gradient.";
  if (!Number.isFinite(low)) return `${moved} ${way}${share > 0 ? ` The trust region acted on ${format(share, "share")} of its tokens.` : ""}`;
  const side = ratio > 1 + high ? " above the range" : ratio < 1 - low ? " below the range" : "";
  const whole = share === 1 ? `It was clipped${reply.range_of === "reply" ? side : ""}: no gradient.` : share > 0 ? `${format(share, "share")} of its tokens were clipped.` : "It was not clipped.";
  const range = { reply: `The range for it is ${(1 - low).toPrecision(6)} to ${(1 + high).toPrecision(6)}.`, token: `The range for each token's ratio is ${(1 - low).toPrecision(4)} to ${(1 + high).toPrecision(4)}.` }[reply.range_of] || "";
  return `${moved} ${range} ${way} ${whole}`;
}

function gauge(reply) {
  const { sequence_ratio: ratio, clip_low: low, clip_high: high } = reply;
  if (reply.range_of !== "reply" || !Number.isFinite(ratio) || !Number.isFinite(low) || !Number.isFinite(high)) return null;
  const reach = 1.25 * Math.max(low, high, Math.abs(ratio - 1)), W = 320, at = (v) => W / 2 + ((v - 1) / reach) * (W / 2 - 8);
  const out = reply.clipped_fraction > 0;
  const text = (x, label, anchor = "middle") => node("svg:text", { class: "tick", x, y: 50, "text-anchor": anchor }, label);
  return node("svg:svg", { class: "gauge", viewBox: `0 0 ${W} 56`, role: "img", "aria-label": clipSentence(reply) },
    node("svg:rect", { class: "range", x: at(1 - low), width: Math.max(1, at(1 + high) - at(1 - low)), y: 8, height: 24 }),
    node("svg:line", { class: "axis", x1: 0, x2: W, y1: 20, y2: 20 }), node("svg:line", { class: "axis", x1: at(1), x2: at(1), y1: 8, y2: 32 }),
    node("svg:line", { class: out ? "needle out" : "needle", x1: at(ratio), x2: at(ratio), y1: 2, y2: 38 }),
    text(at(1 - low), `1 − ${low.toPrecision(2)}`, at(1 - low) < 70 ? "start" : "end"), text(at(1 + high), `1 + ${high.toPrecision(2)}`, at(1 + high) > W - 70 ? "end" : "start"));
}

class TokenView {
  constructor(reply) {
    this.reply = reply;
    this.modes = Object.keys(MODES).filter((m) => reply.tokens.some((_, i) => MODES[m].of(reply, i) !== null));
    this.mode = this.modes[0];
    this.inspector = node("div", { class: "inspector", "aria-live": "polite" }, node("p", { class: "soft" }, "Point at a token, or move with ← and →."));
    this.scaleBar = node("span", { class: "scale" });
    this.text = node("p", { class: "text", dir: "auto" });
    this.spans = reply.tokens.map((_, i) => node("span", { class: "tok", tabindex: i ? -1 : 0, "data-at": i }, this.piece(i)));
    this.text.append(...this.spans);
    if (!reply.tokens.length) this.text.append(node("span", { class: "soft" }, "(an empty reply)"));
    this.text.addEventListener("pointerover", (e) => this.inspect(e.target));
    this.text.addEventListener("focusin", (e) => this.inspect(e.target));
    this.text.addEventListener("keydown", (e) => this.key(e));
    this.colour();
  }

  piece(i) {
    const text = this.reply.pieces ? this.reply.pieces[i] : `[${this.reply.tokens[i]}]`;
    return text || "·";
  }

  chooser() {
    if (!this.modes.length) return null;
    const select = node("select", { onchange: (e) => { this.mode = e.target.value; this.colour(); } }, ...this.modes.map((m) => node("option", { value: m }, MODES[m].label)));
    return node("label", {}, "colour: ", select);
  }

  colour() {
    const values = this.reply.tokens.map((_, i) => (this.mode ? MODES[this.mode].of(this.reply, i) : null));
    const most = Math.max(...values.map((v) => Math.abs(v ?? 0)), 1e-12);
    this.spans.forEach((span, i) => {
      const level = values[i] === null ? 0 : Math.round((4 * values[i]) / most);
      span.className = `tok${level ? ` t${level}` : ""}${this.reply.clipped_tokens?.[i] ? " clip" : ""}`;
    });
    const signed = this.mode === "ratio" || this.mode === "mismatch";
    const levels = signed ? [-4, -3, -2, -1, 0, 1, 2, 3, 4] : this.mode === "surprise" ? [-4, -3, -2, -1, 0] : [0, 1, 2, 3, 4];
    const ends = signed ? [-most, most] : this.mode === "surprise" ? [-most, 0] : [0, most];
    this.scaleBar.replaceChildren(`${format(ends[0])} `, ...levels.map((l) => node("i", { class: `t${l}` })), ` ${ends[1] > 0 && signed ? "+" : ""}${format(ends[1])}`);
  }

  inspect(span) {
    const i = Number(span.dataset?.at ?? NaN);
    if (!Number.isInteger(i)) return;
    this.text.querySelector(".at")?.classList.remove("at");
    span.classList.add("at");
    const r = this.reply, row = (name, value) => node("tr", {}, node("th", {}, name), node("td", {}, value));
    const logp = (list) => (Number.isFinite(list?.[i]) ? `${list[i].toFixed(4)}  (p ${Math.exp(list[i]).toPrecision(3)})` : "not recorded");
    const ratio = difference(r.logp_new, r.logp_old, i);
    this.inspector.replaceChildren(
      node("p", {}, node("span", { class: "text" }, `“${this.piece(i)}”`), node("span", { class: "soft" }, `  token ${i + 1} of ${r.length}, id ${r.tokens[i]}`)),
      node("table", {}, node("tbody", {},
        row("log p, new policy", logp(r.logp_new)), row("log p, old policy", logp(r.logp_old)), row("log p, sampler", logp(r.logp_sampler)), row("log p, reference", logp(r.logp_ref)),
        row("ratio new / old", ratio === null ? "not learned from" : `${Math.exp(ratio).toPrecision(6)}  (log ${ratio.toExponential(2)})`),
        row("clipped", r.clipped_tokens ? (r.clipped_tokens[i] ? "yes" : "no") : "not learned from"),
        r.flipped_experts ? row("experts that flipped", String(r.flipped_experts[i])) : null,
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

function factTable(reply) {
  const row = (name, value) => node("tr", {}, node("th", {}, name), node("td", {}, value));
  const stop = { eos: "the model ended it", length: "cut at the token limit" }[reply.stop] || String(reply.stop);
  const parts = Object.entries(reply.parts || {}).map(([name, value]) => row(`reward: ${name}`, value === null ? "none" : format(value)));
  return node("table", {}, node("tbody", {},
    row("reward", reply.status === "unscored" ? `unscored: ${reply.failure || ""}` : format(reply.reward)),
    ...parts,
    reply.shaped_reward !== null && reply.shaped_reward !== undefined && reply.shaped_reward !== reply.reward ? row("reward as learned from", format(reply.shaped_reward)) : null,
    row("correct", reply.correct === null || reply.correct === undefined ? "no verdict" : reply.correct ? "yes" : "no"),
    row("advantage", format(reply.advantage)),
    row("length", `${reply.length} tokens`), row("ended because", stop),
    row("policy version", `${reply.version} updates`),
    reply.flips ? row("experts flipped", String(reply.flips)) : null,
  ));
}

function replyView(reply) {
  const view = new TokenView(reply);
  const prompt = node("p", { class: "text", dir: "auto" }, reply.prompt || "");
  const cut = reply.cut ? node("p", { class: "soft" }, `${reply.cut.toLocaleString("en")} more tokens are not shown.`) : null;
  return node("div", { class: "sides" },
    node("div", {},
      node("section", { class: "card" }, node("h2", {}, "Prompt"), prompt),
      node("section", { class: "card" }, node("div", { class: "controls" }, node("h2", {}, "Reply"), view.chooser(), view.modes.length ? view.scaleBar : null), view.text, cut)),
    node("aside", {},
      node("section", { class: "card" }, node("h2", {}, "Token"), view.inspector),
      node("section", { class: "card" }, node("h2", {}, "This reply"), gauge(reply), node("p", {}, clipSentence(reply)), factTable(reply))));
}
