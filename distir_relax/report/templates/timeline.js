const canvas = document.getElementById("timeline");
const line = data.timeline;
const AXIS = 24, BAR = 20, GAP = 8, COMPUTE = 0, JOINED = 2;
const view = { from: 0, to: line.span };

// Starts are written as distances from the end before, because those are short.
const lanes = line.lanes.map((lane) => {
  const count = lane.gap.length;
  const start = new Float64Array(count), end = new Float64Array(count), extra = new Int32Array(count);
  let at = 0, joined = 0;
  for (let i = 0; i < count; i++) {
    start[i] = at += lane.gap[i];
    end[i] = at += lane.length[i];
    if (lane.kind[i] === JOINED) extra[i] = joined++;
  }
  const critical = new Set(lane.critical);
  return { ...lane, count, start, end, extra, critical };
});
let hovered = null;

function narrow() { return canvas.clientWidth < 640; }
const labels = Math.round(Math.min(210, 30 + 6.4 * Math.max(0, ...lanes.map((lane) => lane.name.length))));
function gutter() { return narrow() ? 0 : labels; }
function laneHeight() { return BAR + GAP + (narrow() ? 16 : 0); }
function laneTop(i) { return AXIS + i * laneHeight() + (narrow() ? 16 : 0); }
function scale() { return (canvas.clientWidth - gutter()) / (view.to - view.from); }
function xOf(time) { return gutter() + (time - view.from) * scale(); }
function timeAt(x) { return view.from + (x - gutter()) / scale(); }

function hatch(context) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const pen = tile.getContext("2d");
  pen.fillStyle = colour("--communication");
  pen.fillRect(0, 0, 6, 6);
  pen.strokeStyle = colour("--hatch");
  pen.beginPath();
  pen.moveTo(-1, 7); pen.lineTo(7, -1); pen.moveTo(-1, 1); pen.lineTo(1, -1); pen.moveTo(5, 7); pen.lineTo(7, 5);
  pen.stroke();
  return context.createPattern(tile, "repeat");
}

const drawTimeline = redrawn(canvas, () => {
  const width = canvas.clientWidth, height = AXIS + lanes.length * laneHeight() + 4;
  const ratio = window.devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.font = "12px system-ui, sans-serif";
  pen.textBaseline = "middle";
  drawAxis(pen, width, height);
  const paint = {
    compute: colour("--compute"), communication: hatch(pen), thin: colour("--communication"),
    onCompute: colour("--on-compute"), onCommunication: colour("--on-communication"), edge: colour("--edge"),
  };
  lanes.forEach((lane, i) => drawLane(pen, lane, laneTop(i), width, paint));
});

function drawAxis(pen, width, height) {
  const unit = line.unit;
  pen.textAlign = "center";
  for (const at of ticks(view.from * unit, view.to * unit, (width - gutter()) / 110)) {
    const x = xOf(at / unit);
    pen.fillStyle = colour("--line");
    pen.fillRect(x, AXIS - 6, 1, height - AXIS);
    pen.fillStyle = colour("--soft");
    const text = at === 0 ? "0" : seconds(at);
    const half = pen.measureText(text).width / 2;
    pen.fillText(text, Math.min(Math.max(x, gutter() + half), width - half), 8);
  }
}

function drawLane(pen, lane, top, width, paint) {
  const left = gutter();
  pen.fillStyle = colour("--text");
  pen.textAlign = "left";
  if (narrow()) pen.fillText(lane.name, 0, top - 8);
  else pen.fillText(lane.name, 0, top + BAR / 2, left - 8);
  pen.save();
  pen.beginPath();
  pen.rect(left, top, width - left, BAR);
  pen.clip();
  pen.fillStyle = colour("--idle");
  pen.fillRect(left, top, width - left, BAR);
  const columns = new Columns(width - left), wide = [];
  for (let i = bisect(lane.count, (k) => lane.end[k] <= view.from); i < lane.count && lane.start[i] < view.to; i++) {
    const from = xOf(lane.start[i]) - left, to = xOf(lane.end[i]) - left, length = Math.max(lane.length[i], 1);
    const computes = lane.kind[i] === COMPUTE;
    if (lane.kind[i] === JOINED) {
      const [, compute, communicate] = lane.joined[lane.extra[i]];
      columns.cover(from, to, compute / length, communicate / length, true);
    } else {
      if (to - from >= 2) wide.push([i, from, to]);
      columns.cover(from, to, computes ? 1 : 0, computes ? 0 : 1, to - from < 2);
    }
  }
  columns.draw(pen, left, top, paint);
  for (const [i, from, to] of wide) {
    const begin = columns.isShared(from) ? Math.floor(from) + 1 : Math.round(from);
    const end = columns.isShared(to) ? Math.floor(to) : Math.round(to);
    drawOp(pen, lane, i, left + begin, end - begin, top, paint);
  }
  pen.restore();
  drawCritical(pen, lane, left, top + BAR + 2, width);
  pen.save();
  pen.beginPath();
  pen.rect(left, top, width - left, BAR);
  pen.clip();
  if (hovered && hovered.lane === lane) {
    pen.strokeStyle = colour("--mark");
    pen.lineWidth = 2;
    const x = xOf(lane.start[hovered.i]);
    pen.strokeRect(x, top + 1, Math.max(xOf(lane.end[hovered.i]) - x, 2), BAR - 2);
  }
  pen.restore();
}

