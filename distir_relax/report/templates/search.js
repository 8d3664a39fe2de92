const KINDS = ["mostly data", "mostly tensor", "mostly pipeline"], COLOURS = ["--compute", "--c1", "--communication"];
const LEFT = 66, HEIGHT = 330, BOTTOM = 40, TOP = 14, RIGHT = 12;
const points = data.points;
let chosen = -1;

document.querySelectorAll(".kinds").forEach((list) => KINDS.forEach((name, i) => {
  const item = html("li", "", list);
  html("i", "swatch", item).style.background = `var(${COLOURS[i]})`;
  item.append(name);
}));

function rate(value) {
  return `${Number(value.toPrecision(4)).toLocaleString("en")}/s`;
}

function summary(point) {
  const fits = point.fits ? "" : "\ndoes not fit";
  return `${point.strategy}, ${point.samples.toLocaleString("en")} samples\n${rate(point.throughput)}, ${seconds(point.seconds)} a step\n` +
    `${size(point.memory)}, bubble ${percent(point.bubble)}, communication ${percent(point.communication)}${fits}`;
}

// Powers of ten, with twos and fives in between where there is room.
function logTicks(low, high) {
  const found = [], wide = Math.log10(high / low);
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const n of wide < 2.5 ? [1, 2, 5] : wide < 5 ? [1] : power % 2 ? [] : [1]) {
      const at = n * 10 ** power;
      if (at >= low && at <= high) found.push(at);
    }
  }
  return found;
}

