// Draws the charts of the page: a heat map of layers by steps, and curves of chosen layers.
"use strict";
const $ = (id) => document.getElementById(id);
const LEVELS = ["ok", "watch", "bad"];
const COLOURS = {
  light: {
    ink: "#1c1e22", raised: "#ffffff", quiet: "#62666e", line: "#e3e1dc", bad: "#b42a20", watch: "#8f5a00", lost: "#a3139c",
    low: ["#f4f4f0", "#d3deee"], mid: ["#f6dfae", "#eeb45e"], high: ["#dd7a54", "#b42a20", "#5e0f12"],
    scale: ["#f4f4f0", "#cfdbec", "#8dabd8", "#4c76b8", "#274b8c", "#12264f"],
    both: ["#8a4b12", "#d9a66a", "#f4f4f0", "#86a8d8", "#23508f"],
    curves: ["#2b549e", "#c2571a", "#2f7f5b", "#8a3f9c", "#8a6d00", "#b23a61", "#3b8ea5", "#6b6f76"],
  },
  dark: {
    ink: "#e7e6e3", raised: "#1c1f25", quiet: "#9a9da5", line: "#2e323a", bad: "#ff8a7d", watch: "#e9b45a", lost: "#f06be8",
    low: ["#20242b", "#2a3a56"], mid: ["#5b4718", "#a2772a"], high: ["#b3523a", "#e2695c", "#ffd0c8"],
    scale: ["#20242b", "#263a5e", "#33589a", "#5a86cf", "#9dbdf0", "#e4eefd"],
    both: ["#f0b678", "#8a5a24", "#20242b", "#33589a", "#9dbdf0"],
    curves: ["#8fb4f2", "#f0a05c", "#7ecda4", "#cf9be0", "#dcc35c", "#f08fae", "#7cc8dd", "#a9adb5"],
  },
};

