// Small helpers: elements from texts (never from HTML), numbers and times in words, and calls of the server.

/** An element with properties and children; strings become text nodes, so no text of a journal becomes HTML. */
export function el(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key === "class") made.className = value;
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

export function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size >= 1e5 || (size > 0 && size < 1e-3) ? value.toExponential(3) : String(Number(value.toPrecision(4)));
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 3600) return `${(seconds / 60).toFixed(1)} min`;
  if (seconds < 48 * 3600) return `${(seconds / 3600).toFixed(1)} h`;
  return `${(seconds / 86400).toFixed(1)} days`;
}

/** Sets the text of an element only if it differs, so that a selection in it stays. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

let token = null;
export const me = fetch("/api/me").then((answer) => answer.json()).then((found) => { token = found.token; return found; });

/** Asks the server to do something; resolves to what it says, in words. */
export async function act(folder, name, fields = {}) {
  await me;
  let answer;
  try {
    answer = await fetch("/api/act", {
      method: "POST",
      headers: { "Content-Type": "application/json", "X-Elastune-Token": token },
      body: JSON.stringify({ folder, act: name, ...fields }),
    });
  } catch {
    return { refused: "the server is lost: ask again when it is back" };
  }
  try { return await answer.json(); } catch { return { refused: `the server answered ${answer.status}` }; }
}

/** A button that asks for something, and says beside it what came of it. */
export function actButton(label, ask, output, { danger = false, title = "" } = {}) {
  const button = el("button", { class: danger ? "act danger" : "act", type: "button", title }, label);
  button.addEventListener("click", async () => {
    button.disabled = true;
    say(output, `${label} is asked for…`);
    const answer = await ask();
    output.classList.toggle("refused", Boolean(answer.refused));
    const taken = answer.seen === false ? "asked; it waits until the study looks" : "acknowledged; done at the next boundary";
    say(output, answer.refused ? answer.refused : `${label}: ${answer.detail || taken}`);
    button.disabled = false;
  });
  return button;
}

/** Follows server-sent events. It begins again when the server was lost; `onlost` hears of both. */
export function follow(url, onchange, onlost) {
  let source = null;
  let ended = false;
  let timer = 0;
  function open() {
    source = new EventSource(url);
    source.onopen = () => onlost(false);
    source.onmessage = (event) => onchange(JSON.parse(event.data));
    source.onerror = () => {
      onlost(true);
      source.close();
      if (!ended) timer = setTimeout(open, 1000);
    };
  }
  open();
  return () => { ended = true; clearTimeout(timer); source.close(); };
}
