// The form of a job: an estimate while somebody types, and every refusal at its field.

import { call, once, Problem, say } from "./portal.js";

const form = document.getElementById("new");
const body = document.getElementById("estimate-body");
const note = document.getElementById("estimate-note");
const problem = document.getElementById("problem");
const WAIT_MS = 350;
const usual = JSON.parse(form.dataset.usual); // what is usual for each task that trains
const before = JSON.parse(form.dataset.before); // the training that is changed and run again
let timer, asking, key = once();

const seconds = (s) => {
  if (s === null || s === undefined) return "—";
  for (const [factor, unit] of [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]]) {
    if (s >= factor || unit === "µs") return `${(s / factor).toPrecision(3)} ${unit}`;
  }
};
const bytes = (n) => {
  for (const [factor, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]]) {
    if (n >= factor || unit === "B") return `${(n / factor).toPrecision(3)} ${unit}`;
  }
};

const value = (name) => form.elements[name].value.trim();
const number = (name) => (value(name) === "" ? undefined : Number(value(name)));
const real = (n) => (Number.isNaN(n) ? "not a number" : n); // the service names the field
const without = (object) => {
  const kept = Object.entries(object).filter(([, v]) => v !== undefined);
  return kept.length ? Object.fromEntries(kept) : undefined;
};
const ms = (name) => (value(name) === "" ? undefined : real(Number(value(name).replace(",", ".")) / 1000));

const trains = () => value("task") in usual;
const decimal = (name) => (value(name) === "" ? undefined : real(Number(value(name).replace(",", "."))));
const counts = (names) => Object.fromEntries(names.map((n) => [n.replace("train_", ""), number(n) === undefined ? undefined : real(number(n))]));
const checked = (name) => [...form.querySelectorAll(`input[name="${name}"]:checked`)].map((e) => e.value);

// Shows the fields of serving or those of training, and what is usual for the task.
function suit() {
  const task = value("task");
  if (body.dataset.task !== task) body.replaceChildren(); // what stands there is of another
  body.dataset.task = task;
  const here = ["train", "serve"][trains() ? 0 : 1];
  for (const part of document.querySelectorAll("[data-when]")) part.hidden = ![here, task].includes(part.dataset.when);
  for (const field of form.querySelectorAll("[data-usual-of]")) field.placeholder = usual[task]?.[field.dataset.usualOf] ?? "";
}

function request() {
  return without({
    model: value("model"),
    hardware: value("hardware"),
    ...(trains() ? toTrain() : toServe()),
    metadata: value("entity_ref") ? { entity_ref: value("entity_ref") } : undefined,
  });
}

function planned() {
  const arithmetic = value("planned");
  if (!arithmetic) return undefined;
  return { ...(before.planned?.arithmetic === arithmetic ? before.planned : {}), arithmetic };
}

function toTrain() {
  const kept = value("task") === before.task ? { weight_decay: before.weight_decay, clip: before.clip } : {};
  const all = form.querySelectorAll('input[name="candidates"]').length;
  const candidates = checked("candidates");
  return {
    task: without({
      type: value("task"),
      optimizer: value("optimizer"),
      learning_rate: decimal("learning_rate"),
      ...counts(["steps", "warmup_steps", "train_batch_size", "accumulation", "train_sequence_tokens"]),
      lora_rank: value("task") === "lora" ? counts(["lora_rank"]).lora_rank : undefined,
      candidates: candidates.length === all ? undefined : candidates,
      without_masters: form.elements.without_masters.checked || undefined,
      planned: planned(),
      ...kept,
    }),
    data_distribution: value("data"),
  };
}

function toServe() {
  const sla = without({ per_token_s: ms("per_token"), first_token_s: ms("first_token") });
  return {
    latency_sla: sla && { ...sla, percentile: Number(value("percentile")) },
    task: value("task"),
    data_distribution: without({ name: value("data"), ...counts(["calibration_tokens", "validation_tokens", "sequence_tokens"]) }),
    workload: without(counts(["batch_size", "prompt_tokens", "output_tokens", "tensor_parallel"])),
    search: { engine: value("engine"), rounding: value("rounding"), formats: checked("formats") },
  };
}

function clear() {
  problem.hidden = true;
  for (const field of form.querySelectorAll("[aria-invalid]")) {
    field.removeAttribute("aria-invalid");
    field.removeAttribute("aria-describedby");
  }
  for (const words of form.querySelectorAll(".wrong")) {
    if (words.dataset.for) words.hidden = true;
    else words.remove();
  }
}

// Returns the field that a JSON Pointer is about: the nearest that encloses it.
function fieldOf(pointer) {
  for (let at = pointer; at; at = at.slice(0, at.lastIndexOf("/"))) {
    const field = form.querySelector(`[data-pointer="${CSS.escape(at)}"]`) ?? form.querySelector(`[data-for="${CSS.escape(at)}"]`);
    if (field) return field;
  }
  return null;
}