async function unpack(id) {
  const bytes = Uint8Array.from(atob($(id).textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

async function loadPlotly() {
  const script = document.createElement("script");
  script.src = URL.createObjectURL(new Blob([await unpack("plotly")], { type: "text/javascript" }));
  await new Promise((done, failed) => {
    script.onload = done;
    script.onerror = () => failed(new Error("the charts' library did not load"));
    document.head.append(script);
  });
}

let data, panel, colours;
const state = { chosen: new Set(), which: 0, cursor: null };

// --- numbers and names
const finite = (v) => typeof v === "number";
const spell = (v) => (finite(v) ? (panel.percent ? `${v.toFixed(2)} %` : String(+v.toPrecision(9))) : v ?? "no record");
const stepOf = (c) => (data.first[c] === data.last[c] ? `step ${data.first[c]}` : `steps ${data.first[c]} to ${data.last[c]}`);
const steps = () => data.first.map((a, i) => (a + data.last[i]) / 2);

// Places the ticks of the axis at the logged steps if these are few and far enough apart. Otherwise
// Plotly chooses them.
function stepTicks() {
  const x = steps();
  const room = (x.at(-1) - x[0]) / 12;
  return x.length <= 12 && x.every((v, i) => !i || v - x[i - 1] >= room) ? { tickvals: x } : {};
}
const rowOf = (run, layer) => panel.rows[run][layer];
const shownLayers = () => data.layers.map((_, i) => i).filter((i) => panel.rows.some((rows) => rows[i]));

function valueAt(layer, column) {
  const [a, b] = panel.rows.map((rows) => rows[layer]?.[column] ?? null);
  if (state.which < 2) return state.which ? b : a;
  return finite(a) && finite(b) ? a - b : finite(a) ? b : a;
}

// --- theme
function theme(name) {
  document.documentElement.dataset.theme = name;
  $("theme").textContent = name === "dark" ? "Light" : "Dark";
  colours = COLOURS[name];
  if (panel) draw();
}

function layout(height, extra) {
  const axis = { gridcolor: colours.line, linecolor: colours.line, zeroline: false, tickcolor: colours.line, automargin: true };
  const { xaxis, yaxis, ...rest } = extra;
  return {
    height, margin: { l: 10, r: 10, t: 30, b: 10 }, paper_bgcolor: "transparent", plot_bgcolor: "transparent",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colours.quiet },
    modebar: { bgcolor: "transparent", color: colours.quiet, activecolor: colours.ink }, // in the margin above the chart
    hoverlabel: { bgcolor: colours.ink, bordercolor: colours.ink, font: { color: COLOURS.light.ink === colours.ink ? "#fff" : "#15171b", size: 12 }, align: "left" },
    xaxis: { ...axis, showgrid: false, title: { text: "step", standoff: 6 }, ...xaxis },
    yaxis: { ...axis, ...yaxis }, ...rest,
  };
}
const CONFIG = { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };

// --- heat map
const even = (list) => list.map((c, i) => [i / (list.length - 1), c]);

// Maps values to colours: two hues around zero for values of both signs and for the difference of
// two runs; else the colours of the verdicts if there are thresholds; else one hue.
function scaleOf(values) {
  let low = Infinity, high = -Infinity, least = Infinity;
  for (const v of values) {
    if (v < low) low = v;
    if (v > high) high = v;
    if (v > 0 && v < least) least = v;
  }
  if (low > high) [low, high] = [0, 1];
  if ((panel.signed && low < 0 && high > 0) || state.which === 2) {
    const most = Math.max(Math.abs(low), Math.abs(high)) || 1;
    return { map: (v) => v, zmin: -most, zmax: most, colorscale: even(colours.both) };
  }
  if (panel.limits.length) {
    const [watch, bad] = panel.limits.map(([, v]) => v);
    const top = Math.max(2 * bad, high);
    const at = [0, watch / top, watch / top, bad / top, bad / top, (1 + bad / top) / 2, 1];
    return { map: (v) => v, zmin: 0, zmax: top, colorscale: [...colours.low, ...colours.mid, ...colours.high].map((c, i) => [at[i], c]) };
  }
  if (low >= 0 && high / least > 50) {
    const [from, to] = [Math.log10(least), Math.log10(high)];
    const every = Math.max(1, Math.ceil((to - from) / 8));
    const ticks = [];
    for (let t = Math.ceil(from); t <= to; t += every) ticks.push(t);
    return { map: (v) => (v > 0 ? Math.log10(v) : from), zmin: from, zmax: to, colorscale: even(colours.scale), tickvals: ticks, ticktext: ticks.map((t) => `10<sup>${t}</sup>`) };
  }
  // The colours span at least a twentieth of the magnitude: nearly equal values look nearly equal.
  const middle = (low + high) / 2;
  const half = Math.max((high - low) / 2, Math.abs(middle) / 40) || 0.5;
  const hues = high <= 0 && low < 0 ? [...colours.scale].reverse() : colours.scale;
  return { map: (v) => v, zmin: middle - half, zmax: middle + half, colorscale: even(hues) };
}

// Chooses labels that do not overlap: layers with a verdict first, then as many others as fit.
function labels(layers, height) {
  const room = Math.max(1, Math.ceil((layers.length * 15) / height));
  const taken = [];
  const place = (y) => taken.every((t) => Math.abs(t - y) >= room) && taken.push(y);
  for (const level of [2, 1, 0]) layers.forEach((l, y) => panel.levels[l] === level && (room === 1 || level || y % room === 0) && place(y));
  const text = taken.map((y) => {
    const level = LEVELS[panel.levels[layers[y]]];
    return level === "ok" ? data.short[layers[y]] : `<span style="color:${colours[level]}">${level === "bad" ? "●" : "▲"} ${data.short[layers[y]]}</span>`;
  });
  return { tickvals: taken, ticktext: text };
}

function drawHeat() {
  const layers = shownLayers();
  const values = layers.map((l) => data.first.map((_, c) => valueAt(l, c)));
  const { map, tickvals, ticktext, ...scale } = scaleOf(values.flat().filter(finite));
  const hover = values.map((row, y) => row.map((v, c) => `<b>${data.layers[layers[y]]}</b><br>${stepOf(c)}: ${spell(v)}`));
  const common = { type: "heatmap", x: steps(), text: hover, hovertemplate: "%{text}<extra></extra>", hoverongaps: false };
  const lost = values.map((row) => row.map((v) => (typeof v === "string" ? 1 : null)));
  const height = Math.min(920, Math.max(250, layers.length * 17 + 82));
  const traces = [
    { ...common, ...scale, z: values.map((row) => row.map((v) => (finite(v) ? map(v) : null))),
      colorbar: { thickness: 9, outlinewidth: 0, len: 1, xpad: 14, tickvals, ticktext, tickcolor: colours.line, ticksuffix: panel.percent ? " %" : "" } },
    { ...common, z: lost, showscale: false, zmin: 0, zmax: 1, colorscale: [[0, colours.lost], [1, colours.lost]] },
  ];
  const any = lost.some((row) => row.some(Boolean));
  const note = any ? [{ text: `<span style="color:${colours.lost}">■</span> NaN or infinite`, xref: "paper", yref: "paper", x: 0, y: 1, xanchor: "left", yanchor: "bottom", showarrow: false, font: { size: 11 } }] : [];
  const yaxis = { ...labels(layers, height - 82), autorange: "reversed", showgrid: false, ticks: "outside", ticklen: 5, tickcolor: "transparent", tickfont: { size: 10.5, family: "ui-monospace, 'DejaVu Sans Mono', monospace" } };
  $("heat").style.height = `${height}px`;
  Plotly.react("heat", traces, layout(height, { xaxis: stepTicks(), yaxis, annotations: note, shapes: cursorShape() }), CONFIG);
}

function cursorShape() {
  if (!state.cursor) return [];
  const { column, y } = state.cursor;
  const x = steps();
  const half = x.length > 1 ? ((x[Math.min(column + 1, x.length - 1)] - x[Math.max(column - 1, 0)]) / (column && column < x.length - 1 ? 4 : 2)) : 0.5;
  return [{ type: "rect", x0: x[column] - half, x1: x[column] + half, y0: y - 0.5, y1: y + 0.5, line: { color: colours.ink, width: 2 } }];
}

function moveCursor(event) {
  const layers = shownLayers();
  const columns = data.first.length;
  const at = state.cursor ?? { column: columns - 1, y: 0 };
  const by = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], PageUp: [0, -10], PageDown: [0, 10], Home: [-columns, 0], End: [columns, 0] }[event.key];
  if (event.key === "Enter" && state.cursor) choose(layers[at.y], !state.chosen.has(layers[at.y]));
  else if (by && !event.altKey && !event.ctrlKey && !event.metaKey) {
    const clamp = (v, most) => Math.min(most, Math.max(0, v));
    state.cursor = { column: clamp(at.column + (state.cursor ? by[0] : 0), columns - 1), y: clamp(at.y + (state.cursor ? by[1] : 0), layers.length - 1) };
    Plotly.relayout("heat", { shapes: cursorShape() });
    const layer = layers[state.cursor.y];
    $("readout").textContent = `${data.short[layer]}, ${stepOf(state.cursor.column)}: ${spell(valueAt(layer, state.cursor.column))}`;
  } else return;
  event.preventDefault();
}

