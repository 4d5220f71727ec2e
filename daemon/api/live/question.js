// A question's page: how good its answers were, by their labels, over the versions that the daemon keeps.

import { colours, themed } from "./theme.js";
import { entered, get, pause } from "./wire.js";
import { $, make, moment, percent, setState } from "./words.js";

const REFRESH_MS = 10000, SIDE = 300, EDGE = 36;
const REGIMES = { calm: "calm third", usual: "usual third", volatile: "volatile third", rising: "rising", falling: "falling" };
const name = decodeURIComponent(location.pathname.split("/").pop());
let drawn = colours(), plots = [], found = [];

// Tallies of several sessions are one.
export function sum(tallies) {
  const total = { answers: 0, labels: 0, right: 0, covered: 0, sets: 0, probability: null };
  let weighted = 0;
  for (const each of tallies) {
    for (const member of ["answers", "labels", "right", "covered", "sets"]) total[member] += each[member];
    weighted += (each.probability ?? 0) * each.labels;
  }
  if (total.labels) total.probability = weighted / total.labels;
  return total;
}

export const accuracy = (tally) => tally.labels ? tally.right / tally.labels : null;

// 95 % interval of a share (Wilson, 1927).
export function interval(right, labels) {
  const z = 1.96, p = right / labels, n = labels, half = z * Math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)), scale = 1 + z * z / n;
  const middle = p + z * z / (2 * n);
  return [Math.max(0, (middle - half) / scale), Math.min(1, (middle + half) / scale)];
}

function grouped(members, key, value) {
  const groups = new Map();
  for (const each of members) groups.set(each[key], [...(groups.get(each[key]) ?? []), value(each)]);
  return groups;
}

const share = (value) => value === null ? "" : percent(value);

function row(...cells) {
  const made = make("tr");
  cells.forEach((text, n) => {
    const cell = made.appendChild(make(n ? "td" : "th", n ? "n" : "", text));
    if (!n) cell.scope = "row";
  });
  return made;
}

const judged = (tally) => [tally.answers, tally.labels, share(accuracy(tally)), share(tally.probability)];

function show() {
  const chosen = $("session").value, asked = found.filter((each) => !chosen || each.session === chosen);
  const total = sum(asked.map((each) => each.tally));
  const bins = [...grouped(asked.flatMap((each) => each.reliability), "least", (each) => each.tally)].map(([least, tallies]) => ({ least, ...sum(tallies) }));
  const error = total.labels ? bins.reduce((far, bin) => far + bin.labels * Math.abs(bin.probability - accuracy(bin)), 0) / total.labels : null;
  const ratios = asked.map((each) => each.gap_ratio).filter((each) => each !== null);
  const facts = [
    ["answers", total.answers], ["with a label", total.labels], ["right", share(accuracy(total))], ["mean probability", share(total.probability)],
    ["calibration error", share(error)], ["choice sets that had the label", total.sets ? percent(total.covered / total.sets) : ""],
    ["logit gap over that at calibration", ratios.length ? (ratios.reduce((a, b) => a + b) / ratios.length).toFixed(2) : ""],
  ];
  $("facts").replaceChildren(...facts.flatMap(([term, value]) => [make("dt", "", term), make("dd", "n", value === "" ? "not known" : String(value))]));
  $("unlabelled").hidden = total.labels > 0;
  const regimes = grouped(asked.flatMap((each) => each.regimes), "name", (each) => each.tally);
  $("regimes").replaceChildren(...Object.keys(REGIMES).filter((each) => regimes.has(each)).map((each) => row(REGIMES[each], ...judged(sum(regimes.get(each))))));
  $("by-session").replaceChildren(...asked.map((each) => row(each.session, ...judged(each.tally))));
  reliability(bins);
  drift(asked.flatMap((each) => each.ages));
}

