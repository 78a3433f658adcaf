// A run while it works: its metrics, what its monitors measure, its workers, decisions, ledger and logs.
import { Chart, COLORS, escaped } from "./charts.js";
import { act, actButton, duration, el, number, say } from "./dom.js";

const LOGS_MS = 5000;
const MOST_METRICS = 6;
const PARTS = { compute_s: ["computes", COLORS[0]], data_s: ["data", COLORS[5]], reduce_s: ["communicates", COLORS[4]], wait_s: ["waits", COLORS[1]] };
const MOST_SIGNALS = 6;

export function runPage(page, folder, readOnly) {
  const nodes = {};
  const keep = (name, node) => (nodes[name] = node);
  const said = keep("said", el("p", { class: "note said", role: "status" }));
  const charts = new Map();
  const curves = new Map();
  let head = {};

  page.replaceChildren(
    el("header", {},
      keep("kind", el("p", { class: "kind" }, "elastune · run")), keep("title", el("h1")), keep("state", el("p", { class: "state" })),
      keep("tiles", el("div", { class: "tiles four" })), said, readOnly ? null : controls()),
    el("main", {},
      keep("charts", el("div", { class: "panels two" })),
      el("section", {}, el("h2", {}, "What happened"), keep("events", el("div"))),
      el("section", { class: "tables" }, el("h2", {}, "Ledger of samples"), keep("sofar", el("div")), keep("ledger", el("div"))),
      el("section", {}, el("h2", {}, "Logs"), keep("logs", el("div")))));

  function controls() {
    const workers = el("input", { type: "number", min: "1", "aria-label": "Workers" });
    const mesh = el("input", { placeholder: "data=1,tensor=2", "aria-label": "Mesh" });
    return el("details", { class: "controls" }, el("summary", {}, "Change the run"),
      el("p", { class: "tools" }, workers, actButton("Change the workers", () => act(folder, "workers", { workers: Number(workers.value) }), said)),
      el("p", { class: "tools" }, mesh, actButton("Change the mesh", () => act(folder, "reshape", { mesh: mesh.value }), said)),
      el("p", { class: "tools" }, actButton("End the run", () => act(folder, "end"), said, { danger: true, title: "It writes a checkpoint; elastune resume goes on with it" })));
  }

  function chart(name, title, options) {
    if (!charts.has(name)) {
      const place = el("div", { class: "plot" });
      nodes.charts.append(el("section", { class: "panel" }, el("h3", { class: "left" }, title), place));
      charts.set(name, new Chart(place, { height: 260, ...options }));
    }
    return charts.get(name);
  }

  function change(event) {
    const { curves: changed, ...more } = event;
    if (event.fresh) { curves.clear(); head = {}; }
    head = { ...head, ...more };
    for (const [name, [stay, points]] of Object.entries(changed || {})) curves.set(name, [...(curves.get(name) || []).slice(0, stay), ...points]);
    const named = (kind) => Object.fromEntries([...curves].filter(([name]) => name.startsWith(`${kind} `)).map(([name, points]) => [name.slice(kind.length + 1), points]));
    draw({ ...head, metrics: named("metric"), signals: named("signal"), batch: curves.get("batch") || [], lr: curves.get("lr") || [], workers: curves.get("workers") || [] });
  }

  function draw(head) {
    const program = head.program.split("/").pop() || head.name;
    say(nodes.title, head.best ? `${program}: ${head.best}` : program);
    document.title = `${head.running ? "● " : ""}${program}`;
    say(nodes.state, head.state);
    nodes.state.classList.toggle("open", head.running || head.state === "unfinished");
    const { now } = head;
    const tile = (name, value, note, done = null) => el("section", { class: "tile" }, el("h2", {}, name), el("p", { class: "value" }, value), el("p", { class: "note" }, note), done === null ? null : el("progress", { max: 1, value: Math.min(1, done) }));
    nodes.tiles.replaceChildren(
      tile("Steps", number(now.step), now.planned ? `of ${number(now.planned)}` : "", now.planned ? now.step / now.planned : null),
      tile("Passes", number(now.epoch), now.epochs ? `of ${number(now.epochs)}` : ""),
      tile("Workers", number(now.workers), `${number(now.samples)} samples`),
      tile("Training time", duration(now.seconds), `${duration(head.seconds)} by the clock${now.checkpoint === null ? "" : `; checkpoint of step ${number(now.checkpoint)}`}`));
    drawCharts(head);
    drawTables(head);
    if (checked < 0) ledger();
  }

  const line = (name, points, color, more = {}) => ({ name: escaped(name), mode: points.length < 40 ? "lines+markers" : "lines", x: points.map((p) => p[0]), y: points.map((p) => p[1]), line: { color }, ...more });

  function drawCharts(head) {
    for (const [i, [name, points]] of Object.entries(head.metrics).slice(0, MOST_METRICS).entries()) {
      chart(`metric ${name}`, name, { x: "step", y: name }).draw(() => ({ traces: [line(name, points, COLORS[i % 6])] }));
    }
    const signals = Object.entries(head.signals);
    const first = signals.filter(([name]) => name === "loss" || name.includes("noise"));
    for (const [name, points] of first) drawSignal(name, points, head);
    drawWorkers(head);
    drawParts(head);
    if (head.worker_steps.length) drawSteps(head);
    for (const [name, points] of signals.filter((each) => !first.includes(each) && !(each[0] in PARTS)).slice(0, MOST_SIGNALS)) drawSignal(name, points, head);
    if (head.lr.length) {
      chart("lr", "Learning rate", { x: "step", y: "learning rate" }).draw(() => ({ traces: [line("learning rate", head.lr, COLORS[3])], layout: { yaxis: { rangemode: "tozero" } } }));
    }
  }

  /** A signal with a band of its standard error; the noise scale beside the batch. */
  function drawSignal(name, points, head) {
    const noise = name.includes("noise");
    const title = name.replaceAll("_", " ");
    chart(`signal ${name}`, noise ? `${title} and the batch` : title, { x: "step", y: noise ? "samples" : title }).draw(() => {
      const banded = points.filter((p) => p[1] !== null && p[2] !== null && p[2] !== undefined);
      const band = { mode: "lines", line: { width: 0 }, fill: "toself", fillcolor: "rgba(0,114,178,0.2)", hoverinfo: "skip", name: "± a standard error",
        x: [...banded.map((p) => p[0]), ...banded.map((p) => p[0]).reverse()], y: [...banded.map((p) => p[1] + p[2]), ...banded.map((p) => p[1] - p[2]).reverse()] };
      return { traces: [...(banded.length ? [band] : []), line(title, points, COLORS[0]), ...(noise ? [line("batch", head.batch, COLORS[1], { line: { color: COLORS[1], shape: "hv", dash: "dash" }, mode: "lines" })] : [])] };
    });
  }

  function drawWorkers(head) {
    chart("workers", "Workers over time, and what changed them", { x: "time of the run (s)", y: "workers" }).draw(() => {
      const points = head.workers.length ? [...head.workers, [head.seconds, head.workers.at(-1)[1]]] : [];
      const begin = head.last_at - head.seconds;
      const top = Math.max(1, ...points.map((p) => p[1] || 0));
      return {
        traces: [line("workers", points, COLORS[0], { mode: "lines", line: { color: COLORS[0], shape: "hv" }, showlegend: false }),
          { mode: "markers", x: head.events.map((each) => each.at - begin), y: head.events.map(() => top + 0.3), text: head.events.map((each) => escaped(`step ${each.step}: ${each.what}; ${each.why}`)), hoverinfo: "text", marker: { symbol: "triangle-down", size: 9, color: COLORS[1] }, showlegend: false }],
        layout: { yaxis: { range: [0, top + 0.6], dtick: top < 12 ? 1 : undefined } },
      };
    });
  }

  /** What a step's time is spent on, as the performance monitor measures it while the run goes on. */
  function drawParts(head) {
    const parts = Object.entries(PARTS).filter(([name]) => head.signals[name]);
    if (!parts.length) return;
    chart("parts", "Where a step's time goes, as it runs", { x: "step", y: "milliseconds" }).draw(() => ({
      traces: parts.map(([name, [words, color]]) => ({ name: words, mode: "lines", stackgroup: "step", line: { width: 0.5, color }, fillcolor: color, x: head.signals[name].map((p) => p[0]), y: head.signals[name].map((p) => (p[1] === null ? null : 1e3 * p[1])) })),
      layout: { yaxis: { rangemode: "tozero" } },
    }));
  }

  function drawSteps(head) {
    chart("steps", "Where a step's time went, by worker", { x: "worker", y: "milliseconds" }).draw(() => {
      const names = head.worker_steps.map((each) => String(each[0]));
      const bar = (name, values, color, base) => ({ type: "bar", name, x: names, y: values, base, marker: { color } });
      const compute = head.worker_steps.map((each) => 1e3 * each[2]);
      const waits = head.worker_steps.map((each) => 1e3 * Math.max(0, each[1] - each[2]));
      return { traces: [bar("computes", compute, COLORS[0]), bar("waits and communicates", waits, COLORS[4], compute)], layout: { xaxis: { type: "category" } } };
    });
  }

  const table = (id, names, rows) => (rows.length ? el("div", { class: "scroll" }, el("table", { id },
    el("thead", {}, el("tr", {}, names.map((name, i) => el("th", { class: typeof rows[0][i] === "number" ? "n" : "" }, name)))), el("tbody", {}, rows.map((row) => el("tr", {}, row.map((each) => el("td", { class: typeof each === "number" ? "n" : "" }, typeof each === "number" ? number(each) : each)))))))
    : el("p", { class: "note" }, "Nothing yet."));

  function drawTables(head) {
    nodes.events.replaceChildren(table("events", ["When", "Step", "What", "Why"], head.events.map((each) => [new Date(1000 * each.at).toLocaleTimeString(), each.step, each.what, each.why])));
    nodes.ledger.replaceChildren(table("ledger", ["Worker", "Steps", "Samples of these steps"], head.ledger.map((each) => [String(each[0]), each[1], each[2]])),
      head.memory.length ? table("memory", ["Rank", "Parameters (MB)", "Optimizer (MB)", "Peak (MB)"], head.memory.map(([rank, ...bytes]) => [String(rank), ...bytes.map((each) => each / 1e6)])) : "");
  }

  async function logs() {
    const answer = await fetch(`/api/logs?folder=${encodeURIComponent(folder)}`).catch(() => null);
    if (!answer || !answer.ok) return;
    const found = (await answer.json()).logs;
    const opened = new Set([...nodes.logs.querySelectorAll("details[open] summary")].map((each) => each.textContent));
    nodes.logs.replaceChildren(...(found.length ? found.map((log, i) => el("details", { open: opened.has(log.name) || (i === 0 && !nodes.logs.querySelector("details")) }, el("summary", {}, log.name), el("pre", { class: "log" }, log.text))) : [el("p", { class: "note" }, "No logs.")]));
  }
  logs();
  let checked = -1; // the step of the newest ledger
  async function ledger() {
    const step = head.now ? head.now.step : 0;
    if (step === checked) return;
    checked = step;
    const answer = await fetch(`/api/ledger?folder=${encodeURIComponent(folder)}`).catch(() => null);
    if (!answer || !answer.ok) { checked = -1; return; }
    const { epochs, verdict } = await answer.json();
    nodes.sofar.replaceChildren(el("p", { class: "note" }, `So far: ${verdict}.`),
      epochs.length ? table("epochs", ["Epoch", "Used once", "Of", "Missed", "Repeated", "Left out"], epochs.map(([epoch, ...counts]) => [String(epoch), ...counts])) : "");
  }
  const timer = setInterval(() => { if (!document.hidden) { logs(); ledger(); } }, LOGS_MS);
  return { kind: "run", change, leave: () => clearInterval(timer) };
}