// --- curves
function drawCurves() {
  const chosen = [...state.chosen].filter((l) => panel.rows.some((rows) => rows[l]));
  const traces = [];
  chosen.forEach((layer, i) => data.runs.forEach((name, run) => {
    const row = rowOf(run, layer);
    if (!row) return;
    const few = row.filter(finite).length < 60;
    traces.push({
      type: "scatter", mode: few ? "lines+markers" : "lines", x: steps(), y: row.map((v) => (finite(v) ? v : null)), connectgaps: row.every((v) => typeof v !== "string"),
      text: row.map((v, c) => `${data.short[layer]}${data.runs.length > 1 ? ` (${name})` : ""}<br>${stepOf(c)}: ${spell(v)}`), hovertemplate: "%{text}<extra></extra>",
      name: data.short[layer], showlegend: !run, legendgroup: layer,
      line: { color: colours.curves[i % colours.curves.length], width: run ? 1.3 : 1.8, dash: run ? "dot" : "solid" }, marker: { size: 4 },
    });
  }));
  const values = traces.flatMap((t) => t.y.filter((v) => v !== null));
  const log = !panel.signed && !panel.percent && values.length && values.every((v) => v > 0) && Math.max(...values) / Math.min(...values) > 50;
  const top = Math.max(0, ...values);
  const limits = panel.limits.filter(([, v]) => v <= 1.6 * top);
  const shapes = limits.map(([level, v]) => ({ type: "line", xref: "paper", x0: 0, x1: 1, y0: v, y1: v, line: { color: colours[level], width: 1, dash: "dash" } }));
  // The names of the thresholds are at the end of the chart where fewer curves exceed a threshold.
  const over = (v) => limits.some(([, limit]) => v > limit);
  const passing = (ys) => traces.filter(({ y }) => over(ys(y.filter((v) => v !== null)))).length;
  const side = passing((y) => y[0]) > passing((y) => y.at(-1)) ? { x: 1, xanchor: "right" } : { x: 0, xanchor: "left" };
  const annotations = limits.map(([level, v]) => ({ text: `${level} above ${v} %`, xref: "paper", y: v, ...side, yanchor: "bottom", showarrow: false, bgcolor: colours.raised, font: { color: colours[level], size: 11 } }));
  const lost = chosen.flatMap((l) => panel.rows.map((rows) => (rows[l] ?? []).findIndex((v) => typeof v === "string"))).filter((c) => c >= 0);
  if (lost.length) {
    const x = steps()[Math.min(...lost)];
    shapes.push({ type: "line", yref: "paper", y0: 0, y1: 1, x0: x, x1: x, line: { color: colours.lost, width: 1, dash: "dash" } });
    annotations.push({ text: "NaN or infinite", yref: "paper", y: 1, x, xanchor: "right", yanchor: "top", xshift: -4, showarrow: false, font: { color: colours.lost, size: 11 } });
  }
  if (!traces.length) annotations.push({ text: "Choose layers to see their curves", xref: "paper", yref: "paper", x: 0.5, y: 0.5, showarrow: false, font: { size: 13 } });
  const yaxis = { type: log ? "log" : "linear", ticksuffix: panel.percent ? " %" : "", exponentformat: "power", rangemode: panel.percent ? "tozero" : "normal", ...(log ? { dtick: 1 } : {}) };
  const margin = Math.max(1, data.last.at(-1) - data.first[0]) / 100;
  const xaxis = { range: [data.first[0] - margin, data.last.at(-1) + margin], ...stepTicks() };
  Plotly.react("lines", traces, layout(430, { xaxis, yaxis, shapes, annotations, showlegend: traces.length > 0, legend: { orientation: "h", y: -0.16, font: { size: 11 } } }), CONFIG);
  $("curves-of").textContent = `of ${panel.tensor}, ${panel.statistic}${data.runs.length > 1 ? "; dotted: the other run" : ""}`;
}

