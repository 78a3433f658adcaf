// Pictures by Plotly's own script, which is loaded after the first words are on the page.

export const COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]; // Okabe and Ito
export const INK = "#1F2430";
export const QUIET = "#8A8F98";
const LEAST_MS = 900; // between two drawings of a picture
const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif";

let loading = null;
function plotly() {
  loading ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = document.querySelector("link[rel=preload]").href;
    script.onload = () => resolve(window.Plotly);
    script.onerror = () => { loading = null; reject(new Error("no Plotly")); };
    requestAnimationFrame(() => setTimeout(() => document.head.append(script), 0));
  });
  return loading;
}

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
    place.style.minHeight = `${height}px`;
  }

  draw(make) {
    this.make = make;
    if (this.timer) return;
    this.timer = setTimeout(() => this.now(), Math.max(0, this.drawnAt + LEAST_MS - performance.now()));
  }

  async now() {
    let Plotly;
    try { Plotly = await plotly(); } catch { this.timer = 0; return; }
    this.timer = 0;
    this.drawnAt = performance.now();
    if (!this.place.isConnected) return;
    const { traces, layout = {} } = this.make();
    const axis = { gridcolor: "#E3E6EB", linecolor: QUIET, zeroline: false, showline: true, ticks: "outside", automargin: true };
    const first = !this.place.data;
    await Plotly.react(this.place, traces, {
      height: this.options.height,
      margin: { l: 56, r: 12, t: 10, b: 44 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: FONT, size: 12, color: INK },
      showlegend: traces.filter((t) => t.showlegend !== false && t.name).length > 1,
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
      hovermode: "closest",
      hoverlabel: { bgcolor: "white", font: { color: INK } },
      uirevision: "kept", // what was zoomed stays when new points come
      barmode: "overlay",
      ...layout,
      xaxis: { ...axis, title: { text: escaped(this.options.x), standoff: 6 }, ...(layout.xaxis || {}) },
      yaxis: { ...axis, title: { text: escaped(this.options.y), standoff: 6 }, ...(layout.yaxis || {}) },
    }, { displayModeBar: false, responsive: true });
    if (first && this.options.onpick) {
      this.place.on("plotly_click", (event) => this.options.onpick(event.points[0].customdata));
    }
  }
}
