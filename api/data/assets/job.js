// A job that runs: its events as they come, resumed where they were cut. Where no stream
// can be had (too many are open, a proxy holds it back), the page is asked for instead.

import { call, refresh, say } from "./portal.js";

const article = document.querySelector("[data-job]");
const id = article.dataset.job;
const POLL_MS = 4000;
const FINAL = ["job.succeeded", "job.failed", "job.cancelled", "job.expired"];
let seq = Number(article.dataset.seq);
let stream, timer, polling;

const span = (s) => (s < 100 ? `${Math.round(s)} s` : s < 6000 ? `${Math.round(s / 60)} min` : `${Math.round(s / 3600)} h`);
const named = (phase) => document.querySelector(`[data-phase="${CSS.escape(phase)}"]`)?.textContent ?? phase;

function progress({ percent, eta_seconds: eta, phase }) {
  const bar = document.getElementById("bar");
  if (!bar) return;
  bar.value = percent;
  document.getElementById("percent").textContent = `${Math.round(percent)} %`;
  const left = eta === null || eta === undefined ? "" : `, about ${span(eta)} left`;
  document.getElementById("sentence").textContent = `${named(phase)}${left}.`;
}

function soon() {
  clearTimeout(timer);
  timer = setTimeout(update, 250);
}

async function update() {
  const fresh = await refresh().catch(() => null);
  const log = document.getElementById("log");
  log.scrollTop = log.scrollHeight;
  if (fresh && !fresh.querySelector("[data-unfinished]")) finish(fresh);
}

function finish(fresh) {
  stop();
  delete article.dataset.unfinished;
  document.title = fresh.title;
  const other = fresh.querySelector("[data-job]");
  article.replaceChildren(...other.childNodes); // the result: figures, stack, files
  say(document.querySelector("#state .outcome")?.textContent.trim() ?? "The job has ended.");
}

function hear(event) {
  const found = JSON.parse(event.data);
  seq = Math.max(seq, found.seq);
  if (found.type === "job.progress") progress(found.data);
  else soon();
  if (FINAL.includes(found.type)) stop();
}

function listen() {
  stop();
  stream = new EventSource(`/v1/jobs/${id}/events?after=${seq}`);
  for (const type of article.dataset.types.split(" ")) stream.addEventListener(type, hear);
  stream.addEventListener("error", () => {
    if (stream?.readyState === EventSource.CLOSED) poll();
  });
}

function poll() {
  stop();
  polling = setInterval(update, POLL_MS);
}

function stop() {
  stream?.close();
  stream = undefined;
  clearInterval(polling);
}

async function share({ share: job, use }) {
  const place = document.getElementById("shared");
  try {
    const made = await call(`/v1/jobs/${job}/view_tokens`, { method: "POST", json: { use } });
    document.getElementById("link").value = new URL(made.links[use === "badge" ? "badge" : "embed"], location.href).href;
    place.hidden = false;
    document.getElementById("link").select();
  } catch (error) {
    say(error.message);
  }
}

article.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-share]");
  if (button) share(button.dataset);
});

if ("unfinished" in article.dataset) {
  const log = document.getElementById("log");
  log.scrollTop = log.scrollHeight; // what happened last
  listen();
  // A hidden page needs no stream: a key may hold only a few of them.
  document.addEventListener("visibilitychange", () => {
    if (!("unfinished" in article.dataset)) return;
    if (document.hidden) stop();
    else { update(); listen(); }
  });
}
