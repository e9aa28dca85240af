"use strict";
// Charts over steps, drawn as SVG. All text is set as textContent; nothing builds HTML from strings.

const SVG = "http://www.w3.org/2000/svg";
const COLORS = 7;
const DASHES = ["", "6 3", "2 3", "9 3 2 3", "14 4", "9 3 2 3 2 3"];
const MOST_VALUES = 8; // of a curve in a legend
const MOST_CURVES = 3; // of each of several runs; the legend has the others, switched off
const MARGIN = { left: 48, right: 10, top: 8, bottom: 20 };

const INVISIBLE = new RegExp([
  "[\\u0000-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u115f\\u1160\\u180e\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f",
  "\\u2800\\u3164\\ufeff\\ufff9-\\ufffb\\u{e0000}-\\u{e007f}]",
].join(""), "gu");

// Invisible and bidirectional control characters are shown by name, so that text cannot hide or reorder itself.
function visible(text) {
  return text.replace(INVISIBLE, (c) => {
    const code = c.codePointAt(0);
    if (c === "\n") return "⏎\n";
    if (c === "\t") return "⇥";
    if (code < 32) return String.fromCodePoint(0x2400 + code);
    return `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

// The only way to create an element. Children are added as text, with control characters made visible.
function node(name, attributes = {}, ...children) {
  const element = name.startsWith("svg:") ? document.createElementNS(SVG, name.slice(4)) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) {
      const text = ["title", "aria-label"].includes(key) ? visible(String(value)) : value;
      element.setAttribute(key, value === true ? "" : text);
    }
  }
  const present = children.filter((c) => c !== null && c !== undefined);
  element.append(...present.map((c) => (c instanceof Node ? c : visible(String(c)))));
  return element;
}

function format(value, form = "number") {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (form === "share") return `${(100 * value).toFixed(Math.abs(value) < 0.0995 ? 1 : 0)} %`;
  if (form === "count") return Math.round(value).toLocaleString("en");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(1);
  return Number(value.toPrecision(3)).toLocaleString("en", { maximumFractionDigits: 6 });
}

function smoothed(values, amount) {
  // Exponential moving average with bias correction: the first point is the first value, not pulled toward 0.
  if (!amount) return values;
  let mean = 0, weight = 0;
  return values.map((v) => {
    if (v === null) return null;
    mean = amount * mean + (1 - amount) * v;
    weight = amount * weight + (1 - amount);
    return mean / weight;
  });
}

function niceTicks(low, high, count) {
  const raw = (high - low) / Math.max(1, count);
  if (!(raw > 1e-12 * Math.max(Math.abs(low), Math.abs(high)))) return [low];
  const power = 10 ** Math.floor(Math.log10(raw));
  const widest = [1, 2, 5, 10].find((m) => m * power >= raw) || 1;
  // At least three ticks: fewer do not show the scale.
  const enough = (s) => Math.floor(high / s + 1e-9) - Math.ceil(low / s - 1e-9) >= 2;
  const step = [10, 5, 2, 1, 0.5, 0.2].filter((m) => m <= widest).map((m) => m * power).find(enough) || widest * power;
  const first = Math.ceil(low / step);
  return Array.from({ length: 40 }, (_, i) => (first + i) * step).filter((t) => t <= high + step * 1e-9);
}

class Axis {
  constructor(low, high, from, to, log) {
    Object.assign(this, { low, high, from, to, log });
    this.a = log ? Math.log(low) : low;
    this.b = log ? Math.log(high) : high;
  }
  at(value) {
    const share = ((this.log ? Math.log(value) : value) - this.a) / (this.b - this.a || 1);
    return this.from + share * (this.to - this.from);
  }
  back(pixel) {
    return this.a + ((pixel - this.from) / (this.to - this.from)) * (this.b - this.a);
  }
  ticks(count) {
    if (!this.log) return niceTicks(this.low, this.high, count);
    const first = Math.ceil(Math.log10(this.low)), last = Math.floor(Math.log10(this.high));
    if (last - first < 1) return niceTicks(this.low, this.high, count).filter((t) => t > 0);
    const every = Math.ceil((last - first + 1) / (count + 1));
    return Array.from({ length: last - first + 1 }, (_, i) => 10 ** (first + i)).filter((_, i) => i % every === 0);
  }
}

// Very large numbers would overflow in the conversion to pixels.
function drawable(value, log) {
  return value !== null && value !== undefined && Math.abs(value) < 1e150 && (!log || value > 0);
}

function extent(lists) {
  let low = Infinity, high = -Infinity;
  for (const list of lists) {
    for (const v of list) {
      if (v === null || !Number.isFinite(v)) continue;
      if (v < low) low = v;
      if (v > high) high = v;
    }
  }
  return [low, high];
}

class Chart {
  // panel: {title, what, form, log}. events: {cursor(x), open(x, run), range(first, last)}.
  constructor(panel, events = {}) {
    this.panel = panel;
    this.events = events;
    this.log = panel.log;
    this.series = [];
    this.marks = [];
    this.view = {};
    this.cursor = null;
    this.values = [];
    this.position = node("span", {});
    const tool = { type: "button", class: "tool", "aria-pressed": String(this.log), title: "logarithmic axis" };
    this.logButton = node("button", { ...tool, onclick: () => this.toggleLog() }, "log");
    this.svg = node("svg:svg", { tabindex: 0, role: "img", "aria-label": panel.title });
    this.hidden = new Set(); // labels of curves that are not shown
    this.chosen = new Set(); // labels of curves that the user has shown or hidden
    this.legend = node("div", { class: "legend", "aria-live": "off" });
    const what = node("p", { class: "soft what", hidden: true }, panel.what);
    const explain = () => {
      what.hidden = !what.hidden;
      this.whatButton.setAttribute("aria-expanded", String(!what.hidden));
    };
    const help = { type: "button", class: "tool", "aria-expanded": "false", title: panel.what, onclick: explain };
    this.whatButton = node("button", { ...help, "aria-label": `What ${panel.title} shows` }, "?");
    const header = node("header", {}, node("h3", {}, panel.title), this.whatButton, this.logButton);
    this.root = node("section", { class: "card chart" }, header, what, this.svg, this.legend);
    this.listen();
    if (typeof ResizeObserver !== "undefined") new ResizeObserver(() => this.draw()).observe(this.svg);
  }

  // series: [{run, label, color, dash, smooth, x, y, low?, high?, bandLow?, bandHigh?}], marks: [{x, kind, text}],
  // view: {smooth, first, last}.
  update(series, marks, view) {
    Object.assign(this, { series, marks, view });
    this.hideSome();
    this.buildLegend();
    const empty = this.panel.hide_zero && series.every((s) => s.y.every((v) => !v));
    this.root.hidden = !series.length || empty;
    this.draw();
  }

  toggleLog() {
    this.log = !this.log;
    this.logButton.setAttribute("aria-pressed", String(this.log));
    this.draw();
  }

  axes() {
    const { width, height } = this.svg.getBoundingClientRect();
    const keep = (v) => drawable(v, this.log);
    let [x0, x1] = extent(this.series.map((s) => s.x));
    if (this.view.first !== undefined && this.view.first !== null) [x0, x1] = [this.view.first, this.view.last];
    const values = this.visible.flatMap((s) => [s.y, s.bandLow || [], s.bandHigh || []]);
    let [y0, y1] = extent(values.map((list) => list.filter(keep)));
    if (y0 > y1) [y0, y1] = this.log ? [0.1, 1] : [0, 1];
    if (y1 - y0 <= 1e-9 * Math.max(Math.abs(y0), Math.abs(y1))) y0 = y1 = (y0 + y1) / 2;
    if (this.log) { if (y0 === y1) { y0 /= 2; y1 *= 2; } }
    else {
      if (this.panel.form === "share") y0 = Math.min(y0, 0);
      const pad = (y1 - y0 || Math.abs(y1) || 1) * 0.06;
      y0 = y0 >= 0 && y0 - pad < 0 ? 0 : y0 - pad;
      y1 += pad;
    }
    if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
    const x = new Axis(x0, x1, MARGIN.left, width - MARGIN.right, false);
    const y = new Axis(y0, y1, height - MARGIN.bottom, MARGIN.top, this.log);
    return { width, height, x, y };
  }

  draw() {
    if (!this.series.length || this.root.hidden || this.busy) return;
    const axes = this.axes();
    if (axes.width < 50) return;
    this.scale = axes;
    const { width, height, x, y } = axes;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const clip = `clip-${this.panel.id || "x"}-${Chart.count = (Chart.count || 0) + 1}`;
    const plot = node("svg:g", { "clip-path": `url(#${clip})` });
    const inner = { width: Math.max(0, width - MARGIN.left - MARGIN.right), height: height - MARGIN.bottom + 1 };
    const clipPath = node("svg:clipPath", { id: clip }, node("svg:rect", { x: MARGIN.left, y: 0, ...inner }));
    this.svg.replaceChildren(clipPath, ...this.grid(axes), plot);
    for (const mark of this.marks) plot.append(this.markLine(mark, x, height));
    this.visible.forEach((s) => plot.append(node("svg:g", { class: "series", "data-run": s.run }, ...this.lines(s, x, y))));
    const top = MARGIN.top, bottom = height - MARGIN.bottom, visibility = "hidden";
    this.cursorLine = node("svg:line", { class: "cursor", y1: top, y2: bottom, visibility });
    this.selection = node("svg:rect", { class: "selection", y: top, height: bottom - top, visibility });
    this.svg.append(this.cursorLine, this.selection);
    this.showCursor(this.cursor);
  }

  grid({ width, height, x, y }) {
    const elements = [];
    for (const t of y.ticks(4)) {
      const at = y.at(t);
      if (!(at > MARGIN.top - 6 && at < height - MARGIN.bottom + 1)) continue;
      elements.push(node("svg:line", { class: "axis", x1: MARGIN.left, x2: width - MARGIN.right, y1: at, y2: at }));
      const form = this.panel.form === "count" ? "number" : this.panel.form;
      const tick = { class: "tick", x: MARGIN.left - 6, y: at + 4, "text-anchor": "end" };
      elements.push(node("svg:text", tick, format(t, form)));
    }
    for (const t of x.ticks(Math.max(2, Math.floor(width / 110)))) {
      if (t % 1) continue;
      const label = t >= 1e6 ? `${Number((t / 1e6).toPrecision(3))}M` : t.toLocaleString("en");
      elements.push(node("svg:text", { class: "tick", x: x.at(t), y: height - 5, "text-anchor": "middle" }, label));
    }
    return elements;
  }

  markLine(mark, x, height) {
    const at = x.at(mark.x);
    const line = { class: `mark ${mark.kind}`, x1: at, x2: at, y1: MARGIN.top, y2: height - MARGIN.bottom };
    const text = this.several ? `${mark.run}: ${mark.text}` : mark.text;
    return node("svg:line", line, node("svg:title", {}, `${mark.x}: ${text}`));
  }

  lines(s, x, y) {
    const ok = (v) => drawable(v, this.log);
    const path = (values) => {
      let d = "", pen = "M";
      values.forEach((v, i) => {
        if (!ok(v)) { pen = "M"; return; }
        d += `${pen}${x.at(s.x[i]).toFixed(1)} ${y.at(v).toFixed(1)}`;
        pen = "L";
      });
      return d;
    };
    const area = (low, high) => {
      const there = s.x.map((_, i) => i).filter((i) => ok(low[i]) && ok(high[i]));
      if (there.length < 2) return "";
      const out = there.map((i) => `${x.at(s.x[i]).toFixed(1)} ${y.at(high[i]).toFixed(1)}`);
      const back = there.reverse().map((i) => `${x.at(s.x[i]).toFixed(1)} ${y.at(low[i]).toFixed(1)}`);
      return `M${out.join("L")}L${back.join("L")}Z`;
    };
    const color = s.color % COLORS, dash = DASHES[s.dash % DASHES.length];
    const elements = [];
    const [low, high] = s.bandLow ? [s.bandLow, s.bandHigh] : [s.low, s.high];
    if (low) elements.push(node("svg:path", { class: `band f${color}`, d: area(low, high) }));
    const soft = s.smooth && s.y.length > 8 ? smoothed(s.y, this.view.smooth || 0) : s.y;
    if (soft !== s.y) elements.push(node("svg:path", { class: `line faint s${color}`, d: path(s.y) }));
    elements.push(node("svg:path", { class: `line s${color}`, d: path(soft), "stroke-dasharray": dash || null }));
    const point = (i) => node("svg:circle", { class: `point f${color}`, cx: x.at(s.x[i]), cy: y.at(s.y[i]), r: 2.2 });
    // Not on a smoothed curve, which does not pass through them.
    if (s.x.length < 30 && soft === s.y) s.x.forEach((_, i) => ok(s.y[i]) && elements.push(point(i)));
    return elements;
  }

  // Of several runs, the first curves of a panel, which are its main ones. What the user has chosen stays.
  hideSome() {
    [...new Set(this.series.map((s) => s.label))].forEach((label, i) => {
      if (this.chosen.has(label)) return;
      if (this.several && i >= MOST_CURVES) this.hidden.add(label);
      else this.hidden.delete(label);
    });
  }

  get visible() {
    return this.series.filter((s) => !this.hidden.has(s.label));
  }

  get several() {
    return new Set(this.series.map((s) => s.run)).size > 1;
  }

  // The value of a curve at the cursor: its last point up to there, or a dash outside of the curve.
  valueAt(s, x) {
    const gap = s.x.length > 1 ? (s.x[s.x.length - 1] - s.x[0]) / (s.x.length - 1) : 1;
    if (!s.x.length || x < s.x[0] - gap / 2 || x > s.x[s.x.length - 1] + Math.max(gap, 0.5)) return "–";
    let i = nearest(s.x, x);
    if (s.x[i] > x + gap / 2 || (!s.smooth && s.x[i] > x)) i = Math.max(0, i - 1);
    const form = this.panel.form;
    if (this.several) return format(s.y[i], form);
    const spread = s.low && s.low[i] !== s.high[i] ? ` (${format(s.low[i], form)} to ${format(s.high[i], form)})` : "";
    const other = !s.smooth && s.x[i] !== x ? ` at ${Math.round(s.x[i]).toLocaleString("en")}` : "";
    return format(s.y[i], form) + spread + other;
  }

  // One entry per curve of the panel. With several runs it has a value of each, marked with the color of the run.
  buildLegend() {
    const key = this.series.map((s) => [s.run, s.label, s.color, s.dash, this.hidden.has(s.label)].join()).join("|");
    if (key === this.legendKey) return;
    this.legendKey = key;
    this.position = node("span", { class: "soft position", hidden: true });
    this.values = [];
    const labels = [...new Set(this.series.map((s) => s.label))];
    this.legend.replaceChildren(this.position, ...labels.map((label) => this.legendEntry(label, labels.length)));
  }

  legendEntry(label, count) {
    const own = this.series.filter((s) => s.label === label);
    const color = own.every((s) => s.color === own[0].color) ? `s${own[0].color % COLORS}` : "neutral";
    const dash = DASHES[own[0].dash % DASHES.length] || null;
    const sample = node("svg:line", { class: `line ${color}`, "stroke-dasharray": dash, x1: 0, x2: 24, y1: 5, y2: 5 });
    const toggle = () => {
      this.chosen.add(label);
      if (this.hidden.has(label)) this.hidden.delete(label);
      else this.hidden.add(label);
      button.setAttribute("aria-pressed", String(!this.hidden.has(label)));
      this.draw();
    };
    const pressed = { "aria-pressed": String(!this.hidden.has(label)), disabled: count < 2 };
    const button = node("button", { type: "button", ...pressed, title: "show or hide this curve", onclick: toggle },
      node("svg:svg", { "aria-hidden": "true" }, sample), label);
    const values = own.slice(0, MOST_VALUES).map((s) => {
      const text = node("span", {});
      this.values.push({ at: this.series.indexOf(s), text });
      const dot = this.several ? node("span", { class: `dot f${s.color % COLORS}` }) : null;
      return node("span", { class: "value", "data-run": s.run, title: this.several ? s.run : null }, dot, text);
    });
    const more = own.length > MOST_VALUES ? node("span", { class: "soft" }, `and ${own.length - MOST_VALUES} more runs`) : null;
    return node("span", { class: "key" }, button, node("span", { class: "values" }, ...values, more));
  }

  // Move the cursor line and show the values of all curves there, or the latest values without a cursor.
  showCursor(x) {
    this.cursor = x;
    if (this.cursorLine && this.scale) {
      const inside = x !== null && x >= this.scale.x.low && x <= this.scale.x.high;
      this.cursorLine.setAttribute("visibility", inside ? "visible" : "hidden");
      if (inside) for (const end of ["x1", "x2"]) this.cursorLine.setAttribute(end, this.scale.x.at(x));
    }
    for (const { at, text } of this.values) {
      const s = this.series[at];
      text.textContent = this.valueAt(s, x === null ? s.x[s.x.length - 1] : x);
    }
    this.position.hidden = x === null;
    this.position.textContent = x === null ? "" : `${this.view.unit || "step"} ${Math.round(x).toLocaleString("en")}`;
  }

  points() {
    return this.series.length ? this.series.reduce((a, b) => (b.x.length > a.x.length ? b : a)).x : [];
  }

  listen() {
    let dragStart = null;
    const pixelOf = (event) => {
      const box = this.svg.getBoundingClientRect();
      return Math.min(Math.max(event.clientX - box.left, MARGIN.left), box.width - MARGIN.right);
    };
    // The run whose curve is closest to the pointer.
    const runAt = (event, x) => {
      const y = event.clientY - this.svg.getBoundingClientRect().top;
      const distance = (s) => {
        const v = s.y[nearest(s.x, x)];
        if (v === null || (this.log && v <= 0) || x > s.x[s.x.length - 1]) return Infinity;
        return Math.abs(this.scale.y.at(v) - y);
      };
      const candidates = this.visible.length ? this.visible : this.series;
      return candidates.reduce((a, b) => (distance(b) < distance(a) ? b : a)).run;
    };
    const snapped = (pixel) => { const xs = this.points(); return xs[nearest(xs, this.scale.x.back(pixel))]; };
    this.svg.addEventListener("pointermove", (event) => {
      if (!this.scale || !this.series.length) return;
      const at = pixelOf(event);
      if (dragStart !== null && Math.abs(at - dragStart) > 5) {
        this.selection.setAttribute("visibility", "visible");
        this.selection.setAttribute("x", Math.min(at, dragStart));
        this.selection.setAttribute("width", Math.abs(at - dragStart));
      }
      this.move(snapped(at));
    });
    this.svg.addEventListener("pointerleave", () => { if (dragStart === null) this.move(null); });
    this.svg.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      dragStart = pixelOf(event);
      this.busy = true; // a redraw would remove the selection rectangle
      this.svg.setPointerCapture(event.pointerId);
    });
    this.svg.addEventListener("pointerup", (event) => {
      if (dragStart === null || !this.scale) return;
      const at = pixelOf(event), from = dragStart;
      dragStart = null;
      this.busy = false;
      this.selection.setAttribute("visibility", "hidden");
      clearTimeout(this.opening);
      if (Math.abs(at - from) > 5) {
        this.events.range?.(this.scale.x.back(Math.min(at, from)), this.scale.x.back(Math.max(at, from)));
        return;
      }
      const x = snapped(at), run = runAt(event, x);
      // A second click within this time is a double-click, which resets the zoom instead.
      this.opening = setTimeout(() => this.events.open?.(x, run), 250);
    });
    this.svg.addEventListener("pointercancel", () => { dragStart = null; this.busy = false; });
    this.svg.addEventListener("dblclick", () => { clearTimeout(this.opening); this.events.range?.(null, null); });
    this.svg.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    const xs = this.points(), step = event.shiftKey ? 10 : 1;
    if (!xs.length || event.ctrlKey || event.altKey || event.metaKey) return;
    let at = this.cursor === null ? xs.length - 1 : nearest(xs, this.cursor);
    if (event.key === "ArrowLeft") at -= this.cursor === null ? 0 : step;
    else if (event.key === "ArrowRight") at += this.cursor === null ? 0 : step;
    else if (event.key === "Home") at = 0;
    else if (event.key === "End") at = xs.length - 1;
    else if (event.key === "Enter" && this.cursor !== null) {
      event.preventDefault();
      this.events.open?.(this.cursor, this.series[0].run);
      return;
    } else return;
    event.preventDefault();
    this.move(xs[Math.min(xs.length - 1, Math.max(0, at))]);
  }

  move(x) {
    if (this.events.cursor) this.events.cursor(x);
    else this.showCursor(x);
  }
}

