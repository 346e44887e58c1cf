/**
 * Colour scales: straight lines through OKLab, so that equal steps look equal. The scale of weights runs monotonically
 * from white to the ink; the scale of differences runs from blue through the paper to orange. Neither depends on
 * the colour vision of the reader.
 */

export type Theme = "light" | "dark";
type Lab = readonly [number, number, number];

const WEIGHTS: Record<Theme, Lab[]> = {
  light: [[1, 0, 0], [0.29, -0.002, -0.135]],
  dark: [[0.235, -0.002, -0.02], [0.96, -0.015, 0.07]],
};
const DIFFERENCES: Record<Theme, Lab[]> = {
  light: [[0.4, -0.02, -0.16], [0.975, 0, 0.008], [0.55, 0.1, 0.11]],
  dark: [[0.78, -0.05, -0.12], [0.235, -0.002, -0.02], [0.8, 0.06, 0.13]],
};

const gamma = (x: number) => (x <= 0.0031308 ? 12.92 * x : 1.055 * x ** (1 / 2.4) - 0.055);
const unit = (x: number) => Math.min(1, Math.max(0, x));
const channel = (x: number) => Math.round(255 * unit(gamma(unit(x))));

/** Björn Ottosson's OKLab to sRGB bytes. */
export function rgb([L, a, b]: Lab): [number, number, number] {
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

function along(stops: Lab[]): [number, number, number][] {
  return Array.from({ length: STEPS }, (_, step) => {
    const at = (step / (STEPS - 1)) * (stops.length - 1);
    const left = Math.min(stops.length - 2, Math.floor(at));
    const [from, to] = [stops[left], stops[left + 1]];
    const mixed = from.map((value, i) => value + (at - left) * (to[i] - value));
    return rgb([mixed[0], mixed[1], mixed[2]]);
  });
}

/** A scale: its colours as CSS text, and as words of little-endian RGBA for `ImageData`. */
export interface Scale {
  css: string[];
  words: Uint32Array;
}

function scale(stops: Lab[]): Scale {
  const colours = along(stops);
  return {
    css: colours.map((each) => `rgb(${each.join(",")})`),
    words: Uint32Array.from(colours, ([r, g, b]) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0),
  };
}

const both = (stops: Record<Theme, Lab[]>) => ({ light: scale(stops.light), dark: scale(stops.dark) });

export const SCALES = { weights: both(WEIGHTS), differences: both(DIFFERENCES) };

/** The step of a scale at a point of it, 0 to 1. */
export const step = (at: number) => Math.round((STEPS - 1) * unit(at));

/** The colour of weights at a point of the scale, 0 to 1. */
export const colour = (theme: Theme, at: number) => SCALES.weights[theme].css[step(at)];

/** The text colour over this point of the scale of weights. */
export const onColour = (theme: Theme, at: number) =>
  at > 0.5 !== (theme === "dark") ? "rgb(250,248,243)" : "rgb(20,22,30)";

/** The text colour over this point of the scale of differences, whose ends are dark in the light theme, and light in the dark. */
export function onDifference(theme: Theme, at: number): string {
  const end = theme === "dark" ? Math.abs(2 * at - 1) > 0.5 : at < 0.2 || at > 0.92; // blue is darker than orange
  return onColour(theme, end ? 1 : 0);
}

/** The colours of drawings, which the style sheet has too. */
export const INKS = {
  light: { paper: "#fcfbf8", ink: "#1b1d25", soft: "#5d606b", faint: "#c9c6bd", hair: "#e4e1d9", hatch: "#d9d6cd", accent: "#2540a0", second: "#a84a16", third: "#1f7a4d" },
  dark: { paper: "#14161c", ink: "#e9e6df", soft: "#a2a3aa", faint: "#4a4d58", hair: "#2c2f39", hatch: "#363a45", accent: "#9db4ff", second: "#f0a673", third: "#6fd3a0" },
} as const;

/** The ground of pictures that are saved: that of the server's pictures. */
export const GROUND: Record<Theme, string> = { light: "#ffffff", dark: "#14171c" };

/** The ground of keys that a query may not look at, as words of little-endian RGBA; `INKS` has it as `faint`. */
export const UNCHOSEN: Record<Theme, number> = { light: 0xffbdc6c9, dark: 0xff584d4a };
