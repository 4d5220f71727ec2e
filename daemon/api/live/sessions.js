// The live page: every session with its price and answers, now and at a moment that is pointed at.

import { Chart } from "./chart.js";
import { Past } from "./past.js";
import { colours, themed } from "./theme.js";
import { entered as keyed, get, listen, send } from "./wire.js";
import { $, clock, make, moment, percent, seconds, setOf, setState, span, sure, surely, tags } from "./words.js";

const SAMPLES = 120, LISTED_EVERY_MS = 5000, PAST_EVERY_MS = 1000, LABELS_EVERY = 5, SIGNALS_SHOWN = 50, SIGNALS_KEPT = 256;
const COLUMNS = [["question", ""], ["answer", ""], ["probability", "n"], ["choice set", "set"], ["data age", "n"], ["version", "n version"], ["flags", ""]];
export const sessions = new Map();
const latencies = [], dirty = new Set();
let known = "", behind = true, live = false, choices = new Map(), signals = [], conditions = 0, drawn = colours(), turns = 0, painting = false;

// What is visible is painted once a frame, however much has come.
function changed(session) {
  dirty.add(session);
  if (painting || !session.visible) return;
  painting = true;
  requestAnimationFrame(() => {
    painting = false;
    for (const each of dirty) if (each.visible) show(each);
  });
}

// A venue's clock may differ from this machine's: ages are the daemon's, and tick on from their arrival.
const aged = (age, since) => age + (performance.now() - since) * 1e6;

const watching = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    const session = sessions.get(target.dataset.session);
    if (session?.section === target) isIntersecting ? appear(session) : disappear(session);
  }
}, { rootMargin: "200px" });

function appear(session) {
  session.visible = true;
  const questions = session.info.questions.map((name) => ({ name, choices: choices.get(session.info.name)?.get(name) ?? [] }));
  session.chart ??= new Chart(session.drawing, questions, drawn, (version) => point(session, version));
  session.stale = true;
  changed(session);
  readPast(session);
}

function disappear(session) {
  session.visible = false;
  session.chart?.close();
  session.chart = null;
  session.past = new Past(session.info.name);
  session.at = null;
}

function readPast(session) {
  session.stale = false;
  const past = session.past;
  past.read().then(() => {
    if (past !== session.past) return;
    if (session.at) session.at = past.versions.find((each) => each.data_version === session.at.data_version) ?? null;
    changed(session);
  }, (error) => { if (error.status !== 401) session.stale = true; });
}

function point(session, version) {
  session.at = version && version !== session.past.versions.at(-1) ? version : null;
  changed(session);
}

export function build() {
  const root = $("sessions"), select = $("ask-session"), chosen = select.value;
  root.className = "";
  root.replaceChildren();
  select.replaceChildren();
  watching.disconnect();
  for (const [name, session] of sessions) {
    if (session.visible) disappear(session);
    select.append(new Option(name, name));
    session.section = sectionOf(name, session);
    root.append(session.section);
    show(session);
    tick(session);
    watching.observe(session.section);
  }
  if (!sessions.size) { root.className = "dim"; root.textContent = "there are no sessions"; }
  if (sessions.has(chosen)) select.value = chosen;
  const symbols = [...new Set([...sessions.values()].flatMap(symbolsOf))].sort(), filter = $("symbol"), kept = filter.value;
  filter.replaceChildren(new Option("all", ""), ...symbols.map((each) => new Option(each, each)));
  if (symbols.includes(kept)) filter.value = kept;
  arrange();
}

const symbolsOf = ({ info }) => [info.symbol, ...info.more_symbols];

