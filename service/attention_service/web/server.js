// The section "Server": version, device, health and memory budget.

import { call } from "./api.js";
import { el, facts } from "./dom.js";
import { bytes } from "./format.js";

const health = document.getElementById("health");

/** Return the server's description, or null while it does not answer. */
export async function refreshServer() {
  const [state, info] = await Promise.all([readiness(), call("GET", "v1").catch(() => null)]);
  if (health.dataset.state !== state) {
    health.dataset.state = state;
    health.textContent = state;
  }
  if (info) show(info);
  return info;
}

async function readiness() {
  try {
    return (await call("GET", "health/ready")).status;
  } catch (problem) {
    return problem.document?.code ?? "no answer";
  }
}

function show(info) {
  document.getElementById("facts").replaceChildren(
    ...facts([
      ["version", info.version],
      ["device", `${info.device} — ${info.device_name}`],
      ["torch", info.torch],
      ["modules", String(info.modules)],
    ]),
  );
  const { resident_bytes: resident, in_flight_bytes: flight, free_bytes: free } = info.memory;
  const budget = info.limits.memory_budget_bytes || 1;
  const share = (part) => `${Math.min(100, (100 * part) / budget)}%`;
  const parts = [["resident", resident], ["in flight", flight], ["free", free]];
  const label = `Memory budget ${bytes(budget)}: ${parts.map(([name, size]) => `${bytes(size)} ${name}`).join(", ")}`;
  const bar = el("div", { class: "bar", role: "img", "aria-label": label });
  for (const [name, size] of parts.slice(0, 2)) {
    const piece = el("span", { class: name.replace(" ", "-") });
    piece.style.width = share(size);
    if (size > 0) piece.style.minWidth = "2px";
    bar.append(piece);
  }
  const legend = el(
    "p",
    { class: "legend", "aria-hidden": true },
    parts.map(([name, size]) => el("span", { class: name.replace(" ", "-") }, `${name} `, el("b", {}, bytes(size)))),
    el("span", { class: "budget" }, "budget ", el("b", {}, bytes(budget))),
  );
  document.getElementById("memory").replaceChildren(bar, legend);
}
