// Draws what /api says. Every text goes into the page as text, never as HTML.
const $ = id => document.getElementById(id);
const SYMBOL = { good: "✔", info: "ℹ", warn: "▲", bad: "✖" };
const SPANS = [["all", 0], ["last 10 min", 600], ["last hour", 3600], ["last 6 h", 21600], ["last day", 86400]];
const drawn = new WeakMap(), FIRST = 50, MARKED = 400, EVERY_MS = 3000, PANELS_MS = 30000;
let run = null, span = 0, open = new Set(), all = false, told = null, plotly = null, busy = false, panelsAsked = [];

const ink = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const when = s => new Date(s * 1000);
const badge = ({ mood, urgency }) => `${SYMBOL[mood]} ${urgency}`;
const SPENT = { stall: "snapshots and checks between steps", detect: "noticing the fault", stop: "ending the ranks", start: "starting processes", build: "imports, building the model", restore: "restoring the state", step: "first step after a restart", replay: "computing steps again" };
const count = ({ results }) => Object.entries(results).map(([what, n]) => `${number(n)} ${what}`).join(", ");
const number = n => n.toLocaleString("en");
const again = n => `${number(n)} step${n === 1 ? "" : "s"} computed again`;
const two = n => String(n).padStart(2, "0");
const day = d => `${d.getFullYear()}-${two(d.getMonth() + 1)}-${two(d.getDate())}`;
const clock = s => { const d = when(s);
  return `${day(d) === day(new Date()) ? "" : day(d) + " "}${two(d.getHours())}:${two(d.getMinutes())}:${two(d.getSeconds())}`; };
const took = s => s >= 7200 ? `${(s / 3600).toFixed(1)} h` : s >= 120 ? `${(s / 60).toFixed(1)} min` : s >= 1 ? `${s.toFixed(1)} s` : `${Math.round(s * 1000)} ms`;
const kind = result => result.split(" ")[0];
const colour = result => ({ recovered: ink("good"), not: ink("bad"), did: ink("bad"), came: ink("bad"), stopped: ink("bad"), reported: ink("other") })[kind(result)] ?? ink("warn");

function make(tag, words = "", attributes = {}) {
  const found = document.createElement(tag);
  found.textContent = words;
  for (const [name, value] of Object.entries(attributes)) found.setAttribute(name, value);
  return found;
}

// In a report, all answers are in the page.
const REPORT = $("report") && JSON.parse($("report").textContent);
const answers = path => path.includes("/incidents/") ? REPORT.stories[path.split("/").at(-1)] : { ...REPORT.told, curve: since(REPORT.told.curve) };
function since(curve) {
  const from = span ? REPORT.told.now - span : 0, kept = curve.at_s.map(at => at >= from);
  return Object.fromEntries(Object.entries(curve).map(([name, values]) => [name, values.filter((_, at) => kept[at])]));
}

async function ask(path) {
  if (REPORT) return answers(path);
  const answer = await fetch(path);
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

function drawing() {
  return plotly ??= window.Plotly ? Promise.resolve(window.Plotly) : new Promise((done, failed) => {
    const script = make("script", "", { src: "static/plotly.min.js" });
    script.onload = () => done(window.Plotly);
    script.onerror = failed;
    document.head.append(script);
  });
}

const axis = more => ({ gridcolor: ink("rule"), zerolinecolor: ink("rule"), linecolor: ink("rule"), automargin: true, fixedrange: true, ...more });
async function plot(id, traces, layout) {
  const place = typeof id === "string" ? $(id) : id;
  const common = { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: ink("ink"), size: 12 },
    margin: { l: 8, r: 8, t: 8, b: 8 }, showlegend: false, hoverlabel: { bgcolor: ink("card"), font: { color: ink("ink") }, align: "left" } };
  const whole = { ...common, ...layout }, same = JSON.stringify([traces, whole]);
  if (drawn.get(place) === same) return place;
  drawn.set(place, same);
  return (await drawing()).react(place, traces, whole, { displayModeBar: false, responsive: true });
}

function fill(table, rows) {
  $(table).tBodies[0].replaceChildren(...rows.map(cells => {
    const row = make("tr");
    row.append(...cells.map((cell, at) => make("td", cell, at ? { class: "n" } : {})));
    return row;
  }));
}

