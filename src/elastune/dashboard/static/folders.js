// All output folders: what each holds, its state, its age, and its best result.
import { duration, el, follow } from "./dom.js";

export function folders(page, onlost) {
  const body = el("tbody");
  page.replaceChildren(
    el("header", {}, el("p", { class: "kind" }, "elastune"), el("h1", {}, "Output folders")),
    el("div", { class: "scroll" }, el("table", { id: "folders" },
      el("thead", {}, el("tr", {}, ["Folder", "What", "State", "Last record", "Best"].map((name) => el("th", {}, name)))),
      body)),
  );
  document.title = "elastune";
  let shown = [];
  function draw() {
    const now = Date.now() / 1000;
    const rows = [...shown].sort((a, b) => (b.last_at || 0) - (a.last_at || 0));
    body.replaceChildren(...rows.map((each) => el("tr", {},
      el("td", {}, el("a", { href: `#/f/${encodeURIComponent(each.name)}` }, each.name)),
      el("td", {}, each.kind || "nothing yet"),
      el("td", {}, each.state ? el("span", { class: each.running ? "state open" : "state" }, each.state) : "–"),
      el("td", { class: "n" }, each.last_at ? `${duration(Math.max(0, now - each.last_at))} ago` : "–"),
      el("td", {}, each.best || "–"))));
    if (!rows.length) body.replaceChildren(el("tr", {}, el("td", { colspan: 5 }, "No output folder yet. Start elastune run or elastune tune.")));
  }
  const stop = follow("/api/folders", (change) => { shown = change.folders; draw(); }, onlost);
  const timer = setInterval(draw, 5000);
  return () => { clearInterval(timer); stop(); };
}
