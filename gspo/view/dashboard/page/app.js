"use strict";
// The dashboard. Views: all runs, a step, a completion; the hash of the URL selects one.

const POLL_MS = 2000;
const POINTS = 400;
const FEW = 6; // so many runs are all shown at first
const main = document.getElementById("main");
const problem = document.getElementById("problem");
const etags = new Map();
const state = {
  setup: null, runs: [], shown: new Set(), chosen: false, filters: { text: "", only: "", order: "" }, matches: [],
  problems: { text: "", kind: "", set: "" },
  data: new Map(), smooth: 0.6, x: "step", first: null, last: null, view: null, highlighted: null,
};

// The session token. Local storage belongs to this host and port; a cookie would be sent to other ports, too.
let token = "";
const allowed = (secret) => ({ Authorization: `Bearer ${secret}` });

async function openSession() {
  try { token = localStorage.getItem("gspo-token") || ""; } catch { /* without storage, each load needs a new link */ }
  const key = location.hash.match(/^#key=([\w-]+)$/)?.[1];
  if (!key) return;
  history.replaceState(null, "", location.pathname);
  const response = await fetch("/api/session", { headers: allowed(key) });
  if (!response.ok) return;
  token = await response.text();
  try { localStorage.setItem("gspo-token", token); } catch { /* as above */ }
}

async function ask(path) {
  const known = etags.get(path);
  const condition = known ? { "If-None-Match": known.etag } : {};
  const response = await fetch(path, { headers: { ...allowed(token), ...condition } });
  if (response.status === 304) return known.value;
  if (response.status === 401) {
    throw new Error("This page needs the last link that 'gspo watch' printed; each link opens one browser.");
  }
  if (!response.ok) throw Object.assign(new Error((await response.text()).trim()), { status: response.status });
  const value = await response.json();
  etags.set(path, { etag: response.headers.get("etag"), value });
  if (etags.size > 60) etags.delete(etags.keys().next().value);
  return value;
}

function showProblem(text) {
  problem.hidden = !text;
  problem.textContent = text || "";
}

const colorOf = (name) => state.runs.findIndex((r) => r.name === name) % COLORS;
const address = (...parts) => `#/${parts.map(encodeURIComponent).join("/")}`;
const apiRun = (name) => `/api/runs/${encodeURIComponent(name)}`;

// ---------------------------------------------------------------------------------------------- runs

function runStatus(run) {
  const of = run.steps ? ` of ${run.steps.toLocaleString("en")}` : "";
  const pace = run.state === "running" && run.pace_s ? `, ${run.pace_s.toPrecision(2)} s per step` : "";
  return `${run.state}, step ${run.step.toLocaleString("en")}${of}${pace}`;
}

const rows = new Map(); // the row of the sidebar by run

function sidebarRow(name) {
  const box = node("input", { type: "checkbox", class: `a${colorOf(name)}`, onchange: () => select(name, box.checked) });
  const only = { type: "button", class: "only", title: "show only this run", "aria-label": `show only ${name}` };
  const status = node("span", { class: "soft state" }), bar = node("progress", { "aria-hidden": "true" });
  const label = node("label", { title: name }, box, node("span", { class: `dot f${colorOf(name)}` }),
    node("span", { class: "name" }, name));
  const button = node("button", { ...only, onclick: () => selectAll([name]) }, "only");
  const root = node("li", { "data-run": name }, label, button, status, bar);
  for (const [event, fade] of [["pointerenter", name], ["pointerleave", null], ["focusin", name], ["focusout", null]]) {
    root.addEventListener(event, () => highlight(fade));
  }
  return { root, box, status, bar };
}

// The rows stay in place, so that a click never meets another run than the one under the pointer.
function drawSidebar() {
  const list = document.getElementById("runs");
  document.body.classList.toggle("single", state.runs.length === 1);
  for (const run of state.runs) {
    if (!rows.has(run.name)) {
      rows.set(run.name, sidebarRow(run.name));
      // Of many runs, the newest are at the top.
      if (state.runs.length > FEW) list.prepend(rows.get(run.name).root);
      else list.append(rows.get(run.name).root);
    }
    const { root, box, status, bar } = rows.get(run.name);
    root.className = `run state-${run.state}`;
    box.checked = state.shown.has(run.name);
    const text = visible(runStatus(run));
    if (status.textContent !== text) status.textContent = text;
    status.title = visible(run.why || "");
    bar.hidden = !run.steps || run.state !== "running";
    if (run.steps) Object.assign(bar, { max: run.steps, value: Math.min(run.step, run.steps) });
  }
  const shown = state.runs.filter((r) => state.shown.has(r.name)).length;
  document.getElementById("shown").textContent = `${shown} of ${state.runs.length}`;
  document.getElementById("find").hidden = state.runs.length <= FEW;
}

// Fade the curves of the other runs.
function highlight(name) {
  state.highlighted = name;
  const known = name !== null && state.shown.has(name) && state.shown.size > 1;
  for (const g of document.querySelectorAll("g.series")) g.classList.toggle("faded", known && g.dataset.run !== name);
}

function select(name, on) {
  if (on) state.shown.add(name);
  else state.shown.delete(name);
  selectAll(state.shown);
}

function selectAll(names) {
  state.chosen = true;
  state.shown = new Set(names);
  saveSelection();
  drawSidebar();
  refresh(true);
}

// The selected runs are a part of the address, so that a reload, a bookmark and a second tab show them.
function saveSelection() {
  if (!state.chosen || state.view?.kind !== "overview") return;
  const names = state.runs.map((r) => r.name).filter((name) => state.shown.has(name));
  if (names.length === state.runs.length && names.length <= FEW) history.replaceState(null, "", "#/");
  else history.replaceState(null, "", `#/?runs=${names.map(encodeURIComponent).join(",")}`);
}

function readSelection() {
  const names = new URLSearchParams(location.hash.split("?")[1] || "").get("runs");
  if (names === null) return;
  state.chosen = true;
  state.shown = new Set(names.split(",").filter(Boolean));
}

function firstShown(runs) {
  // A few runs are all shown; of many only the newest, which is last.
  return new Set((runs.length > FEW ? runs.slice(-1) : runs).map((r) => r.name));
}

let asking = 0, refreshes = 0;
async function refresh(force = false) {
  if ((document.hidden || asking) && !force) return;
  asking += 1;
  const turn = refreshes += 1; // responses may arrive out of order: only those of the last refresh are used
  try {
    const { runs } = await ask("/api/runs");
    const before = new Map(state.runs.map((r) => [r.name, r.version]));
    state.runs = runs;
    if (!state.chosen) state.shown = firstShown(runs);
    drawSidebar();
    if (state.view?.kind === "overview") {
      const changed = (r) => force || !state.data.has(r.name) || before.get(r.name) !== r.version;
      const stale = runs.filter((r) => state.shown.has(r.name) && changed(r));
      const done = await Promise.allSettled(stale.map(async (r) => {
        const found = await ask(`${apiRun(r.name)}?${query()}`);
        if (turn === refreshes) state.data.set(r.name, found);
      }));
      if (turn !== refreshes) return;
      if (stale.length || force) drawOverview();
      if (stale.some((r) => state.data.get(r.name)?.partial)) setTimeout(refresh, 500);
      const failed = done.findIndex((d) => d.status === "rejected");
      if (failed >= 0) {
        const { reason } = done[failed];
        throw reason instanceof TypeError ? reason : new Error(`${stale[failed].name}: ${reason.message}`);
      }
    }
    showProblem("");
  } catch (error) {
    const unreachable = "The server does not respond; retrying. Is 'gspo watch' still running?";
    showProblem(error instanceof TypeError ? unreachable : error.message); // fetch raises TypeError on network errors
  } finally {
    asking -= 1;
  }
}

function query() {
  const parts = new URLSearchParams({ points: POINTS, x: state.x });
  if (state.first !== null) { parts.set("from", Math.floor(state.first)); parts.set("to", Math.ceil(state.last)); }
  return parts;
}

// ---------------------------------------------------------------------------------------------- overview

function zoom(first, last) {
  Object.assign(state, { first, last });
  refresh(true);
}

function buildOverview() {
  const charts = state.setup.panels.map((panel) => new Chart(panel, {
    cursor: (x) => charts.forEach((c) => c.showCursor(x)),
    open: (x, run) => openStep(x, run),
    range: zoom,
  }));
  const view = { kind: "overview", charts };
  view.findings = node("div", {});
  view.times = node("div", { class: "grid" });
  view.timelines = node("div", {});
  view.evaluations = node("div", {});
  view.events = node("tbody", {});
  view.whole = node("button", { type: "button", hidden: true, onclick: () => zoom(null, null) }, "show all steps");
  const loading = "This is a sample of the steps; the rest of the run is being read …";
  view.partial = node("span", { class: "soft", hidden: true }, loading);
  const setSmoothing = (e) => { state.smooth = Number(e.target.value); drawOverview(); };
  const range = { type: "range", min: 0, max: 0.98, step: 0.02, value: state.smooth };
  const smooth = node("input", { ...range, oninput: setSmoothing });
  const setAxis = (e) => { state.x = e.target.value; zoom(null, null); };
  const axis = node("select", { onchange: setAxis },
    node("option", { value: "step" }, "steps"), node("option", { value: "tokens" }, "sampled tokens"));
  axis.value = state.x;
  const scroll = { class: "scroll", tabindex: 0, role: "region", "aria-label": "Events" };
  view.timesCard = node("section", { class: "card times" }, node("h3", {}, state.setup.phases.title), view.times);
  const closed = saved("gspo-closed", []);
  const changed = (title, open) => {
    const others = saved("gspo-closed", []).filter((t) => t !== title);
    save("gspo-closed", open ? others : [...others, title]);
  };
  const extra = { Reward: [view.evaluations], System: [view.timesCard, view.timelines] };
  view.sections = new Sections(state.setup.sections, charts, extra, new Set(closed), changed);
  main.replaceChildren(
    node("section", { class: "card" }, node("h2", {}, "Diagnosis"), view.findings),
    node("div", { class: "controls" },
      node("label", {}, "smoothing ", smooth), node("label", {}, "x-axis ", axis), view.whole, view.partial),
    ...view.sections.roots,
    node("section", { class: "card" },
      node("h2", {}, "Events"), node("div", scroll, node("table", { class: "events" }, view.events))),
    view.about = node("div", {}));
  state.view = view;
}

function drawOverview() {
  const view = state.view;
  if (view?.kind !== "overview") return;
  const runs = state.runs.filter((r) => state.shown.has(r.name) && state.data.has(r.name))
    .map((r) => ({ name: r.name, color: colorOf(r.name), ...state.data.get(r.name) }));
  view.whole.hidden = state.first === null;
  view.partial.hidden = !runs.some((r) => r.partial);
  const marks = state.x === "step" ? runs.flatMap(marksOf) : [];
  const unit = state.x === "step" ? "step" : "token";
  const options = { smooth: state.smooth, first: state.first, last: state.last, unit };
  view.charts.forEach((chart) => chart.update(seriesOf(chart.panel, runs), marks, options));
  view.findings.replaceChildren(groupedFindings(runs));
  if (runs.every((r) => !r.findings.length)) {
    const why = runs.length ? "There are not enough steps for a diagnosis yet." : "Select a run to see its curves.";
    view.findings.replaceChildren(node("p", { class: "soft" }, why));
  }
  const timed = runs.filter((r) => r.phases.x.length);
  view.times.replaceChildren(...timed.map((r) => drawTimes(state.setup.phases.curves, r.phases, r.name)));
  view.timesCard.hidden = !timed.length;
  view.timelines.replaceChildren(...timelineCard(runs));
  view.evaluations.replaceChildren(...evaluationCard(runs));
  view.sections.update();
  highlight(state.highlighted);
  view.events.replaceChildren(...eventTable(runs));
  const names = runs.map((r) => r.name).join();
  if (view.aboutOf !== names) { view.aboutOf = names; drawAbout(runs, view); }
}

// Links to the recorded evaluations, the newest first.
function evaluationCard(runs, most = 12) {
  const evaluated = runs.filter((r) => r.evaluations.length);
  if (!evaluated.length) return [];
  const link = (run, step) => node("a", { href: address(run.name, "evaluation", step) }, `step ${step.toLocaleString("en")}`);
  const lines = evaluated.map((run) => {
    const steps = run.evaluations.toReversed();
    const earlier = steps.length > most ? [node("span", { class: "soft" }, "…"), link(run, steps.at(-1))] : [];
    return node("p", { class: "links" }, runs.length > 1 ? runLabel(run) : null,
      ...steps.slice(0, most).map((step) => link(run, step)), ...earlier);
  });
  return [node("section", { class: "card" }, node("h3", {}, "Completions of evaluations"), ...lines)];
}

function settingRows(tree, prefix = "") {
  return Object.entries(tree).flatMap(([key, value]) => {
    if (value && typeof value === "object" && !Array.isArray(value)) return settingRows(value, `${prefix}${key}.`);
    return [tableRow(prefix + key, String(Array.isArray(value) ? JSON.stringify(value) : value))];
  });
}

async function drawAbout(runs, view) {
  const cards = await Promise.all(runs.map(async (r) => {
    const about = await ask(`${apiRun(r.name)}/about`);
    const rows = settingRows({ ...about.settings, environment: about.environment });
    return node("details", { class: "card" }, node("summary", {}, `Settings and environment of ${r.name}`),
      node("p", { class: "soft" }, about.path),
      about.rank_logs.length ? node("p", { class: "soft" }, `Logs of ranks: ${about.rank_logs.join(", ")}`) : null,
      node("table", {}, node("tbody", {}, ...rows)));
  })).catch(() => []);
  view.about.replaceChildren(...cards);
}

function openStep(x, name) {
  if (!Number.isFinite(x) || !name) return;
  location.hash = address(name, Math.round(state.x === "step" ? x : stepAt(name, x)));
}

function stepAt(name, tokens) {
  // Downsampled curves have no steps, so the step is estimated from the position of the nearest point.
  const xs = state.data.get(name).curves["reward/mean"]?.x || [];
  return (state.runs.find((r) => r.name === name).step * (nearest(xs, tokens) + 1)) / Math.max(1, xs.length);
}

// ---------------------------------------------------------------------------------------------- a step

async function showStep(name, step) {
  const filters = state.filters;
  const list = node("div", {});
  const crumbs = node("nav", { class: "crumbs", "aria-label": "Breadcrumbs" });
  const label = "search prompts and completions";
  const search = node("input", {
    type: "search", placeholder: "search", value: filters.text, "aria-label": label,
    oninput: (e) => { filters.text = e.target.value; later(draw); },
  });
  const choose = (key, text, none, options) => {
    const choices = options.map(([value, name]) => node("option", { value, selected: filters[key] === value }, name));
    const onchange = (e) => { filters[key] = e.target.value; draw(); };
    return node("label", {}, `${text} `, node("select", { onchange }, node("option", { value: "" }, none), ...choices));
  };
  const numbers = node("p", { class: "soft" });
  const only = choose("only", "show", "all completions", Object.entries(state.setup.filters));
  const order = choose("order", "sort by", "groups", state.setup.orders.map((o) => [o, o]));
  main.replaceChildren(
    crumbs, numbers, node("div", { class: "controls" }, search, only, order), node("section", { class: "card" }, list));
  state.view = { kind: "step", search };
  const view = state.view;
  let draws = 0;
  const draw = async () => {
    const turn = draws += 1;
    const parts = new URLSearchParams(Object.entries(filters).filter(([, v]) => v));
    const found = await ask(`${apiRun(name)}/steps/${step}?${parts}`);
    if (state.view !== view || turn !== draws) return;
    const stepAddress = (number) => (number === null ? null : address(name, number));
    Object.assign(view, { previous: stepAddress(found.previous), next: stepAddress(found.next), up: "#/" });
    const title = node("h1", {}, `Step ${step.toLocaleString("en")}`);
    const evaluation = found.evaluated ? node("a", { href: address(name, "evaluation", step) }, "evaluation") : null;
    crumbs.replaceChildren(...[node("a", { href: "#/" }, name), title, ...links(view, "step"), evaluation].filter(Boolean));
    numbers.textContent = stepSummary(found.metrics);
    state.matches = (found.matching?.completions || []).map((r) => address(name, step, r.group, r.number));
    const rows = found.groups ? groupRows(name, step, found.groups) : matchRows(name, step, found.matching);
    list.replaceChildren(...rows);
  };
  await draw();
}

function links(view, what) {
  const link = (href, text) => (href ? node("a", { href }, text) : node("span", { class: "soft" }, text));
  return [link(view.previous, `previous ${what} (k)`), link(view.next, `next ${what} (j)`)];
}

function stepSummary(row) {
  const measured = state.setup.headings.filter((m) => Number.isFinite(row[m.key]) && (row[m.key] || !m.hide_zero));
  return measured.map((m) => `${m.label} ${format(row[m.key], m.form)}`).join(" · ");
}

function groupRows(name, step, groups) {
  if (!groups.length) {
    const why = "This step has no recorded completions (log.rollouts = false, or the file was deleted). ";
    const others = state.view.previous || state.view.next
      ? "The links to the previous and next step lead to steps that have some." : "No other step has any.";
    return [node("p", { class: "soft" }, why + others)];
  }
  return groups.map((g) => {
    const [kind, label] = g.discarded ? ["out", "discarded: all completions have the same reward"]
      : g.uniform ? ["uniform", "uniform: all completions have the same reward"] : ["mixed", "mixed"];
    const verdicts = g.judged ? `${g.correct} of ${g.judged} correct` : "no verdicts";
    const expected = g.answer === null ? "" : `, expected answer ${g.answer}`;
    const completions = g.completions.map((c, i) => completionLink(c, i, address(name, step, g.group, i)));
    return node("div", { class: "group" },
      node("div", {},
        node("div", { class: "prompt" }, g.prompt), node("span", { class: `tag ${kind}` }, label),
        node("span", { class: "soft" }, `  ${verdicts}, ${g.prompt_id}${expected}`)),
      node("div", { class: "completions" }, ...completions));
  });
}

function matchRows(name, step, matching) {
  const listed = matching.completions.length;
  const limit = matching.found > listed ? `; the first ${listed} are listed` : "";
  const head = node("p", { class: "soft" }, `${matching.found} of ${matching.total} completions${limit}`);
  const ratio = (c) => (Number.isFinite(c.sequence_ratio) ? `, ratio ${c.sequence_ratio.toPrecision(5)}` : "");
  const link = (c) => ({ class: "match", href: address(name, step, c.group, c.number) });
  const rows = matching.completions.map((c) => node("a", link(c),
    node("div", { class: "prompt soft" }, c.prompt), node("div", { class: "excerpt" }, c.excerpt),
    node("div", { class: "soft" }, completionSummary(c) + ratio(c))));
  return [head, ...rows];
}

let waiting = null;
function later(action) {
  clearTimeout(waiting);
  waiting = setTimeout(() => action().catch((error) => showProblem(error.message)), 200);
}

// ---------------------------------------------------------------------------------------------- a completion

async function showCompletion(name, step, group, number) {
  const here = location.hash;
  const completion = await ask(`${apiRun(name)}/steps/${step}/${group}/${number}`);
  if (location.hash !== here) return;
  // Previous and next follow the search results if this completion is one of them, else all completions of the step.
  const at = state.matches.indexOf(address(name, step, group, number));
  const neighbor = (found) => (found ? address(name, step, ...found) : null);
  const [previous, next] = at >= 0 ? [state.matches[at - 1] || null, state.matches[at + 1] || null]
    : [neighbor(completion.previous), neighbor(completion.next)];
  state.view = { kind: "completion", previous, next, up: address(name, step) };
  const stepLink = node("a", { href: address(name, step) }, `step ${step.toLocaleString("en")}`);
  const title = node("h1", {}, `Completion ${number + 1} of ${completion.completions} to ${completion.prompt_id}`);
  main.replaceChildren(
    node("nav", { class: "crumbs", "aria-label": "Breadcrumbs" },
      node("a", { href: "#/" }, name), stepLink, title, ...links(state.view, "completion")),
    completionView(completion));
}

// ---------------------------------------------------------------------------------------------- an evaluation

async function showEvaluation(name, step) {
  const filters = state.problems;
  const list = node("div", {}), crumbs = node("nav", { class: "crumbs", "aria-label": "Breadcrumbs" });
  const numbers = node("p", {}), changes = node("p", { class: "soft" });
  const search = node("input", {
    type: "search", placeholder: "search", value: filters.text, "aria-label": "search problems and completions",
    oninput: (e) => { filters.text = e.target.value; later(draw); },
  });
  const sets = node("label", { hidden: true });
  const kind = problemChooser(state.setup.problem_filters, filters.kind, (value) => { filters.kind = value; draw(); });
  main.replaceChildren(crumbs, numbers, changes, node("div", { class: "controls" }, search, sets, kind),
    node("section", { class: "card" }, list));
  const view = state.view = { kind: "evaluation", search };
  let draws = 0;
  const draw = async () => {
    const turn = draws += 1;
    const parts = new URLSearchParams({ text: filters.text, set: filters.set });
    const path = `${apiRun(name)}/evaluations/${step}`;
    // Another evaluation may not have the chosen set.
    const found = await ask(`${path}?${parts}`).catch((error) => {
      if (error.status !== 400) throw error;
      filters.set = "";
      return ask(`${path}?${new URLSearchParams({ text: filters.text })}`);
    });
    if (state.view !== view || turn !== draws) return;
    const at = (number) => (number === null ? null : address(name, "evaluation", number));
    Object.assign(view, { previous: at(found.previous), next: at(found.next), up: "#/" });
    const title = node("h1", {}, `Evaluation after step ${step.toLocaleString("en")}`);
    crumbs.replaceChildren(node("a", { href: "#/" }, name), title, ...links(view, "evaluation"));
    numbers.textContent = `${setName(found.set)}: ${evaluationNumbers(found.numbers) || "no metrics recorded"}`;
    changes.textContent = changeSummary(found);
    sets.hidden = found.sets.length < 2;
    const choices = found.sets.map((s) => node("option", { value: s, selected: s === found.set }, setName(s)));
    sets.replaceChildren("set ", node("select", { onchange: (e) => { filters.set = e.target.value; draw(); } }, ...choices));
    list.replaceChildren(...problemRows(found, filters.kind, (group, i) => address(name, "evaluation", step, group, i)));
  };
  await draw();
}

async function showEvaluated(name, step, group, number) {
  const here = location.hash;
  const completion = await ask(`${apiRun(name)}/evaluations/${step}/${group}/${number}`);
  if (location.hash !== here) return;
  const up = address(name, "evaluation", step);
  const neighbor = (found) => (found ? address(name, "evaluation", step, ...found) : null);
  state.view = { kind: "completion", previous: neighbor(completion.previous), next: neighbor(completion.next), up };
  const evaluation = node("a", { href: up }, `evaluation after step ${step.toLocaleString("en")}`);
  const title = node("h1", {}, `Completion ${number + 1} of ${completion.completions} to ${completion.prompt_id}`);
  const before = beforeCard(completion, (c) => address(name, "evaluation", c.step, c.group, c.number));
  main.replaceChildren(
    node("nav", { class: "crumbs", "aria-label": "Breadcrumbs" },
      node("a", { href: "#/" }, name), evaluation, title, ...links(state.view, "completion")),
    completionView(completion, ...(before ? [before] : [])));
}

// ---------------------------------------------------------------------------------------------- navigation

async function route() {
  window.scrollTo(0, 0);
  const here = location.hash;
  try {
    readSelection();
    const parts = location.hash.split("?")[0].replace(/^#\/?/, "").split("/").filter(Boolean).map(decodeURIComponent);
    const evaluated = parts[1] === "evaluation";
    const numbers = parts.slice(evaluated ? 2 : 1).map(Number);
    document.body.dataset.view = parts.length > 1 ? "rollouts" : "overview";
    if (evaluated && numbers.length === 1 && numbers.every(Number.isInteger)) await showEvaluation(parts[0], numbers[0]);
    else if (evaluated && numbers.length === 3 && numbers.every(Number.isInteger)) await showEvaluated(parts[0], ...numbers);
    else if (parts.length === 2 && numbers.every(Number.isInteger)) await showStep(parts[0], numbers[0]);
    else if (parts.length === 4 && numbers.every(Number.isInteger)) await showCompletion(parts[0], ...numbers);
    else { buildOverview(); await refresh(true); saveSelection(); }
    showProblem("");
  } catch (error) {
    if (location.hash !== here) return;
    state.view = { kind: "missing", up: "#/" };
    main.replaceChildren(node("p", {}, error.message), node("p", {}, node("a", { href: "#/" }, "Back to the runs")));
  }
}

document.addEventListener("keydown", (event) => {
  const typing = ["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName);
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  if (event.key === "Escape") {
    if (typing) event.target.blur();
    else if (state.first !== null && state.view?.kind === "overview") zoom(null, null);
    else if (state.view?.up) location.hash = state.view.up;
  }
  if (typing) return;
  if (event.key === "j" && state.view?.next) location.hash = state.view.next;
  if (event.key === "k" && state.view?.previous) location.hash = state.view.previous;
  if (event.key === "/" && state.view?.search) { event.preventDefault(); state.view.search.focus(); }
});

// Preferences. Without storage, they last until the page is closed.
const preferences = new Map();
function saved(key, otherwise) {
  try { return JSON.parse(localStorage.getItem(key)) ?? otherwise; } catch { return preferences.get(key) ?? otherwise; }
}
function save(key, value) {
  preferences.set(key, value);
  try { localStorage.setItem(key, JSON.stringify(value)); } catch { /* kept in `preferences` */ }
}

function showSidebar(on) {
  document.body.classList.toggle("narrowed", !on);
  document.getElementById("toggle").setAttribute("aria-expanded", String(on));
  save("gspo-sidebar", on);
}
document.getElementById("toggle").addEventListener("click", () => showSidebar(!saved("gspo-sidebar", true)));
document.getElementById("all").addEventListener("click", () => selectAll(state.runs.map((r) => r.name)));
document.getElementById("none").addEventListener("click", () => selectAll([]));
document.getElementById("find").addEventListener("input", (event) => {
  const wanted = event.target.value.toLowerCase();
  for (const [name, { root }] of rows) root.hidden = !name.toLowerCase().includes(wanted);
});

const themes = ["system", "light", "dark"];
function theme(name) {
  if (name === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  document.getElementById("theme").textContent = `theme: ${name}`;
  try { localStorage.setItem("gspo-theme", name); } catch { /* without storage, the theme is not saved */ }
}
document.getElementById("theme").addEventListener("click", () => {
  const current = document.documentElement.dataset.theme || "system";
  theme(themes[(themes.indexOf(current) + 1) % themes.length]);
});

async function start() {
  let chosen = "system";
  try { chosen = localStorage.getItem("gspo-theme") || chosen; } catch { /* as above */ }
  theme(themes.includes(chosen) ? chosen : "system");
  showSidebar(saved("gspo-sidebar", true));
  // A new link pasted into an open page changes only the hash, so the page must reload to use its key.
  window.addEventListener("hashchange", () => {
    if (location.hash.startsWith("#key=")) location.reload();
    else if (state.setup) route();
  });
  try {
    await openSession();
    state.setup = await ask("/api/setup");
  } catch (error) {
    showProblem(error.message);
    return;
  }
  await route();
  await refresh(true);
  setInterval(refresh, POLL_MS);
}
start();