function command(words) {
  const whole = make("code");
  whole.append(...words.split(" ").flatMap((word, at) => [at ? " " : "", word.length > 20 ? word : make("span", word)])); // no line ends behind the hyphens of an option
  return whole;
}

function showState(state, now) {
  $("state").className = state.mood;
  for (const [id, words] of [["badge", badge(state)], ["words", state.words], ["now", state.figures ?? ""]])
    if ($(id).textContent !== words) $(id).textContent = words;
  if ($("act").dataset.told !== JSON.stringify(state.act)) { // in place only what is new: it is read aloud
    $("act").dataset.told = JSON.stringify(state.act);
    $("act").replaceChildren(...state.act.map(each => {
      const item = make("li");
      item.append(...each.split("`").map((words, at) => at % 2 ? command(words) : make("span", words)));
      return item;
    }));
  }
  const last = state.last, above = last && (last.result === "under way" || last.result === "stopped"); // told above
  const outcome = last && `${last.result}${last.result === "recovered" ? ` in ${took(last.seconds)}` : ""}, ${again(last.lost_steps)}`;
  const what = last && state.words.includes(last.summary) ? "" : `${last?.summary}; `;
  $("last").textContent = above ? "" : last ? `Last incident, ${took(Math.max(0, now - last.at_s))} ago (${clock(last.at_s)}): ${what}${outcome}.` : "No incident so far.";
  document.title = `${state.words} – ${told.job}`;
}

function showCosts(costs) {
  const lost = Object.entries(costs.spent).filter(([where]) => where !== "training").sort((a, b) => b[1] - a[1]).map(([where, s]) => [SPENT[where] ?? where, s]);
  const figures = [
    ["effective", `${(100 * costs.effective).toFixed(1)} %`, `useful training time: ${took(costs.trained_s)} of ${took(costs.counted_s)}${lost[0] ? `; most of the rest: ${lost[0][0]}, ${took(lost[0][1])}` : ""}`.replace(/(\d) /g, "$1\u00a0")],
    ["incidents", number(costs.incidents), `incident${costs.incidents === 1 ? "" : "s"}${costs.incidents ? `: ${count(costs)}` : ""}`],
    ["lost_steps", number(costs.lost_steps), `step${costs.lost_steps === 1 ? "" : "s"} computed again${costs.results.open ? " or to compute again" : ""}`],
    ["lost_s", took(costs.lost_s), costs.lost_s ? "lost to incidents, until now" : "lost to incidents"],
  ];
  $("figures").replaceChildren(...figures.map(([key, value, words]) => {
    const box = make("div");
    box.append(make("b", value, { "data-figure": key }), make("span", words));
    return box;
  }));
  const total = Object.values(costs.spent).reduce((sum, each) => sum + each, 0) || 1;
  const share = s => s / total < .001 ? "< 0.1 %" : `${(100 * s / total).toFixed(s / total < .1 ? 1 : 0)} %`;
  fill("spent-table", Object.entries(costs.spent).sort((a, b) => b[1] - a[1]).map(([where, s]) => [SPENT[where] ?? where, s.toFixed(1), share(s)]));
  $("spent").setAttribute("aria-label", `Where the rest of the time went: ${lost.map(([where, s]) => `${where} ${took(s)}`).join(", ") || "nowhere"}`);
  const shown = lost.slice(0, 8).reverse();
  plot("spent", [{ type: "bar", orientation: "h", y: shown.map(([where]) => where), x: shown.map(([, s]) => s), marker: { color: ink("line3") },
    text: shown.map(([, s]) => `${took(s)}, ${share(s)}`), textposition: "auto", insidetextanchor: "end", cliponaxis: false, hoverinfo: "skip" }],
  { height: 46 + 26 * shown.length, xaxis: axis({ visible: false }), yaxis: axis({ ticksuffix: "  ", showgrid: false }),
    margin: { l: 8, r: 90, t: 26, b: 4 }, title: { text: "Time that was not useful training, and its share of all", font: { size: 13, color: ink("faint") }, x: 0, xref: "paper", y: .98, yanchor: "top" } });
}