function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) { const mid = (low + high) >> 1; if (xs[mid] < x) low = mid; else high = mid; }
  return Math.abs((xs[low] ?? Infinity) - x) <= Math.abs((xs[high] ?? Infinity) - x) ? low : high;
}

// Seconds per step by phase, as stacked bars.
function drawTimes(phases, data, name) {
  const keys = phases.filter((p) => data.y[p.key]?.some((v) => v > 0));
  const totals = data.x.map((_, i) => keys.reduce((sum, p) => sum + (data.y[p.key][i] || 0), 0));
  const all = totals.reduce((a, b) => a + b, 0);
  const W = 600, H = 120, high = Math.max(...totals, 1e-9), width = W / Math.max(1, data.x.length);
  const svg = node("svg:svg", {
    class: "low", viewBox: `0 0 ${W} ${H}`, preserveAspectRatio: "none", role: "img",
    "aria-label": `${name}: seconds per step by phase`,
  });
  const below = data.x.map(() => 0);
  keys.forEach((p) => {
    const number = phases.indexOf(p);
    let d = "";
    data.x.forEach((_, i) => {
      const value = data.y[p.key][i] || 0, y0 = H - (below[i] / high) * H, y1 = H - ((below[i] + value) / high) * H;
      below[i] += value;
      const bar = width * 0.92;
      d += `M${(i * width).toFixed(2)} ${y0.toFixed(2)}h${bar.toFixed(2)}V${y1.toFixed(2)}h${(-bar).toFixed(2)}Z`;
    });
    svg.append(node("svg:path", { class: `f${number % COLORS}`, d }));
  });
  const legend = node("div", { class: "legend" }, ...keys.map((p) => {
    const sum = data.y[p.key].reduce((a, b) => a + (b || 0), 0);
    const dot = node("span", { class: `dot f${phases.indexOf(p) % COLORS}` });
    return node("span", { class: "key" }, dot, `${p.label} ${format(sum / all, "share")}`);
  }));
  const mean = all / Math.max(1, totals.length);
  const step = (x) => Math.round(x).toLocaleString("en");
  const range = data.x.length ? `steps ${step(data.x[0])} to ${step(data.x[data.x.length - 1])}` : "";
  const summary = `${name}: ${mean.toPrecision(3)} s per step, highest bar ${high.toPrecision(3)} s, ${range}`;
  return node("div", { class: "chart" }, node("p", { class: "soft what" }, summary), svg, legend);
}