function show(error, focus) {
  clear();
  let placed = null;
  for (const { pointer, detail } of error.body?.errors ?? []) {
    const field = pointer && fieldOf(pointer);
    if (!field) continue;
    if (field.dataset.for) {
      field.textContent = detail;
      field.hidden = false;
    } else {
      const words = document.createElement("p");
      words.className = "wrong";
      words.id = `${field.id}-wrong`;
      words.textContent = detail;
      (field.closest(".unit") ?? field).after(words);
      field.setAttribute("aria-invalid", "true");
      field.setAttribute("aria-describedby", words.id);
    }
    if (field.closest("details")) field.closest("details").open = true;
    placed ??= field;
  }
  if (!placed) {
    problem.textContent = `✗ ${error.message}`;
    problem.hidden = false;
  }
  if (focus) (placed ?? problem).focus?.();
}

function element(name, text, look = "") {
  const made = document.createElement(name);
  made.textContent = text;
  if (look) made.className = look;
  return made;
}

// Returns a table in a region that scrolls: heads are [text, class], rows are cells.
function table(label, heads, lines) {
  const made = document.createElement("table");
  const head = made.createTHead().insertRow();
  for (const [text, look] of heads) {
    const th = element("th", text, look);
    th.scope = "col";
    head.append(th);
  }
  const rows = made.createTBody();
  for (const cells of lines) {
    const row = rows.insertRow();
    cells.forEach((text, at) => {
      const made = element(at ? "td" : "th", text, heads[at][1]);
      if (!at) made.scope = "row";
      row.append(made);
    });
  }
  const scroll = element("div", "", "scroll");
  scroll.tabIndex = 0;
  scroll.setAttribute("role", "region");
  scroll.setAttribute("aria-label", label);
  scroll.append(made);
  return scroll;
}

const warned = (found) => found.warnings.map((words) => element("p", words, "callout"));
const met = (one) => (!one.fits ? "✗ does not fit" : one.meets_sla === null ? "—" : one.meets_sla ? "✓ met" : "✗ missed");

function draw(found) {
  const best = found.recommendation;
  const lines = found.formats.map((one) => [
    one.name + (one.name === best.stack ? " ◎" : ""), seconds(one.per_token_s), bytes(one.memory.total_bytes), met(one),
  ]);
  const bf16 = found.formats.find((one) => one.name === "bf16") ?? found.formats[0];
  let limit = `Physical limit of ${bf16.name}: ${seconds(bf16.limits.per_token.seconds)} (${bf16.limits.per_token.said}).`;
  if (!best.reasons.includes(found.fp8.said)) limit += ` ${found.fp8.said}.`;
  body.replaceChildren(
    table("Estimate by stack", [["Stack", ""], ["Per token", "n"], ["Memory", "n"], ["Target", ""]], lines),
    element("p", `◎ ${best.reasons.join("; ")}.`),
    element("p", limit, "note"),
    ...warned(found),
  );
}

function because(reasons) {
  const list = element("dl", "", "why");
  for (const { claim, source, folklore } of reasons) {
    const said = document.createElement("div");
    const claimed = element("dt", ` ${claim}`);
    if (folklore) claimed.prepend(element("span", "folklore", "chip even"));
    said.append(claimed, element("dd", folklore ? "nobody is known to have measured it" : source));
    list.append(said);
  }
  return list;
}

function drawTraining(found) {
  const { memory, fits, mixed_precision: mixed, advice } = found.training;
  const lines = memory.rows.map((row) => [row.name.replaceAll("_", " "), bytes(row.bytes)]);
  const kept = document.createElement("details");
  kept.append(element("summary", "What stays in fp32"), because(advice.kept_fp32));
  body.replaceChildren(
    table("Memory of the training", [["Memory", ""], ["", "n"]], [...lines, ["in all", bytes(memory.total_bytes)]]),
    element("p", `${fits ? "✓ Fits" : "✗ Does not fit"} a device of ${bytes(found.hardware.memory_bytes)}. Mixed precision ${mixed.said}.`),
    element("h3", `By rules: ${advice.precision}`),
    because(advice.reasons),
    kept,
    ...warned(found),
  );
}

async function estimate() {
  asking?.abort();
  if (!value("model")) {
    body.replaceChildren();
    return;
  }
  asking = new AbortController();
  try {
    const found = await call("/v1/estimate", { method: "POST", json: request(), signal: asking.signal });
    clear();
    (found.training ? drawTraining : draw)(found);
    const left = found.training ? "What the precisions do to your training, the job measures." : "Quality is not estimated: the job measures it.";
    note.textContent = `${found.model.id}: ${found.model.parameters.toLocaleString("en")} parameters, ${found.model.source}. ${left}`;
  } catch (error) {
    if (error.name === "AbortError") return;
    body.replaceChildren();
    note.textContent = error instanceof Problem ? `No estimate: ${error.message}` : "No estimate.";
    if (document.activeElement?.matches("select, input[type=checkbox]") || error.status !== 422) return;
    show(error, false);
  }
}

form.addEventListener("input", () => {
  suit();
  key = once(); // another request, another key
  clearTimeout(timer);
  timer = setTimeout(estimate, WAIT_MS);
});

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  clearTimeout(timer);
  const button = form.querySelector('button[type="submit"]');
  button.disabled = true;
  button.textContent = "Sending…";
  try {
    const job = await call("/v1/optimize", { method: "POST", json: request(), headers: key });
    say("The job is accepted.");
    location.href = `/ui/jobs/${job.id}`;
  } catch (error) {
    show(error, true);
    button.disabled = false;
    button.textContent = "Start the job";
  }
});

suit();
estimate();
