// The report: the dashboard's charts over data that is embedded in the file.

const report = JSON.parse(document.getElementById("data").textContent);

function runCard(run, _, runs) {
  const { environment, settings } = run;
  const packages = Object.entries(environment.packages || {}).filter(([, version]) => version);
  const of = settings.steps && !settings.tokens ? ` of ${settings.steps}` : "";
  const facts = [
    run.state, `step ${run.step}${of}`,
    `objective ${settings.objective?.name || "unknown"}`, `seed ${settings.seed ?? "unknown"}`,
    environment.device || "unknown device", ...packages.map(([name, version]) => `${name} ${version}`),
    `commit ${environment.commit || "unknown"}`,
  ];
  return node("section", { class: "card" },
    node("h2", {}, runs.length > 1 ? runLabel(run) : run.name),
    node("p", { class: "soft" }, facts.join(", ")),
    runs.length > 1 ? null : findingList(run.findings));
}

function differenceTable(runs) {
  if (!report.differences.length || runs.length < 2) return null;
  const head = node("tr", {}, node("th", {}, ""), ...runs.map((r) => node("th", {}, r.name)));
  const cells = (values) => values.map((value) => node("td", {}, value));
  const rows = report.differences.map((d) => node("tr", {}, node("th", {}, d.key), ...cells(d.values)));
  const table = node("table", {}, node("tbody", {}, head, ...rows));
  const title = node("h2", {}, "Settings that differ");
  return node("section", { class: "card" }, title, node("div", { class: "scroll" }, table));
}

function exampleCards(runs) {
  const title = (run, example) => (
    `${example.why}: step ${example.step}, ${completionSummary(example)}${runs.length > 1 ? ` (${run.name})` : ""}`);
  return runs.flatMap((run) => run.examples.map((example) => (
    node("details", { class: "card example" }, node("summary", {}, title(run, example)), completionView(example)))));
}

// The problems of the last evaluation of each set.
function evaluationCards(runs) {
  return runs.flatMap((run) => run.evaluated.map((found) => {
    const list = node("div", {});
    const draw = (kind) => list.replaceChildren(...problemRows(found, kind, () => null));
    draw("");
    const title = `${setName(found.set)} after step ${found.step}${runs.length > 1 ? ` (${run.name})` : ""}`;
    const numbers = evaluationNumbers(found.numbers);
    return node("details", { class: "card evaluation" }, node("summary", {}, `${title}: ${numbers}`),
      node("p", { class: "soft" }, changeSummary(found)),
      node("div", { class: "controls" }, problemChooser(report.setup.problem_filters, "", draw)), list);
  }));
}

function buildReport() {
  const runs = report.runs.map((r, i) => ({ ...r, color: i }));
  const cursor = (x) => charts.forEach((c) => c.showCursor(x));
  const charts = report.setup.panels.map((panel) => new Chart(panel, { cursor }));
  const smooth = node("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: 0.6, oninput: () => draw() });
  const marks = runs.flatMap(marksOf);
  const draw = () => {
    charts.forEach((c) => c.update(seriesOf(c.panel, runs), marks, { smooth: Number(smooth.value) }));
    sections.update();
  };
  const timed = runs.filter((r) => r.phases.x.length);
  const times = timed.map((r) => drawTimes(report.setup.phases.curves, r.phases, r.name));
  const examples = exampleCards(runs);
  const evaluations = evaluationCards(runs);
  const timesCard = node("section", { class: "card times" }, node("h3", {}, report.setup.phases.title),
    node("div", { class: "grid" }, ...times));
  timesCard.hidden = !times.length;
  const sections = new Sections(report.setup.sections, charts, { System: [timesCard, ...timelineCard(runs)] });
  const diagnosis = node("section", { class: "card" }, node("h2", {}, "Diagnosis"), groupedFindings(runs));
  const events = node("table", { class: "events" }, node("tbody", {}, ...eventTable(runs)));
  document.getElementById("main").replaceChildren(...[
    node("h1", {}, runs.map((r) => r.name).join(" · ")),
    ...runs.map(runCard), runs.length > 1 ? diagnosis : null, differenceTable(runs),
    node("div", { class: "controls" }, node("label", {}, "smoothing ", smooth)),
    ...sections.roots,
    evaluations.length ? node("h2", {}, "Last evaluation") : null, ...evaluations,
    examples.length ? node("h2", {}, "Example completions") : null, ...examples,
    node("details", { class: "card" }, node("summary", {}, "Events"), events),
  ].filter(Boolean));
  draw();
}
buildReport();
