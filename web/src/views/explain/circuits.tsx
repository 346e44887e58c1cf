/** Circuits of a resident module: spectra of QK and OV by head, copying, composition, and norms of the parameters. */

import { callTensors, of } from "../../server/api";
import { useLoaded, usePage } from "../../page/context";
import { barScene, heatScene } from "../../drawing/drawings";
import { precise } from "../../numbers/format";
import { headName } from "../../subjects/subject";
import { HeatMap } from "../../parts/heatmap";
import { matrix, matrixRows } from "../../numbers/matrix";
import type { Body, Tensor } from "../../server/tensors";
import { importLayers, layersOf } from "../../server/import_layers";
import type { CircuitsReply, ModelInfo } from "../../server/types";
import { Button, Choice, Commands, Drawing, Export, FactList, ProblemBox, RanTable, Table, Waiting } from "../../parts/ui";
import { Answer, useWork } from "../../parts/work";

/** Scores that are a product of a query and a key; the others have no W_QK. */
const PRODUCTS = ["dot", "scaled_dot", "bilinear"];

interface PictureOf {
  name: string;
  title: string;
  tensor: Tensor;
  axes: [string, string];
}

function Picture({ name, title, tensor, axes }: PictureOf) {
  const { theme } = usePage();
  const shown = matrix(tensor.shape[0], tensor.shape[1], tensor.data);
  const numbered = (many: number, first: number) => Array.from({ length: many }, (_, i) => String(i + first));
  const [rows, columns] = [numbered(shown.rows, 0), numbered(shown.columns, axes[1] === "singular values" ? 1 : 0)];
  return (
    <figure>
      <figcaption>{title}</figcaption>
      <HeatMap of={shown} queries={rows} keys={columns} title={title} axes={axes} />
      <Export of={{ name, label: title, scene: () => heatScene(shown, { theme, title, queries: rows, keys: columns, axes }), rows: () => [[axes[0], ...columns], ...matrixRows(shown, rows, columns).slice(1)], json: () => ({ title, axes, values: rows.map((_, i) => Array.from(shown.data.subarray(i * shown.columns, (i + 1) * shown.columns))) }) }} />
    </figure>
  );
}

const MODEL = "model:";

/** Circuits are read from the parameters of modules: offer the import of a whole model's layers. */
function ImportModel({ model: { id, checkpoint } }: { model: ModelInfo }) {
  const { refresh, go } = usePage();
  const { busy, problem, done, run } = useWork();
  const { value, problem: unknown } = useLoaded(checkpoint, () => layersOf(checkpoint));
  const ready = value?.filter(({ config }) => config) ?? [];
  const take = () => run(async () => {
    const made = await importLayers(checkpoint, ready);
    await refresh(); // once all are there: this view then shows the first
    go({ circuits: made.names[0], with: "" }, "replace");
    return made;
  });
  return (
    <>
      <p>Circuits are read from the parameters of a layer, which must be a module. The layers of {id} can be imported; the whole model stays as it is.</p>
      {value && (ready.length ? <Button class="primary" disabled={busy} onClick={take}>Import {ready.length === 1 ? "the layer" : `all ${ready.length} layers`} of {id}</Button> : <p>{value.find((each) => each.problem)?.problem ?? `No layer of ${id} can be imported.`}</p>)}
      {!value && !unknown && <Waiting what={`Asking the server for the layers of ${id}`} />}
      <ProblemBox problem={unknown} />
      <Answer problem={problem} done={done} />
    </>
  );
}

