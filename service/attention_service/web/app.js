// The built-in page: what answers, what is resident, what heads look at, what it costs.

import { startCost } from "./cost.js";
import { startLook } from "./look.js";
import { refreshModules, startModules } from "./modules.js";
import { refreshServer } from "./server.js";

const SECONDS = 5;

startModules(refreshServer);
startLook(refreshServer);
startCost();

let listed = false;

async function refresh() {
  if (document.hidden) return;
  const info = await refreshServer();
  if (info && !listed) {
    // A server that is still loading has not all of its modules; list them again once it is ready.
    await refreshModules().catch(() => {});
    listed = document.getElementById("health").dataset.state === "ready";
  }
}

refresh();
setInterval(refresh, SECONDS * 1000);
document.addEventListener("visibilitychange", refresh);
