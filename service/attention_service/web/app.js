// The built-in page: server, modules, weights of heads, recordings, and costs.

import { startCost } from "./cost.js";
import { startLook } from "./look.js";
import { refreshModules, startModules } from "./modules.js";
import { refreshRecordings, startRecordings } from "./recordings.js";
import { refreshServer } from "./server.js";

const SECONDS = 5;

startModules(refreshServer);
startLook(refreshServer);
startRecordings();
startCost();

let listed = false;

async function refresh() {
  if (document.hidden) return;
  const info = await refreshServer();
  if (info && !listed) {
    // A loading server lacks some modules: list them again once it is ready.
    await refreshModules().catch(() => {});
    await refreshRecordings().catch(() => {});
    listed = document.getElementById("health").dataset.state === "ready";
  }
}

refresh();
setInterval(refresh, SECONDS * 1000);
document.addEventListener("visibilitychange", refresh);
