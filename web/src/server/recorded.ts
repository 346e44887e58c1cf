/** Recorded replies in place of a server: the page that `make site` exports as static files. */

const element = typeof document === "undefined" ? null : document.querySelector<HTMLMetaElement>('meta[name="recorded-views"]');
/** The views whose replies were recorded, by the head of the exported page; null at a server. */
export const RECORDED = element ? element.content.split(" ") : null;
/** Where a server of one's own would be, for the commands that the exported page shows. */
export const OWN_SERVER = element?.dataset.server;

/** FNV-1a with 64 bits, of UTF-8. */
function hash(text: string): string {
  let state = 0xcbf29ce484222325n;
  for (const byte of new TextEncoder().encode(text)) state = BigInt.asUintN(64, (state ^ BigInt(byte)) * 0x100000001b3n);
  return state.toString(16).padStart(16, "0");
}

/** The file of the reply to a request; null for what a server does not compute: a file of the page. `web/export_site.py` gives it the same name. */
export const replyFile = (method: string, path: string, body: string) => (/^(v1|health)\b/.test(path) ? `replies/${hash(`${method} ${path} ${body}`)}` : null);
