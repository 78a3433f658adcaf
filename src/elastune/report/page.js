// A page's own script: buttons that copy commands, and marks of figures that lead to rows of tables.
"use strict";

function show(name) {
  const row = name && document.getElementById(name);
  if (!row) return;
  for (let at = row.parentElement; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
  for (const other of document.querySelectorAll(".hit")) other.classList.remove("hit");
  row.classList.add("hit");
  row.scrollIntoView({ block: "center" });
}

function selectAndCopy(code) { // where the page may not use the clipboard, as in a file that some browsers open
  const range = document.createRange();
  range.selectNodeContents(code);
  getSelection().removeAllRanges();
  getSelection().addRange(range);
  return document.execCommand("copy");
}

async function copy(button) {
  const code = button.parentElement.querySelector("code");
  let copied = true;
  try { await navigator.clipboard.writeText(code.textContent); } catch { copied = selectAndCopy(code); }
  button.textContent = copied ? "Copied" : "Selected";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("button.copy");
  if (button) copy(button);
  const link = event.target.closest('a[href^="#"]');
  if (link) show(link.getAttribute("href").slice(1));
});
for (const plot of document.querySelectorAll(".js-plotly-plot")) {
  plot.on("plotly_click", (event) => show(event.points[0].customdata));
}
addEventListener("beforeprint", () => { for (const each of document.querySelectorAll("details")) each.open = true; });
show(location.hash.slice(1));