function sectionOf(name, session) {
  const section = make("section"), head = make("header"), title = make("h2", "", name);
  section.dataset.session = name;
  title.id = "session-" + name;
  section.setAttribute("aria-labelledby", title.id);
  session.age = make("span", "n right");
  session.version = make("span", "dim n");
  session.tags = make("span", "tags");
  session.now = make("button", "now", "now");
  session.now.type = "button";
  session.now.hidden = true;
  session.now.addEventListener("click", () => point(session, null));
  const by = session.info.model ? ` \u00b7 ${session.info.model}` : "";
  head.append(title, make("span", "dim", symbolsOf(session).join(", ") + by), session.tags, session.now, session.age, session.version);
  session.drawing = make("div", "chart");
  session.drawing.tabIndex = 0;
  session.drawing.setAttribute("role", "slider");
  session.drawing.setAttribute("aria-label", `versions of ${name}: price and answers`);
  section.append(head, session.drawing, tableOf(session));
  return section;
}

function tableOf(session) {
  const table = make("table"), top = make("thead"), row = make("tr"), body = make("tbody");
  for (const [text, kind] of COLUMNS) {
    const cell = make("th", kind, text);
    cell.scope = "col";
    row.append(cell);
  }
  top.append(row);
  session.rows = new Map();
  for (const question of session.info.questions) {
    const cells = { row: make("tr"), answer: make("td", "answer none", "no answer yet"), sure: make("td", "n sure"), set: make("td", "set"), age: make("td", "n age"), version: make("td", "n version dim"), flags: make("td", "flags") };
    const label = make("th"), link = make("a", "", question);
    cells.judged = make("span", "dim judged");
    link.href = "/live/questions/" + encodeURIComponent(question);
    label.scope = "row";
    label.append(link, cells.judged);
    cells.row.append(label, cells.answer, cells.sure, cells.set, cells.age, cells.version, cells.flags);
    session.rows.set(question, cells);
    body.append(cells.row);
  }
  table.append(top, body);
  return table;
}

export function show(session) {
  dirty.delete(session);
  const past = session.at;
  for (const [question, cells] of session.rows) {
    const answer = past ? past.by.get(question) : session.answers.get(question);
    fill(cells, answer, past ? past.data_version : answer?.data_version);
    if (!session.past.versions.length) continue; // not read yet: what is there stays
    const { labels, right } = session.past.judged(question);
    cells.judged.textContent = labels ? ` ${percent(right / labels)} of ${labels} right` : "";
  }
  session.section.classList.toggle("past", past !== null);
  session.now.hidden = past === null;
  session.chart?.show(session.past.versions, signals.filter((each) => each.session === session.info.name), past);
  tick(session);
}

function fill(cells, answer, version) {
  cells.answer.className = answer ? "answer" : "answer none";
  cells.answer.textContent = answer ? answer.text || "(empty)" : "no answer yet";
  cells.sure.textContent = answer ? sure(answer) : "";
  cells.sure.title = answer ? surely(answer) : "";
  cells.set.textContent = answer ? setOf(answer) : "";
  cells.version.textContent = answer ? "v" + version : "";
  cells.flags.replaceChildren(...(answer ? tags(answer) : []));
}

export function take(answer) {
  const session = sessions.get(answer.session);
  if (!session) return;
  const before = session.answers.get(answer.question);
  if (before && before.epoch === answer.epoch && before.data_version > answer.data_version) return;
  answer.since = performance.now();
  if (answer.data_version >= session.info.data_version) {
    session.info.data_version = answer.data_version;
    session.info.staleness_ns = answer.staleness_ns;
    session.since = answer.since;
  }
  session.answers.set(answer.question, answer);
  session.stale = true;
  changed(session);
}

function sample(ns) {
  latencies.push(ns);
  if (latencies.length > SAMPLES) latencies.shift();
}

function spark() {
  if (!latencies.length) return;
  const most = Math.max(1, ...latencies), step = 160 / Math.max(1, SAMPLES - 1);
  $("line").setAttribute("points", latencies.map((v, i) => (i * step).toFixed(1) + "," + (22 - 20 * v / most).toFixed(1)).join(" "));
  const sorted = [...latencies].sort((a, b) => a - b);
  $("latency").textContent = span(latencies.at(-1)) + ", median " + span(sorted[sorted.length >> 1]) + ", max " + span(most);
}

