/** Texts with labels, one a line, to which a linear probe is fitted. */

export interface Labelled {
  texts: string[];
  labels: number[];
  /** What is still missing; an empty text if nothing is. */
  missing: string;
}

const LINE = /^\s*([01])[\s,;:]+(\S.*?)\s*$/;

/** Read lines that each begin with 0 or 1. Each label needs a text for each fold of the cross-validation. */
export function readLabelled(content: string, folds: number): Labelled {
  const texts: string[] = [];
  const labels: number[] = [];
  let missing = "";
  content.split(/\r?\n/).forEach((line, i) => {
    if (!line.trim()) return;
    const read = LINE.exec(line);
    if (!read) missing ||= `Line ${i + 1} does not begin with 0 or 1 before a text.`;
    else {
      labels.push(Number(read[1]));
      texts.push(read[2]);
    }
  });
  for (const label of [1, 0]) {
    const many = labels.filter((each) => each === label).length;
    if (many < folds) missing ||= `Label ${label} needs at least ${folds} texts, one for each fold: there ${many === 1 ? "is 1" : `are ${many}`}.`;
  }
  return { texts, labels, missing };
}

const PLACES = { kitchen: 1, house: 1, school: 1, garden: 0, park: 0, street: 0 };

/** Texts of somebody who went inside, or outside. */
export const FIRST_LABELLED = Object.entries(PLACES).flatMap(([place, label]) => ["cat", "dog", "horse", "fox", "bird"].map((animal) => `${label}\tKate went to the ${place}. The ${animal} slept.`)).join("\n");
