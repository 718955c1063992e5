// The form of a job: an estimate while somebody types, and every refusal at its field.

import { call, once, Problem, say } from "./portal.js";

const form = document.getElementById("new");
const body = document.getElementById("estimate-body");
const note = document.getElementById("estimate-note");
const problem = document.getElementById("problem");
const WAIT_MS = 350;
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

function request() {
  const sla = without({ per_token_s: ms("per_token"), first_token_s: ms("first_token") });
  const formats = [...form.querySelectorAll('input[name="formats"]:checked')].map((e) => e.value);
  const counts = (names) => Object.fromEntries(names.map((n) => [n, number(n) === undefined ? undefined : real(number(n))]));
  return without({
    model: value("model"),
    hardware: value("hardware"),
    latency_sla: sla && { ...sla, percentile: Number(value("percentile")) },
    task: value("task"),
    data_distribution: without({ name: value("data"), ...counts(["calibration_tokens", "validation_tokens", "sequence_tokens"]) }),
    workload: without(counts(["batch_size", "prompt_tokens", "output_tokens", "tensor_parallel"])),
    search: { engine: value("engine"), rounding: value("rounding"), formats },
    metadata: value("entity_ref") ? { entity_ref: value("entity_ref") } : undefined,
  });
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

function cell(row, index, text) {
  row.children[index].textContent = text;
}

function draw(found) {
  const table = document.createElement("table");
  const head = table.createTHead().insertRow();
  for (const [text, look] of [["Stack", ""], ["Per token", "n"], ["Memory", "n"], ["Target", ""]]) {
    const th = document.createElement("th");
    th.textContent = text;
    th.className = look;
    th.scope = "col";
    head.append(th);
  }
  const rows = table.createTBody();
  for (const one of found.formats) {
    const row = document.getElementById("row").content.firstElementChild.cloneNode(true);
    const best = one.name === found.recommendation.stack;
    cell(row, 0, one.name + (best ? " ◎" : ""));
    cell(row, 1, seconds(one.per_token_s));
    cell(row, 2, bytes(one.memory.total_bytes));
    cell(row, 3, !one.fits ? "✗ does not fit" : one.meets_sla === null ? "—" : one.meets_sla ? "✓ met" : "✗ missed");
    rows.append(row);
  }
  const scroll = document.createElement("div");
  scroll.className = "scroll";
  scroll.tabIndex = 0;
  scroll.setAttribute("role", "region");
  scroll.setAttribute("aria-label", "Estimate by stack");
  scroll.append(table);
  const said = document.createElement("p");
  said.textContent = `◎ ${found.recommendation.reasons.join("; ")}.`;
  const limit = document.createElement("p");
  limit.className = "note";
  const bf16 = found.formats.find((one) => one.name === "bf16") ?? found.formats[0];
  limit.textContent = `Physical limit of ${bf16.name}: ${seconds(bf16.limits.per_token.seconds)} (${bf16.limits.per_token.said}).`;
  if (!found.recommendation.reasons.includes(found.fp8.said)) limit.textContent += ` ${found.fp8.said}.`;
  body.replaceChildren(scroll, said, limit, ...found.warnings.map((words) => {
    const p = document.createElement("p");
    p.className = "callout";
    p.textContent = words;
    return p;
  }));
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
    draw(found);
    note.textContent = `${found.model.id}: ${found.model.parameters.toLocaleString("en")} parameters, ${found.model.source}. Quality is not estimated: the job measures it.`;
  } catch (error) {
    if (error.name === "AbortError") return;
    body.replaceChildren();
    note.textContent = error instanceof Problem ? `No estimate: ${error.message}` : "No estimate.";
    if (document.activeElement?.matches("select, input[type=checkbox]") || error.status !== 422) return;
    show(error, false);
  }
}

form.addEventListener("input", () => {
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

estimate();
