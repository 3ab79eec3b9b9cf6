// The parts that the views share: the tables of a run, elements, words, colours.

// As freetrain_parsl.report.colours; grey is reserved for other users' jobs.
const COLOURS = ["#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#0072B2", "#D55E00", "#F0E442", "#7B4FA3", "#8C6D31", "#17BECF", "#B5CF6B"];

export const colourOf = (training) => COLOURS[training % COLOURS.length];

// The tables of a run, by column and row number, and its curves.
export class Store {
  constructor() { this.clear(); }

  clear() {
    this.run = null;
    this.tables = {};
    this.curves = new Map(); // "training name" -> {training, name, step, value}
    this.nodesVersion = 0;
  }

  apply(delta) {
    if (delta.reset) this.clear();
    this.run = delta.run;
    for (const [name, change] of Object.entries(delta)) {
      if (!Array.isArray(change?.row)) continue;
      const { row, first, ...columns } = change;
      const table = this.tables[name] ?? (this.tables[name] = { first: 0, count: 0, columns: {} });
      for (const [column, values] of Object.entries(columns)) {
        const target = table.columns[column] ?? (table.columns[column] = []);
        if (row[0] === target.length && row.length === row[row.length - 1] - row[0] + 1) {
          for (const value of values) target.push(value);
        } else {
          for (let i = 0; i < row.length; i++) target[row[i]] = values[i];
        }
        for (let i = table.first; i < first; i++) delete target[i];
      }
      table.count = Math.max(table.count, row[row.length - 1] + 1);
      table.first = first;
      if (name === "nodes") this.nodesVersion += 1;
    }
    for (const { training, name, from, step, value } of delta.curves) {
      const key = `${training} ${name}`;
      const curve = this.curves.get(key) ?? { training, name, step: [], value: [] };
      curve.step.splice(from, Infinity, ...step);
      curve.value.splice(from, Infinity, ...value);
      this.curves.set(key, curve);
    }
  }

  table(name) { return this.tables[name]?.columns ?? {}; }
  count(name) { return this.tables[name]?.count ?? 0; }
  first(name) { return this.tables[name]?.first ?? 0; }
}

// Make an HTML element; text is never markup.
export const make = (tag, attributes = {}, ...children) => dress(document.createElement(tag), attributes, children);
export const makeSvg = (tag, attributes = {}, ...children) =>
  dress(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

const dress = (element, attributes, children) => {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null) element.setAttribute(name, String(value));
  }
  element.append(...children);
  return element;
};

const two = (number) => String(number).padStart(2, "0");

export const words = {
  number(value) {
    const size = Math.abs(value);
    if (size >= 1000) return Math.round(value).toLocaleString("en");
    if (size === 0 || size >= 0.001) return String(Number(value.toPrecision(size >= 100 ? 4 : 3)));
    return value.toExponential(1);
  },
  percent: (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`,
  count: (number, thing) => `${number.toLocaleString("en")} ${thing}${number === 1 ? "" : "s"}`,
  duration(seconds) {
    const s = Math.round(seconds);
    if (s < 120) return `${s} s`;
    if (s < 7200) return `${Math.round(s / 60)} min`;
    if (s < 172800) return `${Math.floor(s / 3600)} h ${two(Math.round((s % 3600) / 60) % 60)} min`;
    return `${(s / 86400).toFixed(1)} d`;
  },
  // The time of day on this machine, with the date if the run took longer than a day.
  clock(store, time) {
    if (time === null || time === undefined) return "";
    const date = new Date(1000 * (store.run.origin + time));
    const day = store.run.now > 86400 ? `${two(date.getMonth() + 1)}-${two(date.getDate())} ` : "";
    return `${day}${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
  },
  date(store, time) {
    const date = new Date(1000 * (store.run.origin + time));
    return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${two(date.getHours())}:${two(date.getMinutes())}`;
  },
};

// Round steps for an axis over a range: about `wanted` of them.
export const ticks = (low, high, wanted, steps = [1, 2, 5, 10]) => {
  const rough = (high - low) / wanted || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * steps.find((one) => one * power >= rough);
  const found = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-9; tick += step) found.push(tick);
  return found;
};