// A line below the bars on the critical path; neighbours share one.
function drawCritical(pen, lane, left, top, width) {
  pen.fillStyle = colour("--critical");
  let from = -1, to = -1;
  const draw = () => { if (to > from) pen.fillRect(Math.max(from, left), top, Math.min(to, width) - Math.max(from, left), 3); };
  for (const i of lane.critical) {
    if (lane.end[i] <= view.from || lane.start[i] >= view.to) continue;
    const begin = Math.floor(xOf(lane.start[i])), end = Math.ceil(Math.max(xOf(lane.end[i]), begin + 1));
    if (begin > to) { draw(); from = begin; }
    to = end;
  }
  draw();
}

// What is done within each pixel of a lane, as shares of it; `shared` are those that have bars narrower than two.
class Columns {
  constructor(width) {
    this.compute = new Float64Array(Math.max(Math.ceil(width), 0));
    this.communicate = new Float64Array(this.compute.length);
    this.shared = new Uint8Array(this.compute.length);
  }

  isShared(x) { return this.shared[Math.floor(x)] === 1; }

  cover(from, to, compute, communicate, narrow) {
    const last = Math.min(Math.floor(to), this.compute.length - 1);
    for (let x = Math.max(Math.floor(from), 0); x <= last; x++) {
      const part = Math.min(to, x + 1) - Math.max(from, x);
      this.compute[x] += part * compute;
      this.communicate[x] += part * communicate;
      if (narrow && part > 0) this.shared[x] = 1;
    }
  }

  draw(pen, left, top, paint) {
    this.shared.forEach((shared, x) => {
      if (!shared) return;
      const low = BAR * Math.min(this.compute[x], 1), high = BAR * Math.min(this.communicate[x], 1);
      pen.fillStyle = paint.compute;
      pen.fillRect(left + x, top + BAR - low, 1, low);
      pen.fillStyle = paint.thin;
      pen.fillRect(left + x, top + BAR - low - high, 1, high);
    });
  }
}

function drawOp(pen, lane, i, x, wide, top, paint) {
  const computes = lane.kind[i] === COMPUTE;
  pen.fillStyle = computes ? paint.compute : wide < 4 ? paint.thin : paint.communication;
  pen.fillRect(x, top, wide, BAR);
  if (wide < 5) return;
  pen.fillStyle = paint.edge;
  pen.fillRect(x + wide - 1, top, 1, BAR);
  if (wide < 34) return;
  const from = Math.max(x, gutter()), room = Math.min(x + wide, canvas.clientWidth) - from - 8;
  const text = opName(line.texts[lane.op[i]]);
  const needed = pen.measureText(text).width;
  if (needed > room) return;
  if (!computes) {
    pen.fillStyle = paint.thin;
    pen.fillRect(from + 2, top + 3, needed + 4, BAR - 6);
  }
  pen.fillStyle = computes ? paint.onCompute : paint.onCommunication;
  pen.fillText(text, from + 4, top + BAR / 2 + 0.5);
}

