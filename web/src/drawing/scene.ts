/** Drawings made of a few shapes, which the page shows as SVG and saves as SVG or PNG. */

export interface Scene {
  width: number;
  height: number;
  title: string;
  shapes: Shape[];
}

interface Styled {
  fill?: string;
  stroke?: string;
  width?: number;
  dash?: number[];
  opacity?: number;
  /** Told when the pointer rests on the shape. */
  tip?: string;
  /** What the shape stands for, for those who click it. */
  name?: string;
}
export type Shape =
  | ({ kind: "rect"; x: number; y: number; w: number; h: number } & Styled)
  | ({ kind: "path"; d: string } & Styled)
  | ({ kind: "circle"; x: number; y: number; r: number } & Styled)
  | ({ kind: "text"; x: number; y: number; text: string; size?: number; anchor?: "start" | "middle" | "end"; turn?: number; bold?: boolean } & Styled);

export const FONT = 'ui-sans-serif, system-ui, "Segoe UI", "DejaVu Sans", sans-serif';

/** The element and attributes of a shape in SVG. */
export function attributes(shape: Shape): [string, Record<string, string | number>] {
  const style: Record<string, string | number> = { fill: shape.fill ?? "none" };
  if (shape.stroke) Object.assign(style, { stroke: shape.stroke, "stroke-width": shape.width ?? 1 });
  if (shape.dash) style["stroke-dasharray"] = shape.dash.join(" ");
  if (shape.opacity !== undefined) style.opacity = Number(shape.opacity.toFixed(3));
  const at = (value: number) => Number(value.toFixed(2));
  if (shape.kind === "rect") return ["rect", { x: at(shape.x), y: at(shape.y), width: at(shape.w), height: at(shape.h), ...style }];
  if (shape.kind === "path") return ["path", { d: shape.d, ...style }];
  if (shape.kind === "circle") return ["circle", { cx: at(shape.x), cy: at(shape.y), r: shape.r, ...style }];
  const text: Record<string, string | number> = { x: at(shape.x), y: at(shape.y), "font-size": shape.size ?? 11, "text-anchor": shape.anchor ?? "start", ...style };
  if (shape.bold) text["font-weight"] = 600;
  if (shape.turn) text.transform = `rotate(${shape.turn} ${at(shape.x)} ${at(shape.y)})`;
  return ["text", text];
}

/** Text as XML, which has no control characters but tabs and ends of lines. */
const escaped = (text: string) => text.replace(/[\p{Cc}\ufffe\uffff]/gu, (each) => ("\t\n\r".includes(each) ? each : "\ufffd")).replace(/[&<>"]/g, (each) => `&${{ "&": "amp", "<": "lt", ">": "gt", '"': "quot" }[each] ?? ""};`);

/** The scene as an SVG file over a background. `facts` become its metadata. */
export function toSvg(scene: Scene, paper: string, facts: Record<string, unknown>): string {
  const drawn = scene.shapes.map((shape) => {
    const [name, given] = attributes(shape);
    const markup = Object.entries(given).map(([key, value]) => ` ${key}="${escaped(String(value))}"`).join("");
    return `<${name}${markup}>${shape.kind === "text" ? escaped(shape.text) : ""}${shape.tip ? `<title>${escaped(shape.tip)}</title>` : ""}</${name}>`;
  });
  const size = `width="${scene.width}" height="${scene.height}" viewBox="0 0 ${scene.width} ${scene.height}"`;
  return [
    `<svg xmlns="http://www.w3.org/2000/svg" ${size} font-family='${FONT}' role="img">`,
    `<title>${escaped(scene.title)}</title><metadata>${escaped(JSON.stringify(facts))}</metadata>`,
    `<rect width="100%" height="100%" fill="${paper}"/>`,
    ...drawn,
    "</svg>\n",
  ].join("\n");
}

/** Draw the scene on a new canvas of twice its size. */
export function toCanvas(scene: Scene, paper: string): HTMLCanvasElement {
  const canvas = document.createElement("canvas");
  paintScene(canvas, scene, paper, 2);
  return canvas;
}

/** Draw the scene on a canvas, with so many pixels a unit, and return the pen. */
export function paintScene(canvas: HTMLCanvasElement, scene: Scene, paper: string, ratio: number): CanvasRenderingContext2D | null {
  canvas.width = Math.ceil(scene.width * ratio);
  canvas.height = Math.ceil(scene.height * ratio);
  const pen = canvas.getContext("2d");
  if (!pen) return null;
  pen.scale(ratio, ratio);
  pen.fillStyle = paper;
  pen.fillRect(0, 0, scene.width, scene.height);
  for (const shape of scene.shapes) draw(pen, shape);
  return pen;
}

function draw(pen: CanvasRenderingContext2D, shape: Shape): void {
  pen.save();
  pen.globalAlpha = shape.opacity ?? 1;
  pen.fillStyle = shape.fill ?? "transparent";
  pen.strokeStyle = shape.stroke ?? "transparent";
  pen.lineWidth = shape.stroke ? (shape.width ?? 1) : 0;
  pen.setLineDash(shape.dash ?? []);
  if (shape.kind === "text") {
    pen.font = `${shape.bold ? 600 : 400} ${shape.size ?? 11}px ${FONT}`;
    pen.textAlign = shape.anchor === "middle" ? "center" : (shape.anchor ?? "start");
    pen.translate(shape.x, shape.y);
    pen.rotate(((shape.turn ?? 0) * Math.PI) / 180);
    pen.fillText(shape.text, 0, 0);
  } else if (shape.kind === "rect" && !shape.stroke) {
    pen.fillRect(shape.x, shape.y, shape.w, shape.h);
  } else {
    const path = new Path2D(shape.kind === "path" ? shape.d : undefined);
    if (shape.kind === "rect") path.rect(shape.x, shape.y, shape.w, shape.h);
    if (shape.kind === "circle") path.arc(shape.x, shape.y, shape.r, 0, 2 * Math.PI);
    if (shape.fill) pen.fill(path);
    if (shape.stroke) pen.stroke(path);
  }
  pen.restore();
}