// When the last steps were sampled and trained on, as two lanes of bars. A shade is a step.
function drawTimeline(rows, name) {
  const W = 600, LANE = 34, GAP = 14, H = 2 * LANE + GAP;
  const first = Math.min(...rows.map((r) => r.sample_start)), last = Math.max(...rows.map((r) => r.learn_end));
  const svg = node("svg:svg", {
    class: "low", viewBox: `0 0 ${W} ${H}`, preserveAspectRatio: "none", role: "img",
    "aria-label": `${name}: when each step was sampled and trained on`,
  });
  const x = (t) => ((t - first) / Math.max(last - first, 1e-9)) * W;
  const bar = (from, to, y, step, what, height = LANE) => {
    const width = Math.max(x(to) - x(from), 0.5).toFixed(2);
    const d = `M${x(from).toFixed(2)} ${y}h${width}v${height}h-${width}Z`;
    const text = `step ${step}: ${what} for ${(to - from).toPrecision(3)} s`;
    svg.append(node("svg:path", { class: `f${step % COLORS}`, d }, node("svg:title", {}, text)));
  };
  // Batches that are sampled in the same turn, with the weights of one step, share its time: they are drawn on top of
  // each other.
  const turns = new Map();
  rows.forEach((r) => (r.turns || []).forEach(([weights, start, end]) => {
    if (!turns.has(weights)) turns.set(weights, { start, end, steps: [] });
    turns.get(weights).steps.push(r.step);
  }));
  turns.forEach((turn, weights) => turn.steps.forEach((step, i) => {
    const height = LANE / turn.steps.length;
    const what = `a turn with the weights of step ${weights}`;
    bar(turn.start, turn.end, (i * height).toFixed(2), step, what, height.toFixed(2));
  }));
  rows.forEach((r) => {
    if (!turns.size) bar(r.sample_start, r.sample_end, 0, r.step, "sampled and scored");
    bar(r.learn_start, r.learn_end, LANE + GAP, r.step, "trained on");
  });
  const busy = (from, to) => share(rows.map((r) => [r[from], r[to]]));
  const share = (spans) => format(spans.reduce((sum, [from, to]) => sum + to - from, 0) / (last - first || 1), "share");
  const sampling = turns.size ? share([...turns.values()].map((t) => [t.start, t.end])) : busy("sample_start", "sample_end");
  const parts = turns.size ? "; each turn has newer weights, and batches that share it are on top of each other" : "";
  const summary = `${name}: above, sampling and scoring of a batch (${sampling} of the time${parts});`
    + ` below, training on it (${busy("learn_start", "learn_end")}). Steps ${rows[0].step} to`
    + ` ${rows[rows.length - 1].step}, ${(last - first).toPrecision(3)} s; a batch has one color.`;
  return node("div", { class: "chart" }, node("p", { class: "soft what" }, summary), svg);
}

