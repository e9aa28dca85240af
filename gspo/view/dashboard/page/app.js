"use strict";
// The page: what is shown, and asking the server for it. Views: all runs, a step, a reply; the address says which.

const POLL_MS = 2000;
const POINTS = 400;
const main = document.getElementById("main");
const problem = document.getElementById("problem");
const etags = new Map();
const state = { setup: null, runs: [], shown: new Set(), chosen: false, filters: { text: "", only: "", order: "" }, matches: [], data: new Map(), smooth: 0.6, x: "step", first: null, last: null, view: null };

// The session's token. Storage belongs to this very address with its port; a cookie would go to other ports of this machine too.
let token = "";
const allowed = (secret) => ({ Authorization: `Bearer ${secret}` });

async function openSession() {
  try { token = localStorage.getItem("gspo-token") || ""; } catch { /* a browser without storage asks for a new link at each load */ }
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
  const response = await fetch(path, { headers: { ...allowed(token), ...(known ? { "If-None-Match": known.etag } : {}) } });
  if (response.status === 304) return known.value;
  if (response.status === 401) throw new Error("This page needs the link that 'gspo watch' printed last; each link opens one browser.");
  if (!response.ok) throw Object.assign(new Error((await response.text()).trim()), { status: response.status });
  const value = await response.json();
  etags.set(path, { etag: response.headers.get("etag"), value });
  if (etags.size > 60) etags.delete(etags.keys().next().value);
  return value;
}

function complain(text) {
  problem.hidden = !text;
  problem.textContent = text || "";
}

const colourOf = (name) => state.runs.findIndex((r) => r.name === name) % COLOURS;
const address = (...parts) => `#/${parts.map(encodeURIComponent).join("/")}`;
const apiRun = (name) => `/api/runs/${encodeURIComponent(name)}`;

// ---------------------------------------------------------------------------------------------- runs

function runWords(run) {
  const of = run.steps ? ` of ${run.steps.toLocaleString("en")}` : "";
  const pace = run.state === "running" && run.pace_s ? `, ${run.pace_s.toPrecision(2)} s each` : "";
  return `${run.state}, step ${run.step.toLocaleString("en")}${of}${pace}`;
}

function drawChips() {
  const nav = document.getElementById("runs");
  const focused = document.activeElement?.dataset?.run;
  // What is shown comes first, so that it is seen among many.
  const sorted = [...state.runs].sort((a, b) => Number(state.shown.has(b.name)) - Number(state.shown.has(a.name)));
  nav.replaceChildren(...sorted.map((run) => {
    const on = state.shown.has(run.name);
    return node("button", { type: "button", class: `chip state-${run.state}`, "data-run": run.name, "aria-pressed": String(on), title: run.why || (on ? "hide this run" : "show this run"), onclick: () => toggle(run.name) },
      node("span", { class: `dot f${colourOf(run.name)}` }), node("span", {}, run.name), node("span", { class: "soft state" }, runWords(run)));
  }));
  if (focused) [...nav.children].find((c) => c.dataset.run === focused)?.focus();
}

function toggle(name) {
  state.chosen = true;
  if (state.shown.has(name) && state.shown.size > 1) state.shown.delete(name);
  else state.shown.add(name);
  drawChips();
  refresh(true);
}

function firstShown(runs) {
  // All of a few runs; of many the newest, which is last.
  return new Set((runs.length > 6 ? runs.slice(-1) : runs).map((r) => r.name));
}