// `places` are the values along the axis, where there are few; they have the labels then.
function chart(id, shown, xOf, yOf, xText, yText, names, extras, places = []) {
  const svg = document.getElementById(id);
  if (!shown.length) { svg.replaceWith(html("p", "note", svg.parentNode, "No configuration fits into memory.")); return () => {}; }
  const xs = shown.map((i) => xOf(points[i])), ys = shown.map((i) => yOf(points[i]));
  const x0 = Math.min(...xs) / 1.25, x1 = Math.max(...xs) * 1.25, y0 = Math.min(...ys) / 1.25, y1 = Math.max(...ys) * 1.25;
  const draw = redrawn(svg, () => {
    const width = svg.clientWidth || 320;
    const x = (v) => LEFT + Math.log(v / x0) / Math.log(x1 / x0) * (width - LEFT - RIGHT);
    const y = (v) => TOP + (1 - Math.log(v / y0) / Math.log(y1 / y0)) * (HEIGHT - TOP - BOTTOM);
    svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    svg.setAttribute("height", HEIGHT);
    svg.replaceChildren();
    for (const at of logTicks(y0, y1)) {
      element("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: y(at), y2: y(at) }, svg);
      element("text", { x: LEFT - 6, y: y(at) + 4, "text-anchor": "end" }, svg, yText(at));
    }
    const labelled = places.length && places.length <= (width - LEFT - RIGHT) / 44 ? places : logTicks(x0, x1);
    for (const at of labelled) {
      element("line", { class: "axis", x1: x(at), x2: x(at), y1: TOP, y2: HEIGHT - BOTTOM }, svg);
      element("text", { x: x(at), y: HEIGHT - BOTTOM + 16, "text-anchor": "middle" }, svg, xText(at));
    }
    element("text", { class: "strong", x: width - RIGHT, y: HEIGHT - 4, "text-anchor": "end" }, svg, names[0]);
    element("text", { class: "strong", x: LEFT + 4, y: TOP + 10 }, svg, names[1]);
    extras(svg, x, y, width, x0, x1);
    // Draw points with a timeline last, above the others.
    const order = [...shown].sort((a, b) => (points[a].lanes ? 1 : 0) - (points[b].lanes ? 1 : 0));
    for (const i of order) {
      const point = points[i], colour = `var(${COLOURS[point.kind]})`;
      const dot = element("circle", {
        cx: x(xOf(point)), cy: y(yOf(point)), r: i === chosen ? 7 : point.lanes ? 3.6 : 2.6, "data-point": i,
        fill: point.fits ? colour : "transparent", stroke: i === chosen ? "var(--mark)" : colour,
        "stroke-width": i === chosen ? 2 : 1, style: "cursor: pointer",
      }, svg);
      dot.addEventListener("pointermove", (event) => showTip(summary(point), event));
      dot.addEventListener("pointerleave", hideTip);
      dot.addEventListener("click", () => choose(i));
    }
  });
  return draw;
}

function limit(svg, x, y, width, x0, x1) {
  if (data.memory <= x0 || data.memory >= x1) return;
  element("line", { class: "limit", x1: x(data.memory), x2: x(data.memory), y1: TOP, y2: HEIGHT - BOTTOM }, svg);
  element("text", { x: x(data.memory) - 5, y: HEIGHT - BOTTOM - 6, "text-anchor": "end" }, svg, `a device's ${size(data.memory)}`);
}

const fitting = points.map((_, i) => i).filter((i) => points[i].fits);
const [byField, byName] = data.by;
const values = [...new Set(fitting.map((i) => points[i][byField]))].sort((a, b) => a - b);
const best = values.map((value) => fitting.filter((i) => points[i][byField] === value)
  .reduce((a, b) => (points[b].throughput > points[a].throughput ? b : a)));

// One value would make a column of all.
if (fitting.length && values.length < 2) document.getElementById("throughput-by").closest("section").hidden = true;

function bestLine(svg, x, y) {
  const path = best.map((i) => `${x(points[i][byField]).toFixed(1)},${y(points[i].throughput).toFixed(1)}`).join(" ");
  element("polyline", { points: path, fill: "none", stroke: "var(--soft)", "stroke-width": 1.5 }, svg);
}

const short = (value) => Number(value.toPrecision(2)).toLocaleString("en", { notation: "compact" });
const draws = [
  chart("memory-throughput", points.map((_, i) => i), (p) => p.memory, (p) => p.throughput, size, (v) => `${short(v)}/s`, ["memory of a device", "throughput"], limit),
  chart("throughput-by", fitting, (p) => p[byField], (p) => p.throughput, short, (v) => `${short(v)}/s`, [byName, "throughput"], bestLine, values),
];

function choose(i) {
  chosen = i;
  const point = points[i];
  document.getElementById("chosen").hidden = false;
  document.getElementById("chosen-name").textContent = `${point.strategy}, ${point.samples.toLocaleString("en")} samples`;
  document.getElementById("chosen-note").textContent = summary(point).split("\n").slice(1).join(", ") +
    (point.lanes ? "" : ". Its timeline is not on this page, which has only those of the best.");
  document.getElementById("chosen-command").textContent =
    `distir simulate ${data.model} --strategy ${point.strategy} --global-batch ${point.samples} --profile ${data.profile} --html report.html`;
  drawLanes();
  draws.forEach((draw) => draw());
  document.getElementById("chosen").scrollIntoView({ block: "nearest" });
}

const lanesBox = document.getElementById("lanes");
function drawLanes() {
  lanesBox.replaceChildren();
  if (chosen < 0 || !points[chosen].lanes) return;
  const lanes = points[chosen].lanes.map(([name, text]) => ({
    name, runs: [...text.matchAll(/([cmi])(\d+)/g)].map(([, kind, count]) => ["cmi".indexOf(kind), Number(count)]),
  }));
  const total = lanes[0].runs.reduce((sum, [, count]) => sum + count, 0), high = 18, gap = 4, width = lanesBox.clientWidth || 320;
  const left = width < 640 ? 0 : Math.min(190, 20 + 6.4 * Math.max(...lanes.map((lane) => lane.name.length)));
  const step = high + gap + (left ? 0 : 15);
  const svg = element("svg", { viewBox: `0 0 ${width} ${lanes.length * step + 18}`, height: lanes.length * step + 18, role: "img", "aria-label": "Time line" }, lanesBox);
  lanes.forEach((lane, row) => {
    const top = row * step + (left ? 0 : 15);
    element("text", { x: 0, y: left ? top + 13 : top - 4 }, svg, lane.name);
    let at = 0;
    for (const [kind, count] of lane.runs) {
      const x = left + at / total * (width - left), wide = count / total * (width - left);
      element("rect", { x, y: top, width: Math.max(wide, 0.5), height: high, fill: `var(${["--compute", "--communication", "--idle"][kind]})` }, svg);
      at += count;
    }
  });
  element("text", { x: left, y: lanes.length * step + 13 }, svg, "0");
  element("text", { x: width, y: lanes.length * step + 13, "text-anchor": "end" }, svg, seconds(points[chosen].seconds));
}
redrawn(lanesBox, drawLanes);

document.querySelectorAll(".pick").forEach((button) => button.addEventListener("click", () => choose(Number(button.dataset.point))));
const first = document.querySelector(".pick");
if (first) choose(Number(first.dataset.point));
window.scrollTo(0, 0);
