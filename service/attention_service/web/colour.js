// The colour scale of weights: a straight line through OKLab, so that equal steps look equal. It runs monotonically from
// the paper to the ink, so that it does not depend on colour vision.

import { dark } from "./dom.js";

const LIGHT = [[0.975, 0.0, 0.008], [0.29, -0.002, -0.135]];
const DARK = [[0.235, -0.002, -0.02], [0.96, -0.015, 0.07]];

const gamma = (x) => (x <= 0.0031308 ? 12.92 * x : 1.055 * x ** (1 / 2.4) - 0.055);
const channel = (x) => Math.round(255 * Math.min(1, Math.max(0, gamma(Math.min(1, Math.max(0, x))))));

// Björn Ottosson's OKLab to linear sRGB.
function rgb([L, a, b]) {
  const l = (L + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (L - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (L - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [
    channel(4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s),
    channel(-1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s),
    channel(-0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s),
  ];
}

const STEPS = 256;
const scale = ([from, to]) =>
  Array.from({ length: STEPS }, (_, step) => `rgb(${rgb(from.map((value, i) => value + (step / (STEPS - 1)) * (to[i] - value))).join(",")})`);
const SCALES = { light: scale(LIGHT), dark: scale(DARK) };

/** Return the colour at a point of the scale, 0 to 1. */
export function colour(at) {
  return SCALES[dark.matches ? "dark" : "light"][Math.round((STEPS - 1) * Math.min(1, Math.max(0, at)))];
}

/** Return the text colour over this point of the scale. */
export const onColour = (at) => ((at > 0.5) !== dark.matches ? "rgb(250,248,243)" : "rgb(20,22,30)");