function shape(tag, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

// A point a tenth: how often its answers were right, with its interval, over their mean probability. Right on the diagonal is calibrated.
function reliability(bins) {
  const inner = SIDE - EDGE - 14, x = (p) => EDGE + p * inner, y = (p) => 8 + (1 - p) * inner;
  const nodes = [shape("line", { x1: x(0), y1: y(0), x2: x(1), y2: y(1), class: "diagonal" })];
  for (const p of [0, 0.25, 0.5, 0.75, 1]) {
    nodes.push(shape("line", { x1: x(p), y1: y(0), x2: x(p), y2: y(1), class: "grid" }), shape("line", { x1: x(0), y1: y(p), x2: x(1), y2: y(p), class: "grid" }));
    nodes.push(shape("text", { x: x(p), y: y(0) + 14, "text-anchor": "middle" }, p * 100), shape("text", { x: x(0) - 5, y: y(p) + 4, "text-anchor": "end" }, p * 100));
  }
  nodes.push(shape("text", { x: x(0.5), y: SIDE - 2, "text-anchor": "middle" }, "probability, %"));
  const most = Math.max(1, ...bins.map((bin) => bin.labels));
  for (const bin of bins) {
    const [least, top] = interval(bin.right, bin.labels), at = x(bin.probability);
    const point = shape("circle", { cx: at, cy: y(accuracy(bin)), r: 3 + 6 * Math.sqrt(bin.labels / most), class: "point" });
    point.append(shape("title", {}, `${share(accuracy(bin))} of ${bin.labels} right at ${share(bin.probability)}`));
    nodes.push(shape("line", { x1: at, y1: y(least), x2: at, y2: y(top), class: "interval" }), point);
  }
  $("reliability").replaceChildren(...nodes);
  $("bins").replaceChildren(...bins.sort((a, b) => a.least - b.least).map((bin) => row(`${Math.round(bin.least * 100)} to ${Math.round(bin.least * 100 + 10)} %`, ...judged(bin))));
}

function drift(blocks) {
  const ages = [...grouped(blocks, "versions_ago", (each) => each)].sort(([a], [b]) => b - a).map(([ago, all]) => {
    const answers = all.reduce((n, each) => n + each.tally.answers, 0);
    return { ago, as_of: Math.max(...all.map((each) => each.as_of)), gap: all.reduce((n, each) => n + each.mean_gap * each.tally.answers, 0) / answers, tally: sum(all.map((each) => each.tally)) };
  });
  for (const plot of plots) plot.destroy();
  const x = ages.map((each) => -each.ago);
  plots = ages.length ? [
    line($("drift"), [0, 1], percent, [x, ages.map((each) => accuracy(each.tally)), ages.map((each) => each.tally.probability)], [["right", "good"], ["mean probability", "accent"]]),
    line($("gaps"), [null, null], (value) => value.toFixed(2), [x, ages.map((each) => each.gap)], [["mean logit gap", "warn"]]),
  ] : [];
  $("ages").replaceChildren(...ages.map((each) => row(String(each.ago), moment(each.as_of), ...judged(each.tally), each.gap.toFixed(2))));
}

function line(root, [least, most], told, data, series) {
  const axis = { font: "11px system-ui, sans-serif", stroke: () => drawn.dim, grid: { stroke: () => drawn.line, width: 1 }, ticks: { show: false } };
  const legend = series.map(([text, colour]) => make("span", "key " + colour, text));
  root.replaceChildren(make("p", "legend"), make("div"));
  root.firstChild.append(...legend);
  return new uPlot({
    width: Math.max(200, Math.floor(root.getBoundingClientRect().width)), height: 150,
    cursor: { show: false }, legend: { show: false },
    scales: { x: { time: false }, y: { range: (_, low, high) => [least ?? Math.min(0, low), most ?? (high || 1)] } },
    axes: [{ ...axis, values: (_, splits) => splits.map((each) => `${-each} ago`) }, { ...axis, size: 62, values: (_, splits) => splits.map(told) }],
    series: [{}, ...series.map(([, colour]) => ({ stroke: () => drawn[colour], width: 1.5, points: { show: true, size: 6 } }))],
  }, data, root.lastChild);
}

async function read() {
  const [quality, questions] = await Promise.all([get(`/v1/quality/${encodeURIComponent(name)}`), get("/v1/questions")]);
  found = quality.sessions;
  const asked = questions.sessions.flatMap((each) => each.questions).find((each) => each.name === name || each.text === name);
  $("text").textContent = asked ? [asked.text, asked.choices.join(", ")].filter(Boolean).join(" \u00b7 ") : "no session asks this question";
  const select = $("session"), chosen = select.value, names = found.map((each) => each.session);
  select.replaceChildren(new Option(`all ${names.length}`, ""), ...names.map((each) => new Option(each, each)));
  if (names.includes(chosen)) select.value = chosen;
  show();
  setState(`the newest ${Math.max(0, ...found.map((each) => each.versions))} versions`, false);
}

document.title = `${name} \u00b7 Foretick`;
$("name").textContent = name;
$("session").addEventListener("input", show);
addEventListener("resize", () => show());
themed(() => {
  drawn = colours();
  for (const plot of plots) plot.redraw(false, true);
});
(async () => {
  for (;;) {
    try {
      await read();
    } catch (error) {
      if (error.status === 401) {
        await entered(error.message);
        continue;
      }
      setState("not connected: " + error.message, true);
    }
    await pause(REFRESH_MS);
  }
})();