function drop(name) {
  if (sessions.get(name).visible) disappear(sessions.get(name));
  dirty.delete(sessions.get(name));
  sessions.delete(name);
}

async function list() {
  const [listed, health, fired] = await Promise.all([get("/v1/sessions"), get("/v1/health"), get("/v1/signals")]);
  const names = JSON.stringify(listed.sessions.map((s) => [s.name, s.symbol, s.more_symbols, s.model, s.questions]));
  const gone = new Set(sessions.keys());
  for (const info of listed.sessions) {
    gone.delete(info.name);
    const session = sessions.get(info.name) || { answers: new Map(), past: new Past(info.name), at: null, visible: false, chart: null };
    session.info = info;
    session.since = performance.now();
    session.late = health.late.includes(info.name);
    sessions.set(info.name, session);
  }
  for (const name of gone) drop(name);
  const model = health.version.model;
  $("model").textContent = (model || "model loading") + " \u00b7 " + health.version.version;
  conditions = fired.conditions.length;
  const later = signals.filter((each) => !fired.signals.some((other) => other.signal_id === each.signal_id));
  signals = [...fired.signals, ...later].sort((a, b) => a.published_at - b.published_at).slice(-SIGNALS_KEPT);
  tellSignals();
  if (behind || names !== known) {
    for (const answer of (await get("/v1/answers")).answers) take(answer);
    behind = false;
  }
  if (names !== known) {
    const questions = await get("/v1/questions");
    choices = new Map(questions.sessions.map((each) => [each.session, new Map(each.questions.map((q) => [q.name, q.choices]))]));
    known = names;
    build();
  } else {
    arrange();
  }
  if (live) setState(health.ready ? "live" : "not ready: " + health.reasons.join("; "), !health.ready);
}

function tellSignals() {
  $("signals").hidden = !conditions && !signals.length;
  const rows = signals.slice(-SIGNALS_SHOWN).reverse().map((signal) => {
    const row = make("tr"), said = signal.answers.map((each) => `${each.session} ${each.question}: ${each.text}`).join(", ");
    row.append(make("td", "n when", moment(signal.as_of)), make("td", "answer", signal.name), make("td", "", signal.session), make("td", "", said), make("td", "n", signal.close ?? ""));
    return row;
  });
  $("fired").replaceChildren(...rows);
  $("signals-count").textContent = `${rows.length ? `the newest ${rows.length}` : "none yet"}, of ${conditions} conditions`;
}

const leastSure = ({ answers }) => Math.min(...[...answers.values()].map((each) => each.probability ?? 1 + each.logit_gap));
const newestSignal = ({ info }) => signals.findLast((each) => each.session === info.name)?.published_at ?? 0;
const ORDERS = {
  listed: () => 0,
  symbol: (a, b) => a.info.symbol.localeCompare(b.info.symbol) || a.info.name.localeCompare(b.info.name),
  age: (a, b) => aged(b.info.staleness_ns, b.since) - aged(a.info.staleness_ns, a.since),
  sure: (a, b) => leastSure(a) - leastSure(b) || 0,
  signal: (a, b) => newestSignal(b) - newestSignal(a),
};

function found(session, symbol, words) {
  if (symbol && !symbolsOf(session).includes(symbol)) return false;
  const said = [session.info.name, ...symbolsOf(session), session.info.model, ...session.info.questions, ...[...session.answers.values()].map((each) => each.text)];
  const text = said.join("\n").toLowerCase();
  return words.every((word) => text.includes(word));
}