// A card with the timelines of the runs that sample ahead of training.
function timelineCard(runs) {
  const ahead = runs.filter((r) => r.timeline.length);
  if (!ahead.length) return [];
  const lines = ahead.map((r) => drawTimeline(r.timeline, r.name));
  return [node("section", { class: "card times" }, node("h2", {}, "Sampling and training"), ...lines)];
}

// The curve itself or, if its key contains NAME, one for each name that the run has, such as that of an evaluation set.
function named(curve, run) {
  const [start, end] = curve.key.split("NAME");
  if (end === undefined) return [curve];
  const keys = Object.keys(run.curves).filter((key) => key.startsWith(start) && key.endsWith(end));
  const names = keys.map((key) => key.slice(start.length, key.length - end.length));
  const filled = (text, name) => text.split("NAME").join(name);
  return names.filter((name) => name && !name.includes("/")).map((name) => ({
    ...curve, key: filled(curve.key, name), label: filled(curve.label, name),
    band: curve.band?.map((key) => filled(key, name)),
  }));
}

// One curve per run and metric. The color is the run if there are several, else the metric.
function seriesOf(panel, runs) {
  const several = runs.length > 1;
  const curves = runs.flatMap((run) => panel.curves.flatMap((curve) => named(curve, run))
    .filter((curve) => run.curves[curve.key]).map((curve) => ({ run, curve })));
  // Runs may have different evaluation sets: a label has the same dashes in all of them.
  const labels = [...new Set(curves.map(({ curve }) => curve.label))];
  return curves.map(({ run, curve }) => {
    const found = run.curves[curve.key], number = labels.indexOf(curve.label);
    const [low, high] = (curve.band || []).map((key) => run.curves[key]?.y);
    const banded = low && high && low.length === found.y.length;
    return {
      run: run.name, label: curve.label, color: several ? run.color : number, dash: several ? number : 0,
      smooth: curve.every_step, ...found, bandLow: banded ? low : null, bandHigh: banded ? high : null,
    };
  });
}

