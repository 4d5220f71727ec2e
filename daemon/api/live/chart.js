// A session's price, with a ribbon beneath it for each question; dragging over it chooses a version.

import { clock } from "./words.js";

const PRICE_PX = 110, AXIS_PX = 22, ROW_PX = 21, NAME_PX = 10, RIBBON_PX = 7;
const MAX_RIBBONS = 8;
const FONT = "11px system-ui, sans-serif";

export class Chart {
  #plot;
  #root;
  #questions;
  #colours;
  #chosen;
  #versions = [];
  #signals = [];
  #at = null;
  #resized;

  // `questions`: name and choices of each; `chosen(version)` gets the version that is pointed at, null for now.
  constructor(root, questions, colours, chosen) {
    this.#root = root;
    this.#questions = questions.slice(0, MAX_RIBBONS);
    this.#colours = colours;
    this.#chosen = chosen;
    this.#plot = new uPlot(this.#options(), [[], []], root);
    this.#resized = new ResizeObserver(() => requestAnimationFrame(() => this.#resize()));
    this.#resized.observe(root);
    root.onpointerdown = (event) => {
      if (event.button) return;
      root.setPointerCapture(event.pointerId);
      this.#point(event);
    };
    root.onpointermove = (event) => { if (root.hasPointerCapture(event.pointerId)) this.#point(event); };
    root.onkeydown = (event) => this.#key(event);
  }

  close() {
    this.#resized.disconnect();
    this.#plot.destroy();
    this.#root.onpointerdown = this.#root.onpointermove = this.#root.onkeydown = null;
  }

  // `at`: the version that is chosen, null for none.
  show(versions, signals, at) {
    this.#versions = versions;
    this.#signals = signals;
    this.#at = at;
    this.#plot.setData([versions.map((each) => each.data_version), versions.map((each) => each.close)]);
    this.#say();
  }

  recolour(colours) {
    this.#colours = colours;
    this.#plot.redraw(false, true);
  }

  // Pixels of the canvas in one of the page.
  get #ratio() {
    return this.#plot.ctx.canvas.width / this.#plot.width;
  }

  #resize() {
    const size = this.#size();
    if (this.#root.isConnected && size.width !== this.#plot.width) this.#plot.setSize(size);
  }

  #size() {
    return { width: Math.max(200, Math.floor(this.#root.getBoundingClientRect().width)), height: PRICE_PX + AXIS_PX + ROW_PX * this.#questions.length };
  }

  #options() {
    const axis = { font: FONT, stroke: () => this.#colours.dim, grid: { stroke: () => this.#colours.line, width: 1 }, ticks: { show: false } };
    const times = (_, splits) => splits.map((number) => {
      const found = this.#versions.find((each) => each.data_version >= number);
      return found ? clock(found.as_of) : "";
    });
    return {
      ...this.#size(),
      padding: [8, 28, ROW_PX * this.#questions.length, 0],
      cursor: { show: false },
      legend: { show: false },
      scales: { x: { time: false, range: (_, least, most) => [least - 0.5, most + 0.5] } },
      axes: [{ ...axis, size: AXIS_PX, space: 70, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000], values: times }, { ...axis, size: 62 }],
      series: [{}, { stroke: () => this.#colours.accent, width: 1.5, spanGaps: true, points: { show: false } }],
      hooks: { draw: [() => this.#draw()] },
    };
  }

  #draw() {
    const { ctx, bbox } = this.#plot;
    if (!this.#versions.length) return;
    ctx.save();
    this.#questions.forEach((question, row) => this.#ribbon(question, row));
    const bottom = bbox.top + bbox.height + (AXIS_PX + ROW_PX * this.#questions.length) * this.#ratio;
    ctx.fillStyle = this.#colours.warn;
    for (const signal of this.#signals) this.#mark(signal.data_version);
    if (this.#at) {
      const x = Math.round(this.#plot.valToPos(this.#at.data_version, "x", true));
      ctx.fillStyle = this.#colours.text;
      ctx.fillRect(x, bbox.top, this.#ratio, bottom - bbox.top);
    }
    ctx.restore();
  }

  // Full height: one choice is left; half: several; a line: none. The surer, the stronger. Beneath it, what a label said.
  #ribbon(question, row) {
    const { ctx, bbox } = this.#plot, px = this.#ratio, colours = this.#colours;
    const top = bbox.top + bbox.height + (AXIS_PX + ROW_PX * row) * px, base = top + (NAME_PX + RIBBON_PX) * px;
    ctx.font = `${10 * px}px system-ui, sans-serif`;
    ctx.textAlign = "left";
    ctx.textBaseline = "alphabetic";
    ctx.fillStyle = colours.dim;
    ctx.fillText(question.name, bbox.left, top + (NAME_PX - 2) * px, bbox.width);
    const edge = (number) => Math.round(this.#plot.valToPos(number, "x", true));
    for (const version of this.#versions) {
      const answer = version.by.get(question.name);
      if (!answer) continue;
      const x = edge(version.data_version - 0.5), width = Math.max(1, edge(version.data_version + 0.5) - x);
      const left = answer.choice_set?.length ?? 1;
      const height = RIBBON_PX * px * (left === 1 ? 1 : left ? 0.5 : 0.2);
      ctx.globalAlpha = 0.25 + 0.75 * (answer.probability ?? 0.7);
      ctx.fillStyle = colours.choices[question.choices.indexOf(answer.text)] ?? colours.dim;
      ctx.fillRect(x, base - height, width, height);
      ctx.globalAlpha = 1;
      if (answer.label === undefined) continue;
      const right = answer.label === answer.text;
      ctx.fillStyle = right ? colours.good : colours.bad;
      ctx.fillRect(x, base + px, width, (right ? 1 : 2.5) * px);
    }
  }

  #mark(number) {
    const { ctx, bbox } = this.#plot, px = this.#ratio, x = this.#plot.valToPos(number, "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width) return;
    ctx.beginPath();
    ctx.moveTo(x - 4 * px, bbox.top);
    ctx.lineTo(x + 4 * px, bbox.top);
    ctx.lineTo(x, bbox.top + 7 * px);
    ctx.fill();
    ctx.fillRect(x - px / 2, bbox.top, px, bbox.height);
  }

  #point(event) {
    if (!this.#versions.length) return;
    this.#chosen(this.#versions[this.#plot.posToIdx(event.clientX - this.#plot.over.getBoundingClientRect().left)]);
  }

  #key(event) {
    const newest = this.#versions.length - 1;
    const now = this.#at ? this.#versions.findIndex((each) => each.data_version === this.#at.data_version) : newest;
    const to = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: newest + 1, Escape: newest + 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.#chosen(this.#versions[Math.max(0, to)] ?? null);
  }

  #say() {
    const shown = this.#at ?? this.#versions.at(-1), root = this.#root;
    root.setAttribute("aria-valuemin", this.#versions[0]?.data_version ?? 0);
    root.setAttribute("aria-valuemax", this.#versions.at(-1)?.data_version ?? 0);
    root.setAttribute("aria-valuenow", shown?.data_version ?? 0);
    root.setAttribute("aria-valuetext", shown ? `version ${shown.data_version}, ${clock(shown.as_of)}, ${shown.close ?? "no price"}` : "no version yet");
  }
}