async function showCurve({ curve, incidents, now }) {
  const x = curve.at_s.map(when), from = span ? now - span : curve.at_s[0] ?? 0;
  const marks = incidents.filter(each => each.at_s >= from).slice(-MARKED).sort((a, b) => (b.result === "reported") - (a.result === "reported")); // those lie below
  const line = (name, y, colour, axis) => ({ name, x, y, yaxis: axis, mode: "lines", line: { color: colour, width: 2 }, connectgaps: false, hovertemplate: `%{y:.6~g}<extra>${name}</extra>` });
  const shapes = marks.slice(-200).map(each => ({ type: "line", xref: "x", yref: "paper", x0: when(each.at_s), x1: when(each.at_s), y0: 0, y1: 1,
    line: { color: colour(each.result), width: 1.5, dash: "dot" } }));
  const dots = { name: "incidents", x: marks.map(each => when(each.at_s)), y: marks.map(each => Math.max(0, each.step)), yaxis: "y", mode: "markers",
    marker: { size: 12, symbol: marks.map(each => each.window ? "diamond" : /rewind/.test(each.rung) ? "triangle-down" : each.result === "under way" ? "circle-open" : "circle"), color: marks.map(each => colour(each.result)), line: { color: ink("card"), width: 2 } }, customdata: marks.map(each => each.number),
    text: marks.map(each => `incident ${each.number}: ${each.cause}, ${each.result}${each.window ? `, left out ${each.window}` : ""}`), hovertemplate: "%{text}<extra></extra>" };
  const title = words => ({ title: { text: words, font: { size: 12, color: ink("faint") } } });
  const chart = await plot("curve", [line("step", curve.step, ink("line1"), "y"), line("loss", curve.loss, ink("line2"), "y2"),
    line("seconds per step", curve.step_s, ink("line3"), "y3"), dots],
  { height: 470, shapes, hovermode: "x", xaxis: axis({ type: "date", anchor: "y3", range: span ? [when(from), when(now)] : undefined }),
    yaxis: axis({ domain: [.68, 1], ...title("step") }), yaxis2: axis({ domain: [.34, .62], ...title("loss") }),
    yaxis3: axis({ domain: [0, .28], rangemode: "tozero", ...title("s per step") }) });
  chart.removeAllListeners?.("plotly_click");
  chart.on?.("plotly_click", ({ points }) => { for (const { customdata } of points) if (customdata) toggle(customdata, true); });
}

