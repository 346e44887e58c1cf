import { describe, expect, it } from "vitest";
import { intervalScene } from "../src/drawing/intervals";
import { FIRST_LABELLED, readLabelled } from "../src/subjects/labelled";

describe("labelled texts", () => {
  it("begin with their label, behind which a tab, a space or a comma stands", () => {
    expect(readLabelled("1\tthe cat\n\n0 1 dog\r\n 1, a fox \n0:b", 2)).toEqual({ texts: ["the cat", "1 dog", "a fox", "b"], labels: [1, 0, 1, 0], missing: "" });
    expect(readLabelled(FIRST_LABELLED, 5).missing).toBe("");
  });
  it("tell the first line without a label, and a label with too few texts", () => {
    expect([readLabelled("1 a\nthe cat\n2 b", 2), readLabelled("1 a\n1 b\n0 c", 2), readLabelled("", 2), readLabelled("10 a", 2)].map(({ missing }) => missing)).toEqual([
      "Line 2 does not begin with 0 or 1 before a text.", "Label 0 needs at least 2 texts, one for each fold: there is 1.", "Label 1 needs at least 2 texts, one for each fold: there are 0.", "Line 1 does not begin with 0 or 1 before a text."]);
  });
});

describe("the chart of intervals", () => {
  const scene = intervalScene([{ label: "0", value: 0.5, low: 0.25, high: 1 }, { label: "1", value: 1, low: 0.5, high: 1 }], { theme: "light", title: "AUC", across: "layer", reference: { value: 0.5, label: "chance" }, marked: 1 });
  const points = scene.shapes.flatMap((each) => (each.kind === "circle" ? [each] : []));
  it("has a point for each, the higher the larger, with its interval", () => {
    expect(points.map(({ tip }) => tip)).toEqual(["0: 0.500, 0.250 to 1.00", "1: 1.00, 0.500 to 1.00"]);
    expect(points[1].y).toBeLessThan(points[0].y);
    expect(points[1].x).toBeGreaterThan(points[0].x);
    const reference = scene.shapes.find((each) => each.kind === "path" && each.dash);
    expect(reference?.kind === "path" && reference.d).toContain(`,${points[0].y}H`);
  });
  it("marks the one that is meant", () => {
    expect(points[1].fill).not.toBe(points[0].fill);
  });
});
