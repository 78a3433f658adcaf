// The page: which view the address names, and whether the server is there.
import { el, follow, me, say } from "./dom.js";
import { folders } from "./folders.js";
import { runPage } from "./run.js";
import { studyPage } from "./study.js";

const page = document.getElementById("page");
const lost = document.getElementById("lost");
const where = document.getElementById("where");
let leave = () => {};

function onlost(is) { lost.hidden = !is; }

function folder(name) {
  let view = null;
  page.replaceChildren(el("p", { class: "note" }, "Reading the journal…"));
  document.title = name;
  const stop = follow(`/api/events?folder=${encodeURIComponent(name)}`, async (change) => {
    if (!change.kind) return;
    const kind = change.kind === "run" ? "run" : "study";
    if (!view || view.kind !== kind) {
      const { read_only: readOnly } = await me;
      if (!view || view.kind !== kind) view = kind === "run" ? runPage(page, name, readOnly) : studyPage(page, name, readOnly);
    }
    view.change(change);
  }, onlost);
  return () => { stop(); if (view) view.leave(); };
}

function route() {
  leave();
  const named = location.hash.match(/^#\/f\/(.+)$/);
  let name = "";
  try { name = named ? decodeURIComponent(named[1]) : ""; } catch { name = ""; }
  say(where, name ? `/ ${name}` : "");
  leave = name ? folder(name) : folders(page, onlost);
}

addEventListener("hashchange", route);
route();
