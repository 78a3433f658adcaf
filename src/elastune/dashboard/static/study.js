// A study or a frontier while it works: its front, history, workers, trials, and what can be asked of it.
import { Chart, COLORS, QUIET, escaped } from "./charts.js";
import { act, actButton, duration, el, number, say } from "./dom.js";

const MOST_ROWS = 50;
const MOST_LANES = 64;
const MOST_SPANS = 3000; // the newest: a strip of more is a grey area
const LIVE = ["running", "paused"];
const SHORT = ["calibrate", "throughput"]; // phases of a frontier that time a few steps

export function studyPage(page, folder, readOnly) {
  const trials = new Map();
  const spans = []; // who had which workers, as far as it has ended
  let openSpans = [];
  let growth = { x: [], y: [], worker_s: [] };
  let head = {};
  let sort = { key: "n", down: true };
  let filter = "";
  let mostRows = MOST_ROWS;
  let weighs = false; // whether the importance of parameters is shown, for so many complete trials
  let weighed = 0;
  let open = null; // the trial whose details are shown
  const nodes = {};
  const keep = (name, node) => (nodes[name] = node);
  const said = keep("said", el("p", { class: "note said", role: "status" }));

  const chart = (name, title, options, ...below) => {
    const place = el("div", { class: "plot", id: `chart-${name}` });
    nodes[name] = new Chart(place, options);
    return el("section", { class: "panel" }, el("h3", { class: "left" }, title), place, ...below);
  };
  const growthBy = keep("growthBy", el("select", { "aria-label": "x axis", onchange: () => drawGrowth() },
    el("option", { value: "x" }, "over time"), el("option", { value: "worker_s" }, "over worker-seconds")));
  const pick = (number) => { if (number !== undefined && number !== null) show(number); };

  page.replaceChildren(
    el("header", {},
      keep("kind", el("p", { class: "kind" })), keep("title", el("h1")),
      keep("state", el("p", { class: "state" })),
      keep("tiles", el("div", { class: "tiles four" })),
      keep("waits", el("p", { class: "lead" })),
      said,
      readOnly ? null : controls()),
    el("main", {},
      keep("answer", el("section", { hidden: true })),
      keep("cells", el("section", { hidden: true })),
      el("div", { class: "panels two" },
        chart("front", "Front as it forms", { onpick: pick }, keep("frontNote", el("p", { class: "note" }))),
        chart("history", "Every trial by the time it ended", { x: "time of the study (s)", onpick: pick }),
        el("section", { class: "panel" },
          el("h3", { class: "left" }, keep("growthTitle", el("span", {}, "Hypervolume")), " ", growthBy),
          (() => { const place = el("div", { class: "plot", id: "chart-growth" }); nodes.growth = new Chart(place, { height: 300 }); return place; })()),
        chart("strip", "Workers over time, one colour a trial", { x: "time of the study (s)", y: "worker", onpick: pick })),
      el("section", {},
        el("h2", {}, "Trials"),
        el("p", { class: "tools" },
          keep("filter", el("input", { type: "search", placeholder: "filter: state, setting, reason…", "aria-label": "Filter the trials", oninput: (event) => { filter = event.target.value.toLowerCase(); drawTable(); } })),
          keep("count", el("span", { class: "note" }))),
        el("div", { class: "scroll" }, keep("table", el("table", { id: "trials" }, el("thead"), el("tbody")))),
        keep("more", el("button", { class: "act", type: "button", hidden: true, onclick: () => { mostRows = 20 * mostRows; drawTable(); } }, "Show more"))),
      el("section", {}, el("details", { ontoggle: (event) => { weighs = event.target.open; weigh(); } }, el("summary", {}, "What decides the objectives"),
        keep("importance", el("div", { id: "importance" }, el("p", { class: "note" }, "It is computed…"))))),
      el("section", {}, el("details", {}, el("summary", {}, "What was asked"), keep("acts", el("div"))))));

  function controls() {
    const field = (label, id, text) => el("label", {}, `${label} `, keep(id, el("input", { type: "number", min: "0", step: "any", placeholder: text })));
    const value = (id) => (nodes[id].value === "" ? null : Number(nodes[id].value));
    const budget = () => {
      const wanted = { trials: value("askTrials"), budget_s: value("askSeconds"), worker_hours: value("askHours") };
      return act(folder, "budget", Object.fromEntries(Object.entries(wanted).filter(([, each]) => each !== null)));
    };
    return el("details", { class: "controls" }, el("summary", {}, "Change the study"),
      el("p", { class: "tools limits" }, field("Trials", "askTrials", ""), field("Seconds", "askSeconds", ""), field("Worker-hours", "askHours", ""), actButton("Change the budget", budget, said)),
      el("p", { class: "tools limits" }, field("Workers", "askWorkers", ""), actButton("Change the workers", () => act(folder, "workers", { workers: value("askWorkers") }), said)),
      el("p", { class: "tools" }, actButton("End the study", () => act(folder, "end"), said, { danger: true, title: "Running trials pause; elastune resume goes on with them" })));
  }

  // -- what changed --

  function change(event) {
    const { rows, spans: ended, open_spans: goingOn, growth: grown, ...more } = event;
    if (event.fresh) { trials.clear(); spans.length = 0; growth = { x: [], y: [], worker_s: [] }; head = {}; }
    head = { ...head, ...more };
    for (const row of rows) trials.set(row.n, row);
    spans.push(...ended);
    if (spans.length > MOST_SPANS) spans.splice(0, spans.length - MOST_SPANS);
    openSpans = goingOn;
    growth = grown || growth;
    drawHead();
    drawTable();
    drawFront();
    drawHistory();
    drawGrowth();
    drawStrip();
    weigh();
  }

  /** Asks how much each parameter decides, when somebody looks, and again after a tenth more trials. */
  async function weigh() {
    const complete = head.counts.complete || 0;
    if (!weighs || (weighed && complete < 1.1 * weighed)) return;
    weighed = Math.max(1, complete);
    const answer = await fetch(`/api/importance?folder=${encodeURIComponent(folder)}`).catch(() => null);
    if (!answer || !answer.ok) { weighed = 0; return; }
    const found = (await answer.json()).importance;
    nodes.importance.replaceChildren(...found.map((each) => el("div", {}, el("h3", {}, each.objective),
      el("p", { class: "note" }, each.why_not || `By ${number(each.trials)} trials: how far a parameter's values among the best quarter differ from those among all (PED-ANOVA).`),
      each.shares.length ? el("table", { class: "bars" }, el("tbody", {}, each.shares.map(([name, share]) => el("tr", {},
        el("td", {}, name), el("td", { class: "bar" }, el("meter", { max: 1, value: share, "aria-label": name })), el("td", { class: "n" }, `${(100 * share).toFixed(1)} %`))))) : null)),
    found.length ? "" : el("p", { class: "note" }, "No objectives."));
  }

  function drawHead() {
    const program = head.program.split("/").pop() || head.name;
    say(nodes.kind, `elastune · ${head.kind}`);
    say(nodes.title, head.best ? `${program}: best ${head.best}` : program);
    document.title = `${head.running ? "● " : ""}${program}`;
    say(nodes.state, head.state);
    nodes.state.classList.toggle("open", head.running || head.state === "unfinished");
    const { budget } = head;
    const tile = (name, used, asked, shown = number, rest = "left") => el("section", { class: "tile" }, el("h2", {}, name),
      el("p", { class: "value" }, shown(used)), el("p", { class: "note" }, asked === null || asked === undefined ? "no bound" : `of ${shown(asked)}, ${shown(Math.max(0, asked - used))} ${rest}`),
      asked ? el("progress", { max: asked, value: Math.min(used, asked) }) : null);
    const counts = Object.entries(head.counts).map(([state, n]) => `${n} ${state}`).join(", ");
    nodes.tiles.replaceChildren(
      tile("Trials", budget.trials.used, budget.trials.asked),
      tile("Time", budget.budget_s.used, budget.budget_s.asked, duration),
      tile("Worker-hours", budget.worker_hours.used, budget.worker_hours.asked),
      tile("Workers busy", budget.workers.used, Array.isArray(budget.workers.asked) ? null : budget.workers.asked, number, "free"));
    say(nodes.waits, `${counts || "No trial yet"}.${head.waits.length ? ` Waits for ${head.waits.join("; ")}.` : ""}`);
    for (const each of page.querySelectorAll(".limits")) each.hidden = head.kind === "frontier"; // it divides both when it begins
    drawActs();
    drawFrontier();
  }

  function drawActs() {
    const rows = head.acts.map((each) => el("tr", {},
      el("td", {}, new Date(1000 * each.at).toLocaleTimeString()),
      el("td", {}, `${each.act.replace("_", " ")}${each.trial === null ? "" : ` trial ${each.trial}`} ${Object.entries(each.what).map((pair) => pair.join(" ")).join(", ")}`),
      el("td", {}, each.by), el("td", {}, each.refused || each.outcome || "to be done")));
    nodes.acts.replaceChildren(rows.length ? el("div", { class: "scroll" }, el("table", { id: "acts" },
      el("thead", {}, el("tr", {}, ["When", "What", "Who", "Outcome"].map((name) => el("th", {}, name)))), el("tbody", {}, rows))) : el("p", { class: "note" }, "Nothing yet."));
  }

  function drawFrontier() {
    if (head.answer) {
      nodes.answer.hidden = false;
      nodes.answer.replaceChildren(el("p", { class: "lead" }, head.answer.sentence),
        el("div", { class: "scroll" }, el("table", {},
          el("thead", {}, el("tr", {}, ["Workers", "Settings", "Quality", "95 % interval", "Seconds", "Verdict"].map((name) => el("th", { class: ["Settings", "Verdict"].includes(name) ? "" : "n" }, name)))),
          el("tbody", {}, head.answer.rows.map((row, i) => el("tr", { class: i === head.answer.pick ? "strong" : "" },
            el("td", { class: "n" }, number(row.workers)), el("td", {}, row.role), el("td", { class: "n" }, number(row.quality)),
            el("td", { class: "n" }, row.ci ? `${number(row.ci[0])} to ${number(row.ci[1])}` : "–"), el("td", { class: "n" }, number(row.seconds)), el("td", {}, row.verdict)))))));
    }
    if (head.by_workers.length) {
      const names = [...new Set(head.by_workers.flatMap((cell) => Object.keys(cell.values)))].filter((name) => !name.startsWith("_")).slice(0, 4);
      nodes.cells.hidden = false;
      nodes.cells.replaceChildren(el("h2", {}, "The answer as it stands"), el("div", { class: "scroll" }, el("table", { id: "cells" },
        el("thead", {}, el("tr", {}, ["Workers", "Phase", "Trials", "Running", ...names.map((name) => `mean ${name}`)].map((name) => el("th", { class: name === "Phase" ? "" : "n" }, name)))),
        el("tbody", {}, head.by_workers.map((cell) => el("tr", { class: cell.running ? "strong" : "" },
          el("td", { class: "n" }, number(cell.workers)), el("td", {}, cell.phase), el("td", { class: "n" }, number(cell.trials)), el("td", { class: "n" }, number(cell.running)),
          names.map((name) => el("td", { class: "n" }, `${number(cell.values[name])}${cell.intervals[name] ? ` (${cell.intervals[name].map(number).join(" to ")})` : ""}`))))))));
    }
  }

  // -- the table --

  const objectives = () => Object.keys(head.objectives || {});

  function columns() {
    const settings = [];
    for (const row of trials.values()) for (const name of Object.keys(row.settings)) if (!settings.includes(name) && settings.length < 12) settings.push(name);
    return [
      { key: "n", name: "Trial", of: (row) => row.n, right: true },
      { key: "state", name: "State", of: (row) => (head.parked.includes(row.n) ? "paused on request" : row.state) },
      ...(readOnly ? [] : [{ key: "ask", name: "Ask", of: (row) => Number(LIVE.includes(row.state)) }]),
      ...objectives().map((name) => ({ key: `value ${name}`, name, of: (row) => row.values[name], right: true })),
      { key: "epoch", name: "Passes", of: (row) => row.epoch, right: true, shown: (row) => `${row.epoch}${row.epochs ? ` of ${row.epochs}` : ""}` },
      { key: "workers", name: "Workers", of: (row) => row.workers, right: true },
      { key: "worker_s", name: "Worker-s", of: (row) => row.worker_s, right: true },
      ...settings.map((name) => ({ key: `set ${name}`, name, of: (row) => row.settings[name], right: true })),
      { key: "reason", name: "Why", of: (row) => row.reason },
    ];
  }

  function matches(row) {
    if (!filter) return true;
    const text = [row.n, row.state, row.phase, row.reason, ...Object.entries(row.settings).map((pair) => pair.join("="))].join(" ").toLowerCase();
    return filter.split(/\s+/).every((word) => text.includes(word));
  }

  function drawTable() {
    const shownColumns = columns();
    const column = shownColumns.find((each) => each.key === sort.key) || shownColumns[0];
    const missing = (value) => value === null || value === undefined;
    const rows = [...trials.values()].filter(matches).sort((a, b) => {
      const [x, y] = [column.of(a), column.of(b)];
      if (missing(x) || missing(y)) return Number(missing(x)) - Number(missing(y));
      const order = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y));
      return sort.down ? -order : order;
    });
    const focused = document.activeElement && nodes.table.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    const front = new Set(head.front);
    const [thead, tbody] = nodes.table.children;
    thead.replaceChildren(el("tr", {}, shownColumns.map((each) => el("th", { class: each.right ? "n" : "", "aria-sort": each.key === sort.key ? (sort.down ? "descending" : "ascending") : "none" },
      el("button", { class: "sort", type: "button", "data-key": `sort ${each.key}`, onclick: () => { sort = { key: each.key, down: each.key === sort.key ? !sort.down : true }; drawTable(); } },
        `${each.name}${each.key === sort.key ? (sort.down ? " ↓" : " ↑") : ""}`))), ));
    tbody.replaceChildren(...rows.slice(0, mostRows).flatMap((row) => {
      const line = el("tr", { id: `trial-${row.n}`, class: front.has(row.n) ? "strong" : "" },
        shownColumns.map((each) => el("td", { class: each.right ? "n" : each.key === "reason" ? "why" : "" },
          each.key === "ask" ? el("div", { class: "asks" }, asks(row)) : each.key === "n" ? el("button", { class: "sort", type: "button", "data-key": `open ${row.n}`, onclick: () => show(open === row.n ? null : row.n), "aria-expanded": String(open === row.n) }, String(row.n))
            : each.shown ? each.shown(row) : each.right ? number(each.of(row)) : String(each.of(row) ?? ""))),
      );
      return open === row.n ? [line, el("tr", { class: "details" }, el("td", { colspan: shownColumns.length }, nodes.details || "…"))] : [line];
    }));
    say(nodes.count, `${rows.length.toLocaleString("en")} of ${trials.size.toLocaleString("en")} trials`);
    nodes.more.hidden = rows.length <= mostRows;
    if (focused) for (const each of nodes.table.querySelectorAll("[data-key]")) if (each.dataset.key === focused) each.focus({ preventScroll: true });
  }

  function asks(row) {
    if (!LIVE.includes(row.state)) return [];
    const ask = (name, label, danger) => {
      const button = actButton(label, () => act(folder, name, { trial: row.n }), said, { danger });
      button.dataset.key = `${name} ${row.n}`;
      button.setAttribute("aria-label", `${label} trial ${row.n}`);
      return button;
    };
    return [row.state === "running" ? ask("pause", "Pause") : ask("go_on", "Go on"), ask("stop", "Stop", true)];
  }

  async function show(trial) {
    open = trial;
    nodes.details = null;
    drawTable();
    if (trial === null) return;
    const of = `folder=${encodeURIComponent(folder)}&trial=${trial}`;
    const [found, logs] = await Promise.all([`/api/trial?${of}`, `/api/logs?${of}`].map((url) => fetch(url).then((answer) => (answer.ok ? answer.json() : null)).catch(() => null)));
    if (open !== trial || !found) return;
    const place = el("div", { class: "plot" });
    nodes.details = el("div", {},
      el("p", { class: "note" }, Object.entries(found.config).map((pair) => pair.join(" = ")).join(", ")),
      place,
      (logs ? logs.logs : []).map((log) => el("details", {}, el("summary", {}, `Log of ${log.name}`), el("pre", { class: "log" }, log.text))));
    drawTable();
    const names = Object.keys(found.curves);
    const curves = new Chart(place, { height: 240, x: "passes", y: objectives()[0] && names.includes(objectives()[0]) ? objectives()[0] : names[0] || "" });
    curves.draw(() => ({ traces: names.map((name, i) => ({ name: escaped(name), x: found.curves[name].map((point) => point[0]), y: found.curves[name].map((point) => point[1]), mode: "lines+markers", line: { color: COLORS[i % 6] }, visible: i && !objectives().includes(name) ? "legendonly" : true })) }));
    document.getElementById(`trial-${trial}`)?.scrollIntoView({ block: "nearest" });
  }

  // -- pictures --

  /** Logarithmic where values differ by factors of more than a hundred. */
  const scale = (values) => (values.length > 2 && Math.min(...values) > 0 && Math.max(...values) > 100 * Math.min(...values) ? { type: "log", exponentformat: "power" } : { type: "linear" });
  const hover = (row) => escaped(`trial ${row.n}, ${row.state}: ${objectives().map((name) => `${name} ${number(row.values[name])}`).join(", ")}`);

  /** The 95 % intervals of an objective, for Plotly; undefined where no error is known. */
  function bars(rows, name) {
    const ends = rows.map((row) => (head.intervals[row.n] || {})[name]);
    if (!ends.some(Boolean)) return undefined;
    return { type: "data", symmetric: false, color: COLORS[2], thickness: 1.5, width: 4,
      array: ends.map((end, i) => (end ? Math.max(0, end[1] - rows[i].values[name]) : 0)),
      arrayminus: ends.map((end, i) => (end ? Math.max(0, rows[i].values[name] - end[0]) : 0)) };
  }

  function drawFront() {
    const [first, second] = objectives();
    if (!first) return;
    const y = first;
    const x = second || "seconds";
    nodes.front.options.x = second ? x : "training time (s)";
    nodes.front.options.y = y;
    const known = Object.keys(head.intervals).length > 0;
    say(nodes.frontNote, known ? "Bars: 95 % interval, over trials with equal settings, or of the share of test samples." : "");
    nodes.front.draw(() => {
      const front = new Set(head.front);
      const valued = [...trials.values()].filter((row) => !SHORT.includes(row.phase) && typeof row.values[y] === "number" && (second ? typeof row.values[x] === "number" : true));
      const at = (row) => (second ? row.values[x] : row.values.seconds ?? row.seconds);
      const group = (rows, name, marker, mode = "markers") => ({ name, mode, x: rows.map(at), y: rows.map((row) => row.values[y]), text: rows.map(hover), hoverinfo: "text", customdata: rows.map((row) => row.n), marker });
      const best = valued.filter((row) => front.has(row.n)).sort((a, b) => at(a) - at(b));
      return { traces: [
        group(valued.filter((row) => row.state === "complete" && !front.has(row.n)), "complete", { color: COLORS[0], size: 6, opacity: 0.6 }),
        group(valued.filter((row) => row.state === "paused"), "paused", { color: QUIET, size: 8, symbol: "line-ew-open", line: { width: 2 } }),
        group(valued.filter((row) => row.state === "running"), "running, so far", { color: COLORS[4], size: 9, symbol: "triangle-up" }),
        { ...group(best, "front", { color: COLORS[2], size: 10, symbol: "diamond" }, second ? "lines+markers" : "markers"), error_y: bars(best, y), ...(second ? { error_x: bars(best, x) } : {}), line: { color: COLORS[2], width: 1, dash: "dot" } },
      ].filter((trace) => trace.x.length), layout: { xaxis: scale(valued.map(at)), yaxis: scale(valued.map((row) => row.values[y])) } };
    });
  }

  function drawHistory() {
    const [name] = objectives();
    if (!name) return;
    nodes.history.options.y = name;
    nodes.history.draw(() => {
      const ended = [...trials.values()].filter((row) => row.state === "complete" && !SHORT.includes(row.phase) && typeof row.values[name] === "number").sort((a, b) => a.last_s - b.last_s);
      const better = head.objectives[name] === "max" ? Math.max : Math.min;
      let best = null;
      const bests = ended.map((row) => (best = best === null ? row.values[name] : better(best, row.values[name])));
      return { traces: [
        { name: "trials", mode: "markers", x: ended.map((row) => row.last_s), y: ended.map((row) => row.values[name]), text: ended.map(hover), hoverinfo: "text", customdata: ended.map((row) => row.n), marker: { color: COLORS[0], size: 6, opacity: 0.6 } },
        { name: "best so far", mode: "lines", x: ended.map((row) => row.last_s), y: bests, line: { color: COLORS[2], shape: "hv" }, hoverinfo: "skip" },
      ], layout: { yaxis: scale(ended.map((row) => row.values[name])) } };
    });
  }

  function drawGrowth() {
    const names = objectives();
    say(nodes.growthTitle, names.length > 1 ? "Hypervolume of the front" : `Best ${names[0] || ""} so far`);
    const by = growthBy.value;
    nodes.growth.options.x = by === "x" ? "time of the study (s)" : "worker-seconds";
    nodes.growth.options.y = names.length > 1 ? "hypervolume" : names[0] || "";
    nodes.growth.draw(() => ({ traces: [{ x: [...growth[by], by === "x" ? head.seconds : head.worker_s], y: [...growth.y, growth.y.at(-1)], mode: "lines", line: { color: COLORS[2], shape: "hv" }, showlegend: false }] }));
  }

  function drawStrip() {
    nodes.strip.draw(() => {
      const shown = [...spans, ...openSpans].map(([trial, begin, end, workers, ended, why, pause]) => ({ trial, begin, end, workers, ended, why, pause })).sort((a, b) => a.begin - b.begin);
      const freeAt = []; // lane -> when it is free
      const bars = [];
      for (const span of shown) {
        let left = span.workers;
        for (let lane = 0; left > 0 && lane < MOST_LANES; lane += 1) {
          if ((freeAt[lane] ?? -1) <= span.begin + 1e-6) { freeAt[lane] = span.end; bars.push({ ...span, lane }); left -= 1; }
        }
      }
      return {
        traces: [{
          type: "bar", orientation: "h", showlegend: false,
          y: bars.map((bar) => bar.lane), base: bars.map((bar) => bar.begin), x: bars.map((bar) => bar.end - bar.begin),
          marker: { color: bars.map((bar) => COLORS[bar.trial % COLORS.length]), line: { width: 0.5, color: "white" } },
          hovertext: bars.map((bar) => escaped(`trial ${bar.trial} on ${bar.workers}, ${bar.ended}${bar.why ? `: ${bar.why}` : ""}${bar.pause ? `, pause ${bar.pause} ms` : ""}`)),
          hoverinfo: "text", customdata: bars.map((bar) => bar.trial), width: 0.9,
        }],
        layout: { yaxis: { dtick: freeAt.length > 12 ? undefined : 1, tick0: 0, range: [-0.6, Math.max(0, freeAt.length - 1) + 0.6] }, bargap: 0 },
      };
    });
  }

  return { kind: "study", change, leave: () => {} };
}