let listed = "";
function showIncidents(incidents) {
  const newest = [...incidents].reverse(), shown = all ? newest : newest.slice(0, FIRST);
  const fresh = JSON.stringify([run, newest.length, shown]);
  if (fresh === listed) return; // a button that is replaced between mousedown and mouseup gets no click
  listed = fresh;
  $("none").hidden = newest.length > 0;
  $("incidents").hidden = newest.length === 0;
  $("more").hidden = shown.length === newest.length;
  $("more").textContent = `show all ${number(newest.length)} incidents`;
  const body = $("incidents").tBodies[0], focused = document.activeElement?.dataset?.incident;
  const stories = new Map([...body.querySelectorAll("tr.story")].map(row => [row.id, row]));
  body.replaceChildren(...shown.flatMap(each => {
    const row = make("tr", "", { "data-row": each.number }), what = make("td", "", { class: "what" });
    what.append(make("button", each.summary, { "data-incident": each.number, "aria-expanded": open.has(each.number), "aria-controls": `story-${each.number}` }));
    row.append(make("td", each.number, { class: "n" }), make("td", clock(each.at_s), { class: "when" }), what, make("td", each.rung.replace(/^rung (\d), /, "$1: "), { class: "answer" }),
      make("td", each.result, { class: `result ${each.result}` }), make("td", number(each.lost_steps), { class: "n", "data-cell": "lost_steps", "data-unit": "steps again" }),
      make("td", took(each.seconds), { class: "n", "data-cell": "seconds", "data-unit": "in all" }));
    const story = stories.get(`story-${each.number}`);
    return open.has(each.number) && story ? [row, story] : [row];
  }));
  if (focused) body.querySelector(`[data-incident="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
}

async function toggle(which, show = !open.has(which)) {
  show ? open.add(which) : open.delete(which);
  const body = $("incidents").tBodies[0], row = body.querySelector(`[data-row="${CSS.escape(which)}"]`);
  if (!row) { if (show && !all) { all = true; showIncidents(told.incidents); return toggle(which, true); } return; }
  row.querySelector("button").setAttribute("aria-expanded", show);
  $(`story-${which}`)?.remove();
  if (!show) return;
  const story = await ask(`api/runs/${run}/incidents/${which}`);
  const line = make("tr", "", { class: "story", id: `story-${which}` }), cell = make("td", "", { colspan: 7 });
  const phases = Object.entries(story.phases), bar = make("div", "", { class: "plot", role: "img", "aria-label": phases.map(([name, s]) => `${name} ${took(s)}`).join(", ") });
  cell.append(...(phases.length ? [make("b", "Phases of the recovery"), bar] : []), make("pre", story.lines.join("\n")));
  line.append(cell);
  $(`story-${which}`)?.remove();
  body.querySelector(`[data-row="${CSS.escape(which)}"]`).after(line);
  if (phases.length) drawPhases(bar, phases);
  row.scrollIntoView({ block: "nearest" });
}

const SHADES = ["#5b8def", "#e07b39", "#3fa66b", "#b06fd8", "#c9a227", "#d1576b", "#4aa3b5"];
const PHASES = ["detect", "stop", "start", "build", "restore", "step", "replay"];
const drawPhases = (place, phases) => plot(place, phases.map(([name, s]) => ({ type: "bar", orientation: "h", name: `${name} ${took(s)}`, y: [""], x: [s],
  marker: { color: SHADES[PHASES.indexOf(name)] }, hovertemplate: `${name} ${took(s)}<extra></extra>` })),
{ barmode: "stack", height: 110, showlegend: true, legend: { orientation: "h", traceorder: "normal", y: -.2, yanchor: "top" }, xaxis: axis({ visible: false }), yaxis: axis({ visible: false }) });

function showPresent(present) {
  $("present").hidden = !present;
  if (!present) return;
  fill("risk", present.at_risk.map(each => [each.lost, number(each.steps), each.seconds || "–"]));
  fill("snapshots", present.snapshots.map(each => [each.tier, each.step < 0 ? "none" : number(each.step), each.age || "–"]));
  const nodes = Object.entries(present.nodes).map(([part, count]) => [part, number(count)]);
  fill("nodes", [...nodes, ["leads", present.leader || "–"], ["a write to etcd", present.etcd || "–"]]);
}

const bars = (id, values, words, colour) => plot(id, [{ type: "histogram", x: values, nbinsx: 40, marker: { color: ink(colour) }, hovertemplate: "%{x} s: %{y}<extra></extra>" }],
  { height: 220, bargap: .05, xaxis: axis({ title: { text: "seconds", font: { size: 12, color: ink("faint") } } }), yaxis: axis({ dtick: values.length < 6 ? 1 : undefined, title: { text: words, font: { size: 12, color: ink("faint") } } }) });

function showFurther({ further, curve, incidents }) {
  const steps = curve.step_s.filter(s => s), recoveries = incidents.filter(each => each.seconds).map(each => each.seconds);
  $("distributions").hidden = !steps.length && !recoveries.length;
  if (steps.length) bars("step-times", steps, "lines of the journal", "line3");
  $("h-recoveries").hidden = $("recovery-times").hidden = !recoveries.length;
  if (recoveries.length) bars("recovery-times", recoveries, "recoveries", "line1");
  for (const [table, rows] of [["kept", Object.entries(further.snapshots)], ["windows", further.windows], ["configuration", Object.entries(further.configuration)], ["versions", Object.entries(further.versions)]]) {
    fill(table, rows);
    $(table).parentElement.hidden = !rows.length;
  }
}

async function showPanels() {
  const which = `api/runs/${run}/prometheus?span=${span}`, mine = [which, Infinity];
  if (panelsAsked[0] === which && Date.now() - panelsAsked[1] < PANELS_MS) return;
  panelsAsked = mine;
  const answer = await ask(which).finally(() => { mine[1] = Date.now(); });
  if (panelsAsked !== mine) return; // another job, or another range, has been chosen meanwhile
  $("asked").hidden = false;
  $("asked-error").textContent = answer.error;
  for (const panel of answer.panels.slice($("panels").children.length)) { // all boxes first: a chart takes the width of its box as it is then
    const box = make("div");
    box.append(make("h3", panel.title), make("p", panel.question, { class: "hint" }), make("div", "", { class: "plot", role: "img", "aria-label": panel.title }));
    $("panels").append(box);
  }
  for (const [at, panel] of answer.panels.entries()) {
    const box = $("panels").children[at];
    const percent = panel.unit === "percentunit" ? { tickformat: ".0%" } : { ticksuffix: panel.unit === "s" ? " s" : "" };
    await plot(box.lastChild, panel.series.map(each => ({ name: each.name, x: each.x.map(when), y: each.y, mode: "lines" })),
      { height: 240, showlegend: panel.series.length > 1, legend: { orientation: "h", y: -.18, yanchor: "top" }, xaxis: axis({ type: "date", tickformatstops: [{ dtickrange: [null, 59999], value: "%H:%M:%S" }, { dtickrange: [60000, 86400000], value: "%H:%M" }] }), yaxis: axis(percent) });
  }
}

async function look() {
  if (busy) return;
  busy = true;
  try {
    if (run === null) {
      const jobs = REPORT ? [REPORT.told] : await ask("api/runs");
      if (jobs.length === 1) { run = 0; } else { showJobs(jobs); }
    }
    if (run !== null) {
      told = await ask(`api/runs/${run}?span=${span}`);
      showOne();
    }
    $("fresh").textContent = REPORT ? `a report, as of ${clock(REPORT.told.now)}` : `as of ${clock(run === null ? Date.now() / 1000 : told.now)}`;
  } catch (error) {
    $("fresh").textContent = error instanceof TypeError ? "the dashboard's server does not answer; what you see is old" : `what you see is old: the server cannot read this job (${error.message})`;
    if (!(error instanceof TypeError)) console.error(error);
  } finally { busy = false; }
}

function showJobs(jobs) {
  $("one").hidden = true;
  $("all").hidden = false;
  $("job").textContent = "";
  const order = ["bad", "warn", "info", "good"];
  jobs.sort((a, b) => order.indexOf(a.state.mood) - order.indexOf(b.state.mood));
  $("jobs").replaceChildren(...jobs.map(job => {
    const line = make("li"), link = make("a", "", { href: `#run=${job.run}`, class: job.state.mood });
    const costs = `${(100 * job.costs.effective).toFixed(1)} % useful training time, incidents: ${count(job.costs) || "none"}; ${again(job.costs.lost_steps)}`;
    link.append(make("b", `${job.job} `), make("span", badge(job.state), { class: "badge" }), make("div", job.state.words), make("small", costs));
    line.append(link);
    return line;
  }));
}