let asking = 0, refreshes = 0;
async function refresh(force = false) {
  if ((document.hidden || asking) && !force) return;
  asking += 1;
  const turn = refreshes += 1; // answers may come in another order than they were asked for: the last question counts
  try {
    const { runs } = await ask("/api/runs");
    const before = new Map(state.runs.map((r) => [r.name, r.version]));
    state.runs = runs;
    if (!state.chosen) state.shown = firstShown(runs);
    drawChips();
    if (state.view?.kind === "overview") {
      const stale = runs.filter((r) => state.shown.has(r.name) && (force || !state.data.has(r.name) || before.get(r.name) !== r.version));
      const done = await Promise.allSettled(stale.map(async (r) => {
        const found = await ask(`${apiRun(r.name)}?${query()}`);
        if (turn === refreshes) state.data.set(r.name, found);
      }));
      if (turn !== refreshes) return;
      if (stale.length || force) drawOverview();
      if (stale.some((r) => state.data.get(r.name)?.partial)) setTimeout(refresh, 500);
      const failed = done.findIndex((d) => d.status === "rejected");
      if (failed >= 0) throw done[failed].reason instanceof TypeError ? done[failed].reason : new Error(`${stale[failed].name}: ${done[failed].reason.message}`);
    }
    complain("");
  } catch (error) {
    complain(error instanceof TypeError ? "The server does not answer; trying again. Is 'gspo watch' still running?" : error.message);
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

function buildOverview() {
  const charts = state.setup.panels.map((panel) => new Chart(panel, {
    cursor: (x) => charts.forEach((c) => c.showCursor(x)),
    open: (x, run) => openStep(x, run),
    range: (first, last) => { Object.assign(state, { first, last }); refresh(true); },
  }));
  const view = { kind: "overview", charts };
  view.findings = node("div", {});
  view.times = node("div", {});
  view.events = node("tbody", {});
  view.whole = node("button", { type: "button", hidden: true, onclick: () => { Object.assign(state, { first: null, last: null }); refresh(true); } }, "show all steps");
  view.partial = node("span", { class: "soft", hidden: true }, "a first look at a long run: some of its steps; the rest is being read …");
  const smooth = node("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: state.smooth, oninput: (e) => { state.smooth = Number(e.target.value); drawOverview(); } });
  const axis = node("select", { onchange: (e) => { Object.assign(state, { x: e.target.value, first: null, last: null }); refresh(true); } }, node("option", { value: "step" }, "steps"), node("option", { value: "tokens" }, "sampled tokens"));
  axis.value = state.x;
  main.replaceChildren(
    node("section", { class: "card" }, node("h2", {}, "What is going on"), view.findings),
    node("div", { class: "controls" }, node("label", {}, "smoothing ", smooth), node("label", {}, "over ", axis), view.whole, view.partial),
    node("div", { class: "grid" }, ...charts.map((c) => c.root)),
    node("section", { class: "card times" }, node("h2", {}, "Where does a step's time go?"), view.times),
    node("section", { class: "card" }, node("h2", {}, "Events"), node("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Events" }, node("table", {}, view.events))),
    view.about = node("div", {}));
  state.view = view;
}

function drawOverview() {
  const view = state.view;
  if (view?.kind !== "overview") return;
  const runs = state.runs.filter((r) => state.shown.has(r.name) && state.data.has(r.name)).map((r) => ({ name: r.name, colour: colourOf(r.name), ...state.data.get(r.name) }));
  view.whole.hidden = state.first === null;
  view.partial.hidden = !runs.some((r) => r.partial);
  const marks = state.x === "step" ? runs.flatMap((r) => marksOf(r.events)) : [];
  const options = { smooth: state.smooth, first: state.first, last: state.last, unit: state.x === "step" ? "step" : "token" };
  view.charts.forEach((chart) => chart.update(seriesOf(chart.panel, runs), marks, options));
  view.findings.replaceChildren(...runs.map((r) => node("div", {}, runs.length > 1 ? node("p", { class: `f${r.colour}` }, r.name) : null, findingList(r.findings))));
  if (runs.every((r) => !r.findings.length)) view.findings.replaceChildren(node("p", { class: "soft" }, "No step has been written yet."));
  view.times.replaceChildren(...runs.filter((r) => r.phases.x.length).map((r) => drawTimes(state.setup.phases, r.phases, r.name)));
  view.events.replaceChildren(...eventTable(runs));
  const names = runs.map((r) => r.name).join();
  if (view.aboutOf !== names) { view.aboutOf = names; drawAbout(runs, view); }
}

async function drawAbout(runs, view) {
  const made = await Promise.all(runs.map(async (r) => {
    const about = await ask(`${apiRun(r.name)}/about`);
    const rows = (tree, prefix = "") => Object.entries(tree).flatMap(([k, v]) => (v && typeof v === "object" && !Array.isArray(v) ? rows(v, `${prefix}${k}.`) : [node("tr", {}, node("th", {}, prefix + k), node("td", {}, String(Array.isArray(v) ? JSON.stringify(v) : v)))]));
    return node("details", { class: "card" }, node("summary", {}, `Settings and machine of ${r.name}`), node("p", { class: "soft" }, about.path), node("table", {}, node("tbody", {}, ...rows({ ...about.settings, environment: about.environment }))));
  })).catch(() => []);
  view.about.replaceChildren(...made);
}

function openStep(x, name) {
  if (Number.isFinite(x) && name) location.hash = address(name, Math.round(state.x === "step" ? x : stepAt(name, x)));
}

function stepAt(name, tokens) {
  // With tokens below, the step is found by its share of the way.
  const xs = state.data.get(name).curves["reward/mean"]?.x || [];
  return (state.runs.find((r) => r.name === name).step * (nearest(xs, tokens) + 1)) / Math.max(1, xs.length);
}

// ---------------------------------------------------------------------------------------------- a step

async function showStep(name, step) {
  const filters = state.filters;
  const list = node("div", {});
  const crumbs = node("nav", { class: "crumbs", "aria-label": "Where you are" });
  const search = node("input", { type: "search", placeholder: "search prompts and replies", value: filters.text, "aria-label": "search prompts and replies", oninput: (e) => { filters.text = e.target.value; later(draw); } });
  const choose = (key, label, options) => node("label", {}, `${label} `, node("select", { onchange: (e) => { filters[key] = e.target.value; draw(); } }, node("option", { value: "" }, key === "only" ? "all replies" : "groups"), ...options.map(([value, text]) => node("option", { value, selected: filters[key] === value }, text))));
  const numbers = node("p", { class: "soft" });
  main.replaceChildren(crumbs, numbers, node("div", { class: "controls" }, search, choose("only", "show", Object.entries(state.setup.filters)), choose("order", "sort by", state.setup.orders.map((o) => [o, o]))), node("section", { class: "card" }, list));
  state.view = { kind: "step", search };
  const view = state.view;
  let draws = 0;
  const draw = async () => {
    const turn = draws += 1;
    const parts = new URLSearchParams(Object.entries(filters).filter(([, v]) => v));
    const found = await ask(`${apiRun(name)}/steps/${step}?${parts}`);
    if (state.view !== view || turn !== draws) return;
    Object.assign(view, { previous: found.previous === null ? null : address(name, found.previous), next: found.next === null ? null : address(name, found.next), up: "#/" });
    crumbs.replaceChildren(node("a", { href: "#/" }, name), node("h1", {}, `Step ${step.toLocaleString("en")}`), ...links(view, "step"));
    numbers.textContent = stepWords(found.metrics);
    state.matches = (found.matching?.replies || []).map((r) => address(name, step, r.group, r.number));
    list.replaceChildren(...(found.groups ? groupRows(name, step, found.groups) : matchRows(name, step, found.matching)));
  };
  await draw();
}

function links(view, what) {
  const link = (href, text) => (href ? node("a", { href }, text) : node("span", { class: "soft" }, text));
  return [link(view.previous, `previous ${what} (k)`), link(view.next, `next ${what} (j)`)];
}

function stepWords(row) {
  const said = [["reward", "reward/mean", "number"], ["correct", "reward/correct_fraction", "share"], ["uniform groups", "groups/uniform_fraction", "share"], ["replies clipped", "clip/fraction_sequences", "share"], ["mean length", "length/mean", "number"], ["cut at the limit", "length/truncated_fraction", "share"], ["gradient norm", "grad/norm", "number"], ["seconds", "time/step_s", "number"]];
  return said.filter(([, key]) => Number.isFinite(row[key])).map(([label, key, form]) => `${label} ${format(row[key], form)}`).join(" · ");
}

function groupRows(name, step, groups) {
  if (!groups.length) return [node("p", { class: "soft" }, "No replies were written for this step (log.rollouts = false, or the file is gone). Previous and next lead to steps that have some.")];
  return groups.map((g) => {
    const kind = g.discarded ? ["out", "discarded: all have the same reward"] : g.uniform ? ["uniform", "uniform: all have the same reward"] : ["mixed", "mixed"];
    const judged = g.judged ? `${g.correct} of ${g.judged} correct` : "no verdicts";
    return node("div", { class: "group" },
      node("div", {}, node("div", { class: "prompt" }, g.prompt), node("span", { class: `tag ${kind[0]}` }, kind[1]), node("span", { class: "soft" }, `  ${judged}, ${g.prompt_id}`)),
      node("div", { class: "replies" }, ...g.replies.map((r, i) => node("a", { class: replyClass(r), href: address(name, step, g.group, i), title: replyWords(r), "aria-label": `reply ${i + 1}: ${replyWords(r)}` }, r.status === "unscored" ? "?" : format(r.reward)))));
  });
}

function matchRows(name, step, matching) {
  const head = node("p", { class: "soft" }, `${matching.found} of ${matching.total} replies${matching.found > matching.replies.length ? `; the first ${matching.replies.length} are listed` : ""}`);
  return [head, ...matching.replies.map((r) => node("a", { class: "match", href: address(name, step, r.group, r.number) },
    node("div", { class: "prompt soft" }, r.prompt), node("div", { class: "excerpt" }, r.excerpt), node("div", { class: "soft" }, replyWords(r) + (Number.isFinite(r.sequence_ratio) ? `, ratio ${r.sequence_ratio.toPrecision(5)}` : ""))))];
}

let waiting = null;
function later(action) {
  clearTimeout(waiting);
  waiting = setTimeout(() => action().catch((error) => complain(error.message)), 200);
}

// ---------------------------------------------------------------------------------------------- a reply

async function showReply(name, step, group, number) {
  const here = location.hash;
  const reply = await ask(`${apiRun(name)}/steps/${step}/${group}/${number}`);
  if (location.hash !== here) return;
  // Along the replies that were searched for, if this is one of them; else along all.
  const at = state.matches.indexOf(address(name, step, group, number));
  const place = (found) => (found ? address(name, step, ...found) : null);
  const [previous, next] = at >= 0 ? [state.matches[at - 1] || null, state.matches[at + 1] || null] : [place(reply.previous), place(reply.next)];
  state.view = { kind: "reply", previous, next, up: address(name, step) };
  main.replaceChildren(
    node("nav", { class: "crumbs", "aria-label": "Where you are" }, node("a", { href: "#/" }, name), node("a", { href: address(name, step) }, `step ${step.toLocaleString("en")}`), node("h1", {}, `Reply ${number + 1} of ${reply.replies} to ${reply.prompt_id}`), ...links(state.view, "reply")),
    replyView(reply));
}

// ---------------------------------------------------------------------------------------------- moving about

async function route() {
  window.scrollTo(0, 0);
  const here = location.hash;
  try {
    const parts = location.hash.replace(/^#\/?/, "").split("/").filter(Boolean).map(decodeURIComponent);
    const numbers = parts.slice(1).map(Number);
    if (parts.length === 2 && numbers.every(Number.isInteger)) await showStep(parts[0], numbers[0]);
    else if (parts.length === 4 && numbers.every(Number.isInteger)) await showReply(parts[0], ...numbers);
    else { buildOverview(); await refresh(true); }
    complain("");
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
    else if (state.first !== null && state.view?.kind === "overview") { Object.assign(state, { first: null, last: null }); refresh(true); }
    else if (state.view?.up) location.hash = state.view.up;
  }
  if (typing) return;
  if (event.key === "j" && state.view?.next) location.hash = state.view.next;
  if (event.key === "k" && state.view?.previous) location.hash = state.view.previous;
  if (event.key === "/" && state.view?.search) { event.preventDefault(); state.view.search.focus(); }
});

const themes = ["system", "light", "dark"];
function theme(name) {
  if (name === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  document.getElementById("theme").textContent = `theme: ${name}`;
  try { localStorage.setItem("gspo-theme", name); } catch { /* a browser without storage forgets it */ }
}
document.getElementById("theme").addEventListener("click", () => theme(themes[(themes.indexOf(document.documentElement.dataset.theme || "system") + 1) % 3]));

async function begin() {
  let saved = "system";
  try { saved = localStorage.getItem("gspo-theme") || saved; } catch { /* as above */ }
  theme(themes.includes(saved) ? saved : "system");
  // A link that is pasted into an open page changes only what is behind the #.
  window.addEventListener("hashchange", () => (location.hash.startsWith("#key=") ? location.reload() : state.setup && route()));
  try { await openSession(); state.setup = await ask("/api/setup"); } catch (error) { complain(error.message); return; }
  await route();
  await refresh(true);
  setInterval(refresh, POLL_MS);
}
begin();