function choose(layer, on) {
  state.chosen[on ? "add" : "delete"](layer);
  const box = $("chooser").querySelector(`input[value="${layer}"]`);
  if (box) box.checked = on;
  drawCurves();
}

function drawChooser() {
  const layers = shownLayers();
  const chosenFirst = [...layers.filter((l) => state.chosen.has(l)), ...layers.filter((l) => !state.chosen.has(l))];
  const items = chosenFirst.map((layer) => {
    const label = document.createElement("label");
    const box = Object.assign(document.createElement("input"), { type: "checkbox", value: layer, checked: state.chosen.has(layer) });
    box.addEventListener("change", () => choose(layer, box.checked));
    const name = document.createElement("span");
    data.short[layer].split(/(?<=[._])/).forEach((part) => name.append(part, document.createElement("wbr")));
    label.append(box, name);
    if (panel.levels[layer]) label.append(Object.assign(document.createElement("span"), { className: `verdict ${LEVELS[panel.levels[layer]]}`, textContent: LEVELS[panel.levels[layer]] }));
    label.title = data.layers[layer];
    return label;
  });
  $("chooser").replaceChildren(...items);
  filterChooser();
}

function filterChooser() {
  const wanted = $("filter").value.toLowerCase();
  for (const label of $("chooser").children) label.hidden = !label.title.toLowerCase().includes(wanted);
}

