const memory = data.memory;
const memoryBox = document.getElementById("memory");
const LEFT = 62, HEIGHT = 210, BOTTOM = 24, TOP = 16;

memory.categories.forEach((name, i) => {
  const item = html("li", "", document.getElementById("memory-legend"));
  html("i", "swatch", item).style.background = `var(--c${i})`;
  item.append(name);
});

// All charts have one scale, so that their heights compare; a device's limit is drawn where that leaves room.
const highest = Math.max(1, ...memory.charts.map((chart) => chart.peak[1]));
const limits = memory.charts.map((chart) => chart.room).filter((room) => room <= 2 * highest);
const memoryTop = limits.length ? Math.max(highest, ...limits) * 1.05 : highest * 1.1;
const memorySpan = data.makespan || 1;

// What is live besides weights: where it is a small part of all, it has charts of its own, in one scale too.
const SMALL = 0.25, REST = 120;
const restOf = (parts) => parts.slice(1).reduce((a, b) => a + b, 0);
const restTop = Math.max(0, ...memory.charts.flatMap((chart) => chart.points.map(([, ...parts]) => restOf(parts))));
const restShown = restTop > 0 && restTop < SMALL * memoryTop;

const figures = memory.charts.flatMap((chart) => {
  const figure = html("figure", "", memoryBox);
  const caption = html("figcaption", "", figure, chart.name);
  html("br", "", caption);
  html("span", "", caption, chart.text);
  const whole = { chart, first: 0, height: HEIGHT, top: memoryTop };
  whole.svg = element("svg", { role: "img", "aria-label": `${chart.name}: ${chart.text}` }, figure);
  if (!restShown) return [whole];
  const most = size(Math.max(0, ...chart.points.map(([, ...parts]) => restOf(parts))));
  html("p", "rest", figure, `besides weights, in a scale of its own: at most ${most}`);
  const rest = { chart, first: 1, height: REST, top: restTop * 1.1 };
  rest.svg = element("svg", { class: "rest", role: "img", "aria-label": `${chart.name}, besides weights: at most ${most}` }, figure);
  return [whole, rest];
});

const drawMemory = redrawn(memoryBox, () => figures.forEach(drawChart));

function drawChart({ chart, svg, first, height, top }) {
  const width = svg.clientWidth || 300, room = width - LEFT - 10;
  const x = (time) => LEFT + Math.min(time / memorySpan, 1) * room;
  const y = (bytes) => TOP + (1 - bytes / top) * (height - TOP - BOTTOM);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("height", height);
  svg.replaceChildren();
  for (const bytes of ticks(0, top, first ? 2 : 4)) {
    element("line", { class: "axis", x1: LEFT, x2: width - 10, y1: y(bytes), y2: y(bytes) }, svg);
    element("text", { x: LEFT - 6, y: y(bytes) + 4, "text-anchor": "end" }, svg, bytes ? size(bytes) : "0");
  }
  for (const time of ticks(0, memorySpan, room / 110)) {
    const anchor = x(time) > width - 40 ? "end" : time ? "middle" : "start";
    element("text", { x: x(time), y: height - 6, "text-anchor": anchor }, svg, time ? seconds(time) : "0");
  }
  drawAreas(chart, svg, x, y, first);
  if (first) return;
  const limitShown = limits.includes(chart.room);
  if (limitShown) {
    element("line", { class: "limit", x1: LEFT, x2: width - 10, y1: y(chart.room), y2: y(chart.room) }, svg);
    element("text", { x: LEFT + 4, y: y(chart.room) - 4 }, svg, `the device's ${size(chart.room)}`);
  }
  const [time, bytes] = chart.peak;
  element("circle", { class: "peak", cx: x(time), cy: y(bytes), r: 4 }, svg);
  const side = x(time) > width / 2 ? [-9, "end"] : [9, "start"];
  element("text", { class: "strong", x: x(time) + side[0], y: y(bytes) + (limitShown ? 16 : -2), "text-anchor": side[1] }, svg, size(bytes));
}

// A value holds from its time to the next one's: the areas are stairs, stacked in the order of the categories.
function drawAreas(chart, svg, x, y, first) {
  const points = chart.points, ends = points.map((_, i) => (i + 1 < points.length ? points[i + 1][0] : memorySpan));
  const below = points.map(() => 0);
  memory.categories.forEach((_, k) => {
    if (k < first) return;
    const upper = points.map((point, i) => below[i] + point[k + 1]);
    if (points.length && points.some((point) => point[k + 1])) {
      const up = points.map((point, i) => `${x(point[0]).toFixed(1)},${y(upper[i]).toFixed(1)} ${x(ends[i]).toFixed(1)},${y(upper[i]).toFixed(1)}`);
      const down = points.map((point, i) => `${x(ends[i]).toFixed(1)},${y(below[i]).toFixed(1)} ${x(point[0]).toFixed(1)},${y(below[i]).toFixed(1)}`);
      element("polygon", { points: [...up, ...down.reverse()].join(" "), fill: `var(--c${k})` }, svg);
    }
    upper.forEach((value, i) => { below[i] = value; });
  });
}

for (const { chart, svg } of figures) {
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const time = (event.clientX - box.left - LEFT) / (box.width - LEFT - 10) * memorySpan;
    const i = bisect(chart.points.length, (k) => chart.points[k][0] <= time) - 1;
    if (i < 0 || time > memorySpan) { hideTip(); return; }
    const [at, ...parts] = chart.points[i];
    const rows = memory.categories.map((name, k) => `${name} ${size(parts[k])}`).reverse();
    const all = parts.reduce((a, b) => a + b, 0);
    showTip([`${chart.name}, from ${at ? seconds(at) : "the start"}`, `${size(all)} live`, ...rows].join("\n"), event);
  });
  svg.addEventListener("pointerleave", hideTip);
}
drawMemory();
