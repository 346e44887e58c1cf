/** Writes the hash of the sources into the build, so that a check without npm can compare the two. */

import { createHash } from "node:crypto";
import { readFileSync, readdirSync } from "node:fs";
import { join, relative } from "node:path";
import type { Plugin } from "vite";

const ROOT = import.meta.dirname;
const SOURCES = ["src", "public", "package.json", "package-lock.json", "tsconfig.json", "vite.config.ts", "stamp.ts"];

function files(path: string): string[] {
  try {
    return readdirSync(path, { withFileTypes: true }).flatMap((entry) => files(join(path, entry.name)));
  } catch {
    return [path]; // a file, not a folder
  }
}

/** SHA-256 of the names and contents of all sources, in the order of their names. */
export function sourceHash(): string {
  const named = SOURCES.flatMap((each) => files(join(ROOT, each))).map((path) => relative(ROOT, path));
  const hash = createHash("sha256");
  for (const name of named.sort()) {
    hash.update(`${name}\0`);
    hash.update(createHash("sha256").update(readFileSync(join(ROOT, name))).digest());
  }
  return hash.digest("hex");
}

/** Add `sources.txt` with the hash of the sources to the bundle. */
export function stamp(): Plugin {
  return {
    name: "stamp",
    generateBundle() {
      this.emitFile({ type: "asset", fileName: "sources.txt", source: `${sourceHash()}\n` });
    },
  };
}
