import { defineConfig } from "vitest/config";
import { stamp } from "./stamp.ts";

export default defineConfig({
  base: "./",
  publicDir: "public",
  plugins: [stamp()],
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
  build: {
    outDir: "../service/attention_service/web",
    emptyOutDir: true,
    target: "es2022",
    cssCodeSplit: false,
    modulePreload: false,
    license: { fileName: "licenses.md" },
    reportCompressedSize: true,
    rolldownOptions: {
      input: "src/main.tsx",
      output: { entryFileNames: "app.js", chunkFileNames: "[name].js", assetFileNames: "[name][extname]" },
    },
  },
  test: { include: ["test/**/*.test.ts"], environment: "node" },
});
