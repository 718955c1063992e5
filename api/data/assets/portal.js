// What every page has: calls of the API with the session's token, a word when something
// happened, buttons that call, ask or copy. Pages read without any of this.

const token = document.querySelector('meta[name="csrf-token"]')?.content ?? "";

export class Problem extends Error {
  constructor(status, body) {
    super(body.detail ?? body.title ?? `the service answered ${status}`);
    this.status = status;
    this.body = body;
  }
}

export async function call(path, { method = "GET", json, body, headers = {}, signal } = {}) {
  const sent = { Accept: "application/json", ...headers };
  if (method !== "GET") sent["X-CSRF-Token"] = token;
  if (json !== undefined) {
    sent["Content-Type"] = "application/json";
    body = JSON.stringify(json);
  }
  let answer;
  try {
    answer = await fetch(path, { method, headers: sent, body, signal, credentials: "same-origin" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, { detail: "the service does not answer; check the connection, and try again" });
  }
  if (answer.status === 401) {
    location.href = `/ui/signin?next=${encodeURIComponent(location.pathname + location.search)}`;
    return new Promise(() => {});
  }
  const found = answer.status === 204 ? null : await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Problem(answer.status, found ?? {});
  return found;
}

export const once = () => ({ "Idempotency-Key": crypto.randomUUID?.() ?? String(Math.random()).slice(2) });

let quiet;
export function say(words) {
  const place = document.getElementById("said");
  place.textContent = words;
  clearTimeout(quiet);
  quiet = setTimeout(() => { place.textContent = ""; }, 8000);
}

export function ask(question, verb) {
  const dialog = document.createElement("dialog");
  const words = document.createElement("p");
  words.id = "question";
  words.textContent = question;
  dialog.setAttribute("aria-labelledby", words.id);
  const form = document.createElement("form");
  form.method = "dialog";
  form.className = "actions";
  for (const [value, label, look] of [["", "Back", ""], ["yes", verb, "primary"]]) {
    const button = document.createElement("button");
    button.value = value;
    button.textContent = label;
    button.className = look;
    form.append(button);
  }
  dialog.append(words, form);
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => {
    resolve(dialog.returnValue === "yes");
    dialog.remove();
  }));
}

// Fetches the page again and puts in what has changed of its live parts.
export async function refresh(address = location.href) {
  const answer = await fetch(address, { headers: { Accept: "text/html" }, credentials: "same-origin" });
  if (answer.redirected) { location.href = answer.url; return null; }
  if (!answer.ok) return null;
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const part of document.querySelectorAll("[data-live]")) {
    const other = fresh.getElementById(part.id);
    if (!other || other.innerHTML === part.innerHTML) continue;
    const focused = part.contains(document.activeElement) ? document.activeElement : null;
    const label = focused?.textContent;
    part.replaceChildren(...other.cloneNode(true).childNodes); // `fresh` stays whole
    if (focused) [...part.querySelectorAll("button, a")].find((e) => e.textContent === label)?.focus();
  }
  return fresh;
}

async function act(button) {
  const { call: path, method = "POST", then, ask: question } = button.dataset;
  if (question && !(await ask(question, button.textContent))) return;
  button.disabled = true;
  try {
    const headers = then === "open" ? once() : {};
    const found = await call(path, { method, headers });
    if (then === "open") location.href = `/ui/jobs/${found.id}`;
    else if (then === "list") location.href = button.dataset.list ?? "/ui/jobs";
    else await refresh();
  } catch (error) {
    say(error.message);
    button.disabled = false;
  }
}

async function copy(id) {
  const field = document.getElementById(id);
  field.select();
  try {
    await navigator.clipboard.writeText(field.value);
    say("Copied.");
  } catch {
    say("Press Ctrl+C to copy what is marked.");
  }
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-call], button[data-copy]");
  if (button?.dataset.call) act(button);
  else if (button?.dataset.copy) copy(button.dataset.copy);
});