function showOne() {
  $("all").hidden = true;
  $("one").hidden = false;
  $("job").textContent = `${told.job} · ${told.runs ? "running for" : "ran for"} ${took(told.until_s - told.from_s)}${told.runs ? "" : `, until ${clock(told.until_s)}`}`;
  showState(told.state, told.now);
  showCosts(told.costs);
  showCurve(told);
  showIncidents(told.incidents);
  showPresent(told.present);
  showFurther(told);
  if (told.prometheus) showPanels().catch(console.error);
  const more = told.prometheus || REPORT ? "" : " Start it with --prometheus URL to see a Prometheus' panels, too.";
  const old = told.curve.at_s.length ? "" : " They have no lines about the progress: no step was finished, or an older version wrote them.";
  $("source").textContent = `Drawn from the journals in ${told.directory}.${old}${more} Command: ${told.command}`;
}

function address() {
  const words = new URLSearchParams(location.hash.slice(1));
  run = words.has("run") ? Number(words.get("run")) : null;
  open = new Set();
  $("incidents").tBodies[0].replaceChildren();
  $("panels").replaceChildren();
  panelsAsked = [];
  return look().then(() => { if (words.has("incident")) toggle(words.get("incident"), true); });
}

for (const [words, seconds] of SPANS) {
  const button = make("button", words, { "aria-pressed": seconds === span });
  button.onclick = () => {
    span = seconds;
    for (const each of $("spans").children) each.setAttribute("aria-pressed", each === button);
    look();
  };
  $("spans").append(button);
}
$("incidents").addEventListener("click", event => { const which = event.target.dataset.incident; if (which) toggle(which); });
$("more").onclick = () => { all = true; showIncidents(told.incidents); };
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => told && showOne());
addEventListener("hashchange", address);
document.addEventListener("visibilitychange", () => document.hidden || look());
if (!REPORT) setInterval(() => document.hidden || look(), EVERY_MS);
address();
