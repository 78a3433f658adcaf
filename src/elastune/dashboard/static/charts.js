// Pictures by Plotly's own script, which is loaded after the first words are on the page.

export const COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]; // Okabe and Ito
export const INK = "#1F2430";
export const QUIET = "#8A8F98";
const LEAST_MS = 900; // between two drawings of a picture
const RESTS = 8; // times as long as it took to draw: a picture of ten thousand points must not keep the page busy
const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif";

// Pictures wait in one line, so that the first is on the screen before the next is made. Before it stands Plotly's own
// script: the browser has compiled it meanwhile (modulepreload), and runs it when the words are on the page.
const breath = () => new Promise((resolve) => { requestAnimationFrame(() => setTimeout(resolve, 0)); });
let line = null;
function inTurn(draw) {
  line ??= breath().then(() => import(document.getElementById("plotly").href));
  line = line.then(draw).then(breath);
  return line;
}

// A picture far below the screen is not drawn before somebody comes near.
const places = new WeakMap();
const near = new IntersectionObserver((seen) => {
  for (const each of seen) {
    const chart = places.get(each.target);
    chart.isNear = each.isIntersecting;
    if (chart.isNear && chart.isDue) chart.soon();
  }
}, { rootMargin: "300px" });

export function escaped(text) { // Plotly reads a few tags in its texts
  return String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

/** A picture in `place`: `draw(make)` draws what `make()` returns, soon and not too often. */
export class Chart {
  constructor(place, { height = 300, x = "", y = "", bars = false, onpick = null } = {}) {
    this.place = place;
    this.options = { height, x, y, bars, onpick };
    this.make = null;
    this.timer = 0;
    this.drawnAt = -LEAST_MS;
    this.restMs = LEAST_MS;
    this.isNear = false;
    this.isDue = false;
    place.style.minHeight = `${height}px`;
    places.set(place, this);
    near.observe(place);
  }

  draw(make) {
    this.make = make;
    this.isDue = true;
    if (this.isNear) this.soon();
  }

  soon() {
    if (this.timer) return;
    this.timer = setTimeout(() => inTurn(() => this.now()).catch(() => {}).then(() => { this.timer = 0; if (this.isDue && this.isNear) this.soon(); }), Math.max(0, this.drawnAt + this.restMs - performance.now()));
  }

  async now() {
    this.isDue = false;
    if (!this.place.isConnected) return;
    const { Plotly } = window;
    const { traces, layout = {} } = this.make();
    const begun = performance.now();
    const named = traces.filter((trace) => trace.showlegend !== false && trace.name);
    const axis = { gridcolor: "#E3E6EB", linecolor: QUIET, zeroline: false, showline: true, ticks: "outside", automargin: false };
    const first = !this.place.data;
    await Plotly.react(this.place, traces, {
      height: this.options.height,
      margin: { l: 72, r: 14, t: named.length > 1 ? 34 : 12, b: 44, autoexpand: named.length > 4 }, // to find margins costs a third of the time
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: FONT, size: 12, color: INK },
      showlegend: named.length > 1,
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
      hovermode: "closest",
      hoverlabel: { bgcolor: "white", font: { color: INK } },
      uirevision: "kept", // what was zoomed stays when new points come
      barmode: "overlay",
      ...layout,
      xaxis: { ...axis, title: { text: escaped(this.options.x), standoff: 6 }, ...(layout.xaxis || {}) },
      yaxis: { ...axis, title: { text: escaped(this.options.y), standoff: 6 }, ...(layout.yaxis || {}) },
    }, { displayModeBar: false, responsive: true });
    this.drawnAt = performance.now();
    this.restMs = Math.max(LEAST_MS, RESTS * (this.drawnAt - begun));
    if (first && this.options.onpick) {
      this.place.on("plotly_click", (event) => this.options.onpick(event.points[0].customdata));
    }
  }
}