export function Circuits() {
  const { params, go, theme, modules, listed, models } = usePage();
  const whole = (models ?? []).filter(({ refused }) => !refused);
  const [kind, subject] = (params.source ?? "").split(/:(.*)/s);
  const first = [...modules.map((each) => each.name), ...whole.map(({ id }) => MODEL + id), ""][0];
  const chosen = params.circuits ?? (kind === "module" ? subject : kind === "model" ? MODEL + subject : first);
  const model = chosen.startsWith(MODEL) ? whole.find(({ id }) => id === chosen.slice(MODEL.length)) : undefined;
  const imported = modules.filter(({ source }) => model && source?.checkpoint === model.checkpoint);
  const name = imported.find(({ source }) => String(source?.layer) === params.layer)?.name ?? imported.at(0)?.name ?? chosen;
  /** Whole models of which no layer is a module. */
  const unread = whole.filter(({ checkpoint }) => !modules.some(({ source }) => source?.checkpoint === checkpoint));
  const later = params.with ?? "";
  const options = modules.map((each): [string, string] => [each.name, `${each.name} · ${each.config.d_model} wide, ${each.config.num_heads} heads`]);
  const module = modules.find((each) => each.name === name);
  /** Modules that can read this one's output. */
  const readers = options.filter((_, i) => modules[i].config.d_model === module?.config.d_model);
  const version = [module?.version, modules.find((each) => each.name === later)?.version].join(" ");
  const { value, problem, busy } = useLoaded(`${name}/${later}/${version}`, async () => {
    if (!module) return null;
    const product = PRODUCTS.includes(module.config.spec?.score?.name ?? "scaled_dot");
    const body: Body = { parts: [...(product ? ["qk"] : []), "ov", "spectra"], ...(later ? { with: later } : {}) };
    const path = of(name, "circuits");
    return { ...(await callTensors<CircuitsReply>(path, body)), request: { method: "POST" as const, path, body } };
  });
  if (!listed) return <Waiting what="Asking the server for its modules" />;
  if (!modules.length && !model) return models ? <p>No module is resident. Create one or import a checkpoint under Model.</p> : <Waiting what="Asking the server for its models" />;
  const tensors: Partial<Record<string, Tensor>> = value?.tensors ?? {};
  const pictures = [
    ["qk.singular_values", "singular values of W_QK", "singular values"],
    ["ov.singular_values", "singular values of W_OV", "singular values"],
    ["composition.q", `q composition with ${later}`, `heads of ${later}`],
    ["composition.k", `k composition with ${later}`, `heads of ${later}`],
    ["composition.v", `v composition with ${later}`, `heads of ${later}`],
  ].flatMap(([each, title, across]): PictureOf[] => {
    const tensor = tensors[each];
    return tensor ? [{ name: each.replace(".", "-"), title, tensor, axes: ["heads", across] }] : [];
  });
  const numbers = (each: string) => Array.from(tensors[each]?.data ?? [], (number) => precise(number)).join(", ") || "—";
  const heads = Array.from(tensors.heads?.data ?? [], (head) => headName("", head));
  const columns = [["qk.norm", "‖W_QK‖"], ["qk.effective_rank", "effective rank"], ["qk.stable_rank", "stable rank"], ["ov.norm", "‖W_OV‖"], ["ov.effective_rank", "effective rank"], ["ov.stable_rank", "stable rank"], ["ov.copying", "copying"]] as const;
  const copying = tensors["ov.copying"];
  const copies = () => barScene({ theme, title: "copying score Σ λ / Σ |λ| of W_OV", labels: heads, values: Array.from(copying?.data ?? []), signed: true });
  return (
    <>
      <div class="fields">
        <Choice wide label="Module" value={name} set={(circuits) => go({ circuits, with: "" })} options={[...(module || model ? [] : [[name, name] as [string, string]]), ...options, ...unread.map(({ id }): [string, string] => [MODEL + id, `${id} · whole model`])]} />
        <Choice wide label="Composition with a later module" value={later} set={(each) => go({ with: each })} options={[["", "none"], ...readers]} />
      </div>
      <ProblemBox problem={problem} />
      {!module && model && <ImportModel model={model} />}
      {!module && !model && <p>No module {name} is resident.</p>}
      {module && !value && busy && <Waiting what={`Asking the server for the circuits of ${name}`} />}
      {module && value && (
        <div aria-busy={busy}>
          <FactList facts={[
            ...(value.reply.composition ? [["composition of random heads", precise(value.reply.composition.baseline)] as const] : []),
            ["in no circuit", value.reply.left_out.join(", ") || "nothing"],
          ]} />
          <p class="small">The score of tokens x and y is xᵀ W_QK y, and a head writes W_OV y of a token that it attends to (Elhage et al. 2021). A copying score near 1 belongs to a head that writes what it reads.</p>
          <div class="side">
            {pictures.map((each) => <Picture key={each.name} {...each} />)}
            {copying && <figure><Drawing fit scene={copies()} /><Export of={{ name: "copying", label: "copying score", scene: copies, rows: () => [["head", "copying"], ...heads.map((head, i) => [head, copying.data[i]])] }} /></figure>}
          </div>
          <Table caption="Circuits by head" rows={heads} columns={[
            { head: "head", header: true, cell: (each) => each },
            ...columns.flatMap(([each, head]) => {
              const tensor = tensors[each];
              return tensor ? [{ head, title: each, number: true, cell: (_: string, i: number) => precise(tensor.data[i]) }] : [];
            }),
          ]} />
          <Table caption="Spectra of the parameters" rows={value.reply.spectra} columns={[
            { head: "parameter", header: true, cell: (each) => each.name },
            { head: "shape", cell: (each) => each.shape.join(" × ") },
            { head: "norm", number: true, title: "Frobenius", cell: (_, i) => numbers(`spectra.${i}.norm`) },
            { head: "effective rank", number: true, cell: (_, i) => numbers(`spectra.${i}.effective_rank`) },
            { head: "stable rank", number: true, cell: (_, i) => numbers(`spectra.${i}.stable_rank`) },
          ]} />
          <RanTable rans={{ circuits: value.reply.ran }} />
          <Commands calls={[value.request]} />
        </div>
      )}
    </>
  );
}
