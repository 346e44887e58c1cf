// A small log-log line chart.

import { el, svg } from "./dom.js";
import { whole } from "./format.js";

const SIZE = { width: 420, height: 260, left: 64, right: 14, top: 12, bottom: 34 };

/** Return ticks at whole powers of the base, thinned to about six. */
function ticks(low, high, base) {
  const log = (x) => Math.log(x) / Math.log(base);
  const first = Math.ceil(log(low) - 1e-9);
  const last = Math.floor(log(high) + 1e-9);
  const step = Math.max(1, Math.ceil((last - first + 1) / 6));
  return Array.from({ length: Math.max(0, Math.floor((last - first) / step) + 1) }, (_, i) => base ** (first + i * step));
}

const axis = (low, high, from, to) => (x) => from + ((Math.log(x) - Math.log(low)) / (Math.log(high) - Math.log(low) || 1)) * (to - from);

/** Draw lines `{label, style, points: [[x, y], …]}` on logarithmic axes; `unit` formats a y value, `base` is the base of its ticks. */
export function logChart(title, unit, lines, base = 10) {
  const points = lines.flatMap((line) => line.points).filter(([, y]) => y > 0);
  if (!points.length) return el("p", {}, `${title}: no data.`);
  const xs = points.map(([x]) => x);
  const ys = points.map(([, y]) => y);
  const bound = [Math.min(...xs), Math.max(...xs), Math.min(...ys) / 1.3, Math.max(...ys) * 1.3];
  const x = axis(bound[0], bound[1], SIZE.left + 6, SIZE.width - SIZE.right);
  const y = axis(bound[2], bound[3], SIZE.height - SIZE.bottom, SIZE.top);
  const across = [...new Set(lines[0].points.map((point) => point[0]))];
  const every = Math.ceil(across.length / 6);
  const text = (at, up, anchor, value) => svg("text", { x: at, y: up, "text-anchor": anchor }, value);
  const drawing = svg(
    "svg",
    { viewBox: `0 0 ${SIZE.width} ${SIZE.height}`, role: "img", "aria-label": `${title} by length, both axes logarithmic; the table below has the numbers.` },
    ticks(bound[2], bound[3], base === 2 ? 16 : 10).map((value) => [
      svg("line", { class: "grid", x1: SIZE.left, x2: SIZE.width - SIZE.right, y1: y(value), y2: y(value) }),
      text(SIZE.left - 6, y(value) + 4, "end", unit(value)),
    ]),
    across.filter((_, i) => i % every === 0).map((value) => [
      svg("line", { class: "tick", x1: x(value), x2: x(value), y1: SIZE.height - SIZE.bottom, y2: SIZE.height - SIZE.bottom + 4 }),
      text(x(value), SIZE.height - SIZE.bottom + 16, "middle", whole(value)),
    ]),
    text((SIZE.left + SIZE.width) / 2, SIZE.height - 4, "middle", "length, tokens"),
    svg("line", { class: "axis", x1: SIZE.left, x2: SIZE.width - SIZE.right, y1: SIZE.height - SIZE.bottom, y2: SIZE.height - SIZE.bottom }),
    lines.map((line) => drawn(line, x, y, unit)),
  );
  const legend = el("span", { class: "legend" }, lines.map((line) => el("span", { class: `line ${line.style}` }, line.label)));
  return el("figure", { class: "chart" }, el("figcaption", {}, title, legend), drawing);
}

function drawn({ label, style, points }, x, y, unit) {
  const real = points.filter((point) => point[1] > 0);
  const path = real.map(([a, b], i) => `${i ? "L" : "M"}${x(a).toFixed(1)},${y(b).toFixed(1)}`).join("");
  return svg(
    "g",
    { class: `line ${style}` },
    svg("path", { d: path }),
    real.map(([a, b]) => svg("circle", { cx: x(a), cy: y(b), r: 3 }, svg("title", {}, `${label}, ${whole(a)} tokens: ${unit(b)}`))),
  );
}