// Up to five layers to show first: those with a verdict, in the order of the table, or else those
// with the largest values.
function worstLayers() {
  const shown = shownLayers();
  const flagged = panel.worst.filter((l) => shown.includes(l));
  const peak = (l) => (rowOf(0, l) ?? []).reduce((most, v) => (finite(v) ? Math.max(most, Math.abs(v)) : most), 0);
  const ranked = flagged.length ? flagged : shown.sort((a, b) => peak(b) - peak(a));
  return ranked.slice(0, 5).sort((a, b) => a - b);
}

// --- the panel: a tensor and a statistic
function draw() {
  drawHeat();
  drawCurves();
}

function options(select, values, chosen) {
  select.replaceChildren(...values.map((v) => new Option(v, v, v === chosen, v === chosen)));
}

function open(wanted, keep) {
  panel = wanted;
  state.cursor = null;
  $("readout").textContent = "";
  options($("tensor"), [...new Set(data.panels.map((p) => p.tensor))], panel.tensor);
  options($("statistic"), data.panels.filter((p) => p.tensor === panel.tensor).map((p) => p.statistic), panel.statistic);
  if (!keep) state.chosen = new Set(worstLayers());
  drawChooser();
  draw();
}

const find = (tensor, statistic) => data.panels.find((p) => p.tensor === tensor && p.statistic === statistic) ?? data.panels.find((p) => p.tensor === tensor);

async function copy(button) {
  const text = button.parentElement.querySelector("pre").textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    getSelection().selectAllChildren(button.parentElement.querySelector("pre"));
    document.execCommand("copy");
  }
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

function listen() {
  $("tensor").addEventListener("change", (e) => open(find(e.target.value, panel.statistic)));
  $("statistic").addEventListener("change", (e) => open(find(panel.tensor, e.target.value)));
  $("which")?.addEventListener("change", (e) => { state.which = Number(e.target.value); drawHeat(); });
  $("filter").addEventListener("input", filterChooser);
  $("worst").addEventListener("click", () => open(panel));
  $("none").addEventListener("click", () => { state.chosen.clear(); open(panel, true); });
  $("heat").addEventListener("keydown", moveCursor);
  $("heat").on("plotly_click", ({ points }) => choose(shownLayers()[points[0].pointIndex[0]], true));
  for (const button of document.querySelectorAll("button.link")) {
    button.addEventListener("click", () => {
      state.chosen = new Set([data.layers.indexOf(button.textContent)]);
      open(find(button.dataset.tensor, button.dataset.statistic), true);
      $("curves").scrollIntoView({ behavior: "smooth" });
    });
  }
}

async function start() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  theme(dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => theme(dark.matches ? "dark" : "light"));
  $("theme").addEventListener("click", () => theme($("theme").textContent.toLowerCase()));
  for (const button of document.querySelectorAll(".copy")) button.addEventListener("click", () => copy(button));
  data = JSON.parse(await unpack("data"));
  await loadPlotly();
  open(data.panels[data.open]);
  listen();
  document.documentElement.dataset.ready = "yes";
}

start().catch((error) => {
  document.body.append(Object.assign(document.createElement("p"), { className: "notice", textContent: `The charts could not be drawn: ${error.message}` }));
});