// Show the sessions that are looked for, in the order that is chosen.
function arrange() {
  const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean), symbol = $("symbol").value, root = $("sessions");
  const ordered = [...sessions.values()].filter((each) => each.section).sort(ORDERS[$("sort").value]);
  let shown = 0;
  for (const session of ordered) {
    session.section.hidden = !found(session, symbol, words);
    if (!session.section.hidden) shown += 1;
  }
  const sections = ordered.map((each) => each.section);
  // who is among them by keyboard keeps the place
  if (!root.contains(document.activeElement) && sections.some((each, n) => root.children[n] !== each)) root.append(...sections);
  $("shown").textContent = shown === sessions.size ? `${shown} sessions` : `${shown} of ${sessions.size} sessions`;
}

function tick(session) {
  const { info } = session, told = [], none = !info.data_version;
  session.age.textContent = session.at ? clock(session.at.as_of) : none ? "no data yet" : "data " + seconds(aged(info.staleness_ns, session.since));
  session.version.textContent = session.at ? "v" + session.at.data_version : none ? "" : "v" + info.data_version;
  if (session.at) told.push("the past");
  if (info.silent) told.push("venue silent for " + seconds(aged(info.last_seen_age_ns, session.since)));
  if (session.late) told.push("late: " + info.bars_waiting + " bars wait");
  const text = told.join("\n");
  if (session.tags.dataset.text !== text) {
    session.tags.dataset.text = text;
    session.tags.replaceChildren(...told.flatMap((tag) => [make("span", "tag bad", tag), " "]));
  }
  for (const [question, cells] of session.rows) {
    const answer = session.answers.get(question);
    cells.age.textContent = session.at ? "" : answer ? seconds(aged(answer.staleness_ns, answer.since)) : "missing";
  }
}

const handlers = {
  answer(answer) {
    take(answer);
    sample(answer.daemon_age_ns);
  },
  signal(signal) {
    signals = [...signals.filter((each) => each.signal_id !== signal.signal_id), signal].slice(-SIGNALS_KEPT);
    tellSignals();
    const session = sessions.get(signal.session);
    if (session) changed(session);
  },
  data_updated(update) {
    const session = sessions.get(update.session);
    if (!session) return;
    session.info.data_version = Math.max(session.info.data_version, update.data_version);
    session.stale = true;
  },
  lost() { behind = true; refresh(); },
};

export function entered(why) {
  for (const name of [...sessions.keys()]) drop(name);
  known = "";
  behind = true;
  build();
  return keyed(why);
}

function refresh() {
  if ($("entry").hidden) list().catch((error) => setState("not connected: " + error.message, true));
}

$("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  const told = $("ask-answer"), given = $("ask-choices").value.split(",").map((c) => c.trim()).filter(Boolean);
  told.textContent = "asking";
  try {
    const reply = await send("/v1/ask", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ session: $("ask-session").value, question: $("ask-question").value, choices: given }),
    });
    const answer = await reply.json();
    if (!reply.ok) throw new Error(answer.message);
    told.replaceChildren(make("span", "answer", answer.text || "(empty)"),
      ` \u00b7 ${sure(answer)} \u00b7 v${answer.data_version} \u00b7 data ${seconds(answer.staleness_ns)} old \u00b7 ${span(answer.latency_ns)}${answer.cached ? ", ready before" : ""} `,
      ...tags(answer));
  } catch (error) {
    told.replaceChildren(make("span", "tag bad", error.message));
  }
});

for (const id of ["symbol", "sort", "search"]) $(id).addEventListener("input", arrange);
themed(() => {
  drawn = colours();
  for (const session of sessions.values()) session.chart?.recolour(drawn);
});
listen("event=answer&event=data_updated&event=signal", {
  handlers,
  refused: entered,
  opened() { live = true; refresh(); },
  lost() { live = false; setState("not connected: what is shown gets older", true); },
});
setInterval(refresh, LISTED_EVERY_MS);
setInterval(() => {
  turns += 1;
  for (const session of sessions.values()) if (session.visible && (session.stale || turns % LABELS_EVERY === 0)) readPast(session);
}, PAST_EVERY_MS);
setInterval(() => {
  for (const session of sessions.values()) if (session.visible) tick(session);
  spark();
}, 200);
