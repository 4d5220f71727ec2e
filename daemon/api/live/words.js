// Words and nodes of both pages. Names, answers and errors come from outside: they are set as text, never as markup.

export const $ = (id) => document.getElementById(id);

export function make(tag, name, text) {
  const node = document.createElement(tag);
  if (name) node.className = name;
  if (text !== undefined) node.textContent = text;
  return node;
}

export function seconds(ns) {
  const s = ns / 1e9;
  if (s < 100) return s.toFixed(1) + " s";
  if (s < 36000) return Math.floor(s / 60) + " min";
  return s < 8.64e6 ? Math.floor(s / 3600) + " h" : Math.floor(s / 86400) + " d";
}

export const span = (ns) => ns < 1e6 ? (ns / 1e3).toFixed(0) + " \u00b5s" : ns < 1e10 ? (ns / 1e6).toFixed(1) + " ms" : seconds(ns);
export const percent = (share) => (share * 100).toFixed(1) + " %";

// Of event time, in UTC.
export const clock = (ns) => new Date(ns / 1e6).toISOString().slice(11, 19);
export const moment = (ns) => new Date(ns / 1e6).toISOString().slice(0, 19).replace("T", " ");

const none = (value) => value === null || value === undefined;

export const sure = (answer) => none(answer.probability) ? "gap " + answer.logit_gap.toFixed(2) : percent(answer.probability);
export const surely = (answer) => none(answer.probability)
  ? "best logit minus the second; no probability: " + (answer.uncalibrated ?? "no calibration").replaceAll("_", " ") : "calibrated probability of this choice";

export function setOf(answer) {
  if (none(answer.choice_set)) return "";
  return answer.choice_set.length ? answer.choice_set.join(", ") : "none";
}

const BAD = new Set(["stale", "silent", "gap"]);

// What there is to say of an answer beside it, as tags with blanks between.
export function tags(answer) {
  const found = [];
  if (!none(answer.label)) {
    const right = answer.label === answer.text;
    found.push(make("span", right ? "tag good" : "tag bad", right ? "right" : "wrong: " + answer.label));
  }
  if (!none(answer.act)) found.push(make("span", answer.act ? "tag good" : "tag", answer.act ? "act" : abstained(answer)));
  for (const flag of answer.flags || []) found.push(make("span", BAD.has(flag) ? "tag bad" : "tag", flag.replaceAll("_", " ")));
  return found.flatMap((tag) => [tag, " "]);
}

const abstained = ({ abstain_reason: reason }) => "do not act" + (reason ? ": " + reason.replaceAll("_", " ") : "");

export function setState(text, bad) {
  $("state").textContent = text;
  $("state").className = bad ? "tag bad" : "dim";
}