// The panels under their headings, which can be closed. `extra`: more elements by heading. `closed`: those that are
// closed at first; `changed` is called with the heading and whether it is open.
class Sections {
  constructor(titles, charts, extra = {}, closed = new Set(), changed = () => {}) {
    this.all = titles.map((title) => {
      const own = charts.filter((c) => c.panel.section === title);
      const count = node("span", { class: "soft" });
      const details = node("details", { class: "section", "data-section": title, open: !closed.has(title) },
        node("summary", {}, node("h2", {}, title), count),
        node("div", { class: "grid" }, ...own.map((c) => c.root)), ...(extra[title] || []));
      details.addEventListener("toggle", () => changed(title, details.open));
      return { own, extra: extra[title] || [], count, details };
    });
  }

  get roots() {
    return this.all.map((s) => s.details);
  }

  // Hide what has nothing to show.
  update() {
    for (const { own, extra, count, details } of this.all) {
      const shown = own.filter((c) => !c.root.hidden).length;
      count.textContent = shown ? `${shown} panel${shown === 1 ? "" : "s"}` : "";
      details.hidden = !shown && !extra.some((e) => e.childElementCount && !e.hidden);
    }
  }
}

// Events that are marked in the charts, and the style of their mark.
const MARKS = {
  alarm: "alarm", error: "error", resume: "info", unscored: "alarm", update_skipped: "skip", out_of_memory: "skip",
  checkpoint_failed: "alarm", checkpoint_damaged: "alarm", no_trainable_samples: "skip",
  clip_range_limit: "skip", gradient_overflow: "skip", rollback: "alarm", early_stop: "info",
};

