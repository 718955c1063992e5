// Uploads in parts: dropped or chosen, each part with its digest, sent again where a
// connection breaks. One that a reload or a broken connection cut goes on when the same
// files are chosen again: the browser remembers its id under their names, sizes and times.

import { call, once, refresh } from "./portal.js";

const form = document.querySelector("form[data-upload]");
const TRIES = 4;
const PAUSE_MS = 700;
let files = [], stopper;

const size = (n) => (n >= 1e9 ? `${(n / 1e9).toFixed(1)} GB` : n >= 1e6 ? `${(n / 1e6).toFixed(1)} MB` : `${Math.ceil(n / 1e3)} kB`);
const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

function says(words) {
  form.querySelector("[data-said]").textContent = words;
}

function bar(share) {
  const progress = form.querySelector("progress");
  progress.hidden = share === null;
  progress.value = 100 * (share ?? 0);
}

function pick(list) {
  files = [...list];
  if (!files.length) return;
  const total = files.reduce((sum, file) => sum + file.size, 0);
  const limit = Number(form.dataset.limit);
  form.querySelector(".fields").hidden = false;
  form.querySelector(".actions").hidden = false;
  document.getElementById("picked").textContent = `${files.length === 1 ? files[0].name : `${files.length} files`}, ${size(total)}`;
  const name = document.getElementById("name");
  const stem = (files.find((file) => /\.safetensors$/.test(file.name)) ?? files[0]).name.replace(/\.\w+$/, "");
  if (!name.value && form.dataset.upload === "datasets") name.value = stem.replace(/[^a-zA-Z0-9._-]/g, "-").replace(/^[^a-zA-Z0-9]+/, "").slice(0, 63);
  says(total > limit ? `That is more than the ${size(limit)} that may be uploaded.` : "");
  name.focus();
}

async function digest(bytes) {
  const hash = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
  return `sha-256=:${btoa(String.fromCharCode(...hash))}:`;
}

const mark = (name) => `upload ${JSON.stringify([form.dataset.upload, name, files.map((one) => [one.name, one.size, one.lastModified])])}`;

function remembered(key, id) { // a browser may refuse to remember: then nothing is resumed
  try {
    if (id === null) localStorage.removeItem(key);
    else if (id) localStorage.setItem(key, id);
    return localStorage.getItem(key);
  } catch { return null; }
}

async function begun(key) {
  const id = remembered(key);
  if (!id) return null;
  const found = await call(`/v1/${form.dataset.upload}/${id}`).catch(() => null);
  return ["open", "checking"].includes(found?.state) ? found : null;
}

async function open(name) {
  const kind = form.dataset.upload;
  const key = mark(name);
  const before = await begun(key);
  if (before) return before;
  const listed = files.map((file) => ({ path: file.name, bytes: file.size }));
  const json = kind === "datasets" ? { name, bytes: files[0].size } : { name, files: listed };
  const upload = await call(`/v1/${kind}`, { method: "POST", json, headers: once() });
  remembered(key, upload.id);
  return upload;
}

// Which parts are to be sent: the first thousand that are missing are listed by number.
function wanted(upload) {
  const listed = new Set(upload.missing_parts);
  const beyond = upload.missing_count > listed.size ? Math.max(...listed) : Infinity;
  return (number) => listed.has(number) || number > beyond;
}

async function part(upload, number, blob) {
  const bytes = await blob.arrayBuffer();
  const headers = { "Content-Type": "application/octet-stream", "Content-Digest": await digest(bytes) };
  for (let tried = 1; ; tried += 1) {
    try {
      return await call(`${upload.links.self}/parts/${number}`, { method: "PUT", body: bytes, headers, signal: stopper.signal });
    } catch (error) {
      const again = error.status === 0 || error.status === 429 || error.status >= 500;
      if (error.name === "AbortError" || !again || tried === TRIES) throw error;
      says(`A part did not arrive; it is sent again (${tried + 1} of ${TRIES}).`);
      await wait(PAUSE_MS * 2 ** tried);
    }
  }
}

async function send(upload) {
  const total = files.reduce((sum, file) => sum + file.size, 0);
  const isMissing = wanted(upload);
  let sent = 0;
  for (const planned of upload.files) {
    const file = form.dataset.upload === "datasets" ? files[0] : files.find((one) => one.name === planned.path);
    for (let index = 0; index < planned.parts; index += 1) {
      const from = index * upload.part_bytes;
      const blob = file.slice(from, from + upload.part_bytes);
      const number = planned.first_part + index;
      if (isMissing(number)) await part(upload, number, blob);
      sent += blob.size;
      bar(sent / total);
      says(`${size(sent)} of ${size(total)}`);
    }
  }
}

async function checked(upload) {
  says("Every part is there; the files are looked at…");
  let found = upload.state === "checking" ? upload : await call(`${upload.links.self}/complete`, { method: "POST", json: {} });
  while (found.state === "checking") found = await call(`${upload.links.self}?wait=20`);
  if (found.error) throw new Error(found.error.detail ?? found.error.message ?? "it was refused");
  return found;
}

async function run(name) {
  const buttons = [form.querySelector('[type="submit"]'), form.querySelector("[data-stop]")];
  const busy = (now) => { buttons[0].disabled = now; buttons[1].hidden = !now; };
  stopper = new AbortController();
  busy(true);
  bar(0);
  const key = mark(name);
  let upload;
  try {
    upload = await open(name);
    if (upload.state === "open") await send(upload);
    const found = await checked(upload);
    remembered(key, null);
    says(`${found.name} is there: ${found.samples !== undefined ? `${found.samples} samples` : `${found.parameters.toLocaleString("en")} parameters`}.`);
    form.reset();
    files = [];
    form.querySelector(".fields").hidden = true;
    form.querySelector(".actions").hidden = true;
    await refresh();
  } catch (error) {
    const stopped = error.name === "AbortError";
    const cut = error.status === 0 || error.status === 429 || error.status >= 500;
    says(stopped ? "Stopped. Nothing is kept." : `✗ ${error.message}${cut && upload ? "; Upload goes on where it was cut" : ""}`);
    if (!upload || cut) return;
    remembered(key, null);
    call(upload.links.self, { method: "DELETE" }).catch(() => {});
  } finally {
    busy(false);
    bar(null);
  }
}

if (form) {
  const over = (event) => { event.preventDefault(); form.classList.add("over"); };
  form.addEventListener("dragenter", over);
  form.addEventListener("dragover", over);
  form.addEventListener("dragleave", () => form.classList.remove("over"));
  form.addEventListener("drop", (event) => {
    event.preventDefault();
    form.classList.remove("over");
    pick(event.dataTransfer.files);
  });
  document.getElementById("files").addEventListener("change", (event) => pick(event.target.files));
  form.querySelector("[data-stop]").addEventListener("click", () => stopper.abort());
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (files.length) run(document.getElementById("name").value.trim());
  });
}
