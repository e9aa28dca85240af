// The report: the dashboard's figures over data that is part of the file.

const report = JSON.parse(document.getElementById("data").textContent);

function runCard(run, number) {
  const environment = run.environment, versions = Object.entries(environment.packages || {}).filter(([, v]) => v).map(([k, v]) => `${k} ${v}`).join(", ");
  return node("section", { class: "card" },
    node("h2", { class: `f${number % COLOURS}` }, run.name),
    node("p", { class: "soft" }, `${run.state}, step ${run.step}${run.settings.steps && !run.settings.tokens ? ` of ${run.settings.steps}` : ""}, objective ${run.settings.objective?.name || "unknown"}, seed ${run.settings.seed ?? "unknown"}; ${environment.device || "unknown device"}, ${versions}, commit ${environment.commit || "unknown"}`),
    findingList(run.findings));
}

function buildReport() {
  const runs = report.runs.map((r, i) => ({ ...r, colour: i }));
  const charts = report.setup.panels.map((panel) => new Chart(panel, { cursor: (x) => charts.forEach((c) => c.showCursor(x)) }));
  const smooth = node("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: 0.6, oninput: () => draw() });
  const marks = runs.flatMap((r) => marksOf(r.events));
  const draw = () => charts.forEach((c) => c.update(seriesOf(c.panel, runs), marks, { smooth: Number(smooth.value) }));
  const differences = report.differences.length && runs.length > 1 ? node("section", { class: "card" }, node("h2", {}, "Settings that differ"), node("div", { class: "scroll" }, node("table", {}, node("tbody", {}, node("tr", {}, node("th", {}, ""), ...runs.map((r) => node("th", {}, r.name))), ...report.differences.map((d) => node("tr", {}, node("th", {}, d.key), ...d.values.map((v) => node("td", {}, v)))))))) : null;
  const telling = runs.flatMap((r) => r.telling.map((reply) => node("details", { class: "card telling" }, node("summary", {}, `${reply.why}: step ${reply.step}, ${replyWords(reply)}${runs.length > 1 ? ` (${r.name})` : ""}`), replyView(reply))));
  document.getElementById("main").replaceChildren(...[
    node("h1", {}, runs.map((r) => r.name).join(" · ")),
    ...runs.map(runCard), differences,
    node("div", { class: "controls" }, node("label", {}, "smoothing ", smooth)),
    node("div", { class: "grid" }, ...charts.map((c) => c.root)),
    node("section", { class: "card times" }, node("h2", {}, "Where does a step's time go?"), ...runs.filter((r) => r.phases.x.length).map((r) => drawTimes(report.setup.phases, r.phases, r.name))),
    telling.length ? node("h2", {}, "Telling replies") : null, ...telling,
    node("details", { class: "card" }, node("summary", {}, "Events"), node("table", {}, node("tbody", {}, ...eventTable(runs)))),
  ].filter(Boolean));
  draw();
}
buildReport();