// "%a, %b = matmul(%x, %w)" is a matmul.
function opName(text) {
  return text.split("\n", 1)[0].replace(/\(.*$/, "").replace(/^.* = /, "");
}

function barText(lane, i) {
  const length = lane.length[i], unit = line.unit;
  const [op, place] = line.texts[lane.op[i]].split("\n");
  const when = `from ${seconds(lane.start[i] * unit)} for ${seconds(length * unit)}`;
  const calls = line.texts[lane.call[i]];
  const where = [
    place && `at ${place}`, calls && `in ${calls.split("\n").join("\nin ")}`,
    lane.critical.has(i) && "on the critical path",
  ].filter(Boolean);
  if (lane.kind[i] !== JOINED) {
    return [op, `${lane.kind[i] === COMPUTE ? "compute" : "communication"}, ${when}`, ...where].join("\n");
  }
  const [count, compute, communicate] = lane.joined[lane.extra[i]];
  const share = (part) => percent(Math.min(part / Math.max(length, 1), 1));
  return [
    `${count.toLocaleString("en")} ops merged, ${when}`,
    `compute ${share(compute)}, communication ${share(communicate)}, idle ${share(length - compute - communicate)}`,
    `the longest: ${op}`, ...where,
  ].join("\n");
}

function found(event) {
  const box = canvas.getBoundingClientRect();
  const x = event.clientX - box.left, y = event.clientY - box.top;
  const number = lanes.findIndex((_, i) => y >= laneTop(i) - 2 && y <= laneTop(i) + BAR + 2);
  if (number < 0 || x < gutter()) return null;
  const lane = lanes[number], slack = 2 / scale(), time = timeAt(x);
  const i = bisect(lane.count, (k) => lane.end[k] <= time);
  if (i < lane.count && lane.start[i] <= time + slack) return { lane, i };
  if (i > 0 && lane.end[i - 1] >= time - slack) return { lane, i: i - 1 };
  return { lane, idle: [i > 0 ? lane.end[i - 1] : 0, i < lane.count ? lane.start[i] : line.span] };
}

function hover(event) {
  const now = found(event);
  const bar = now && !now.idle ? now : null;
  if ((bar && bar.i) !== (hovered && hovered.i) || (bar && bar.lane) !== (hovered && hovered.lane)) {
    hovered = bar;
    drawTimeline();
  }
  if (!now) { hideTip(); return; }
  const [from, to] = now.idle || [];
  const text = bar ? barText(bar.lane, bar.i)
    : `idle\nfrom ${seconds(from * line.unit)} for ${seconds((to - from) * line.unit)}`;
  showTip(`${now.lane.name}\n${text}`, event);
}

function zoom(factor, centre) {
  const least = Math.max(line.span / 1e7, 20);
  const span = Math.min(Math.max((view.to - view.from) * factor, Math.min(least, line.span)), line.span);
  const part = (centre - view.from) / (view.to - view.from);
  move(centre - part * span, span);
}

function move(from, span) {
  view.from = Math.min(Math.max(from, 0), line.span - span);
  view.to = view.from + span;
  drawTimeline();
}

const middle = () => (view.from + view.to) / 2;
let dragged = null;
canvas.addEventListener("pointerdown", (event) => {
  dragged = { x: event.clientX, from: view.from };
  canvas.setPointerCapture(event.pointerId);
  hover(event);
});
canvas.addEventListener("pointermove", (event) => {
  if (dragged && Math.abs(event.clientX - dragged.x) > 3) {
    hideTip();
    move(dragged.from - (event.clientX - dragged.x) / scale(), view.to - view.from);
  } else hover(event);
});
for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => { dragged = null; });
canvas.addEventListener("pointerleave", () => { hovered = null; hideTip(); drawTimeline(); });
canvas.addEventListener("dblclick", (event) => zoom(0.4, timeAt(event.clientX - canvas.getBoundingClientRect().left)));
canvas.addEventListener("wheel", (event) => {
  if (!event.ctrlKey && !event.metaKey) return;
  event.preventDefault();
  zoom(Math.exp(event.deltaY / 300), timeAt(event.clientX - canvas.getBoundingClientRect().left));
}, { passive: false });
canvas.addEventListener("keydown", (event) => {
  const span = view.to - view.from;
  const act = {
    "+": () => zoom(0.5, middle()), "-": () => zoom(2, middle()), "0": () => move(0, line.span),
    ArrowLeft: () => move(view.from - span / 8, span), ArrowRight: () => move(view.from + span / 8, span),
  }[event.key];
  if (act) { event.preventDefault(); act(); }
});
document.getElementById("zoom-in").addEventListener("click", () => zoom(0.5, middle()));
document.getElementById("zoom-out").addEventListener("click", () => zoom(2, middle()));
document.getElementById("zoom-all").addEventListener("click", () => move(0, line.span));
drawTimeline();
