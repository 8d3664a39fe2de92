const traffic = data.matrix;
const matrixBox = document.getElementById("matrix");
const STEPS = [0.5, 0.2, 0.05, 0.01, 0];
const SHADES = [1, 0.75, 0.52, 0.32, 0.14];

if (traffic.total) {
  const svg = element("svg", { role: "img", "aria-label": "Bytes sent from each row's devices to each column's" }, matrixBox);
  const legend = html("ul", "legend", matrixBox);
  const most = Math.max(...traffic.bytes.flat());
  STEPS.forEach((share, k) => {
    const item = html("li", "", legend);
    html("i", "swatch", item).style.background = `rgba(var(--heat), ${SHADES[k]})`;
    item.append(share ? `${size(share * most)} to ${size(k ? STEPS[k - 1] * most : most)}` : "less");
  });

  redrawn(matrixBox, () => {
    const count = traffic.names.length, width = svg.clientWidth || 300;
    const label = 16 + 7 * Math.max(...traffic.names.map((name) => name.length));
    const cell = Math.min((width - label - 2) / count, 48), top = 36;
    // Names that would lie on each other are left out; a hover tells them.
    const every = Math.ceil(15 / cell), wide = Math.ceil((label - 6) / cell);
    const height = top + cell * count + 2;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("height", height);
    svg.replaceChildren();
    element("text", { x: label, y: 12 }, svg, "to device");
    element("text", { x: 0, y: 30 }, svg, "from");
    traffic.names.forEach((name, i) => {
      const middle = (i + 0.5) * cell;
      if (i % every === 0) element("text", { x: label - 6, y: top + middle + 4, "text-anchor": "end" }, svg, name);
      const fits = i % wide === 0 && (wide === 1 || label + middle + 7 * name.length < width);
      if (fits) element("text", { x: label + middle, y: 30, "text-anchor": wide > 1 ? "start" : "middle" }, svg, name);
    });
    element("rect", { x: label, y: top, width: cell * count, height: cell * count, fill: "none", class: "axis" }, svg);
    traffic.bytes.forEach((row, i) => row.forEach((bytes, j) => {
      if (!bytes) return;
      const shade = SHADES[STEPS.findIndex((share) => bytes > share * most)];
      element("rect", {
        class: "cell", "data-from": i, "data-to": j, fill: `rgba(var(--heat), ${shade})`,
        x: label + j * cell + 0.5, y: top + i * cell + 0.5, width: cell - 1, height: cell - 1,
      }, svg);
    }));
  })();

  svg.addEventListener("pointermove", (event) => {
    const { from, to } = event.target.dataset || {};
    if (from === undefined) { hideTip(); return; }
    const named = (i) => `${traffic.block > 1 ? "devices" : "device"} ${traffic.names[i]}`;
    const text = from === to ? `among ${named(from)}` : `from ${named(from)} to ${named(to)}`;
    showTip(`${text}\n${size(traffic.bytes[from][to])}`, event);
  });
  svg.addEventListener("pointerleave", hideTip);
}