function marksOf({ name: run, events }) {
  let marked = [];
  for (const e of events.filter((e) => MARKS[e.event] && Number.isFinite(e.step))) {
    // The curves are those of the history that continues, so events of abandoned steps are only in the table.
    if (e.event === "rollback") marked = marked.filter((m) => m.step <= e.step);
    marked.push(e);
  }
  marked = marked.slice(-300);
  const text = (e) => `${eventLabel(e)} ${e.name || ""} ${e.message || e.reason || ""}`.trim();
  return marked.map((e) => ({ x: e.step, kind: MARKS[e.event], text: text(e), run }));
}

// Words, so that a label breaks between them.
function eventLabel(event) {
  return String(event.event).replaceAll("_", " ");
}

function runLabel(run) {
  return node("span", { class: "label", title: run.name }, node("span", { class: `dot f${run.color % COLORS}` }),
    node("span", { class: "name" }, run.name));
}

function eventTable(runs, most = 200) {
  const events = runs.flatMap((run) => run.events.map((e) => ({ ...e, run })));
  events.sort((a, b) => String(b.time).localeCompare(String(a.time)));
  const own = ["time", "event", "step", "run"];
  const details = (e) => Object.entries(e).filter(([k, v]) => v !== null && !own.includes(k))
    .map(([k, v]) => (k === "message" ? String(v) : `${k.replaceAll("_", " ")} ${v}`)).join(", ");
  return events.slice(0, most).map((e) => node("tr", { class: MARKS[e.event] || "" },
    node("td", { class: "soft whole" }, String(e.time || "").replace("T", " ")),
    runs.length > 1 ? node("td", { class: "whole" }, runLabel(e.run)) : null,
    node("td", { class: "whole" }, eventLabel(e)),
    node("td", { class: "whole" }, Number.isFinite(e.step) ? `step ${e.step}` : ""),
    node("td", { class: "wide" }, details(e))));
}

