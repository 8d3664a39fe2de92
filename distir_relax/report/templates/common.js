const data = JSON.parse(document.getElementById("data").textContent);
const tip = document.getElementById("tip");

// Digits are as the report's own figures have them.
function withUnit(value, units, digits) {
  const [unit, scale] = units.find(([, s]) => value >= s) || units[units.length - 1];
  return `${Number((value / scale).toPrecision(digits))} ${unit}`;
}

function seconds(value) {
  return withUnit(value, [["s", 1], ["ms", 1e-3], ["us", 1e-6], ["ns", 1e-9]], 4);
}

function size(value) {
  return withUnit(value, [["PB", 1e15], ["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3], ["B", 1]], 3);
}

function percent(share) {
  return `${(100 * share).toFixed(1)} %`;
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function showTip(text, event) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = Math.min(event.clientX + 14, window.innerWidth - box.width - 8);
  const below = event.clientY + 16;
  const top = below + box.height > window.innerHeight - 8 ? event.clientY - box.height - 12 : below;
  tip.style.left = `${Math.max(left, 8)}px`;
  tip.style.top = `${Math.max(top, 8)}px`;
}

function hideTip() {
  tip.hidden = true;
}

// Round steps, about `count` of them, from `low` to `high`.
function ticks(low, high, count) {
  const rough = (high - low) / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high * (1 + 1e-9); i++) found.push(i * step);
  return found;
}

// The number of leading entries of a sorted list for which `before` holds.
function bisect(length, before) {
  let low = 0, high = length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (before(middle)) low = middle + 1; else high = middle;
  }
  return low;
}

function element(name, attributes, parent, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

function html(name, className, parent, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

// Redraws are collected into one a frame, and happen again when the width or the colour scheme changes.
function redrawn(target, draw) {
  let waiting = false, width = 0;
  const request = () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; draw(); });
  };
  new ResizeObserver(() => {
    if (target.clientWidth !== width) { width = target.clientWidth; request(); }
  }).observe(target);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", request);
  window.addEventListener("resize", request);
  return request;
}

window.addEventListener("scroll", hideTip, { passive: true });
