// The tables below the heat maps: statistics, output, and execution.

import { el, scroll, table } from "./dom.js";
import { bytes, count, milliseconds, real, short, whole } from "./format.js";

const STATISTICS = [
  ["entropy", "entropy, nats", "−Σ p ln p of the shares: 0 for one key, ln(keys) for equal weights"],
  ["max_weight", "largest weight", "the largest weight of a query"],
  ["mean_distance", "mean distance, tokens", "Σ p · |i − j|: the mean distance of the keys"],
  ["first_key", "first key", "the share of the first key"],
  ["own_position", "own position", "the share of the key at the query's own position"],
];

/** Show one row per head: means over the queries. */
export function statisticsTable(statistics, queries, sequence) {
  const columns = [
    { head: "head", header: true, number: true, cell: (head) => String(head) },
    ...STATISTICS.map(([name, head, title]) => ({ head, title, number: true, cell: (i) => real(statistics[name][i]) })),
  ];
  const over = Array.isArray(queries) ? queries[sequence] : queries;
  const caption = `Head statistics, means over ${over} ${over === 1 ? "query" : "queries"}`;
  return el("div", {}, el("h3", {}, "Statistics"), scroll(caption, table(caption, columns, statistics.entropy.map((_, head) => head))));
}

const MOST = { rows: 64, columns: 16 };

/** Show the output: one row per token, with its first numbers. */
export function outputTable(output, labels) {
  const heads = Array.isArray(output[0]?.[0]) ? output : [output];
  const width = heads[0][0]?.length ?? 0;
  const columns = (many) => [
    { head: "token", header: true, cell: ([i]) => labels[i] ?? String(i) },
    ...Array.from({ length: Math.min(width, MOST.columns) }, (_, j) => ({ head: String(j), number: true, cell: ([, row]) => real(row[j]) })),
    ...(width > MOST.columns ? [{ head: `… ${width}`, cell: () => "…" }] : []),
  ];
  const one = (rows, head) => {
    const caption = `Output${heads.length > 1 ? ` of head ${head}` : ""}: ${rows.length} × ${width}${rows.length > MOST.rows ? `, the first ${MOST.rows}` : ""}`;
    return scroll(caption, table(caption, columns(), rows.slice(0, MOST.rows).map((row, i) => [i, row])));
  };
  return el("div", {}, el("h3", {}, "Output"), heads.map(one));
}

const RAN = [
  ["kernel", (ran) => ran.kernel],
  ["computed in", (ran) => `${ran.dtype} on ${ran.device}`],
  ["version", (ran) => short(ran.version)],
  ["predicted", (ran) => milliseconds(ran.predicted_ms)],
  ["90 % interval", (ran) => `${milliseconds(ran.predicted_low_ms)} to ${milliseconds(ran.predicted_high_ms)}`],
  ["took", (ran) => milliseconds(ran.compute_ms)],
  ["waited", (ran) => milliseconds(ran.queue_ms)],
  ["batched with", (ran) => (ran.batch > 1 ? `${ran.batch - 1} more` : "none")],
  ["FLOPs", (ran) => el("span", { title: whole(ran.flops) }, count(ran.flops))],
  ["peak memory", (ran) => bytes(ran.peak_bytes)],
];

/** Show the execution, one column per request: `{name: ran}`. */
export function ranTable(rans) {
  const columns = [
    { head: "", header: true, cell: ([label]) => label },
    ...Object.entries(rans).map(([name, ran]) => ({ head: name, number: true, cell: ([, read]) => read(ran) })),
  ];
  const caption = "Execution, predicted and measured";
  return el("div", {}, el("h3", {}, "Execution"), scroll(caption, table(caption, columns, RAN)));
}