const LEVELS = { bad: "Problem", warn: "Warning", note: "Note", good: "Good" };

function findingList(findings) {
  return node("ul", { class: "findings" }, ...findings.map((f) => node("li", { class: f.level },
    node("strong", {}, `${LEVELS[f.level]}: ${f.name}. `), f.what,
    f.remedy ? node("span", { class: "soft" }, ` ${f.remedy}`) : null)));
}

// The findings of several runs by kind, most severe first: a line with the runs that have it, and below it what it says
// about each. What they have in common is said once. Problems and warnings are open, unless the user has closed them.
const toggled = new Set();

function groupedFindings(runs) {
  if (runs.length < 2) return findingList(runs.flatMap((r) => r.findings));
  const groups = new Map();
  for (const run of runs) {
    for (const finding of run.findings) {
      const key = `${Object.keys(LEVELS).indexOf(finding.level)} ${finding.name}`;
      groups.set(key, [...(groups.get(key) || []), { run, ...finding }]);
    }
  }
  const sorted = [...groups].sort(([a], [b]) => Number(a[0]) - Number(b[0]));
  return node("ul", { class: "findings" }, ...sorted.map(([key, found]) => findingGroup(key, found)));
}

function findingGroup(key, found) {
  const [{ level, name, what, remedy }] = found;
  const same = (field) => found.every((f) => f[field] === found[0][field]);
  const soft = (text) => (text ? node("span", { class: "soft" }, ` ${text}`) : null);
  const labels = node("span", { class: "labels" }, ...found.map((f) => runLabel(f.run)));
  const each = found.length === 1 || same("what") ? [node("p", {}, what, same("remedy") ? soft(remedy) : null)] : [
    node("ul", {}, ...found.map((f) => node("li", {}, runLabel(f.run), f.what, same("remedy") ? null : soft(f.remedy)))),
    same("remedy") && remedy ? node("p", { class: "soft" }, remedy) : null,
  ];
  const usual = level === "bad" || level === "warn";
  const details = node("details", { class: each.length > 1 ? "each" : null, open: usual !== toggled.has(key) },
    node("summary", {}, node("strong", {}, `${LEVELS[level]}: ${name}`), labels), ...each);
  details.addEventListener("toggle", () => toggled[details.open === usual ? "delete" : "add"](key));
  return node("li", { class: level }, details);
}
