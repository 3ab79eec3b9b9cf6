// Loss and metrics against steps: one chart for each name, one line for each training.
import { colourOf, make, makeSvg, ticks, words } from "./parts.js";

const HEIGHT = 220, LEFT = 52, BOTTOM = 24, MOST_LINES = 40;
const TWO_COLUMNS = 860, GAP = 24; // pixels; as in the style sheet

export function createCurves(element, store) {
  const note = make("p", { class: "ft-note" });
  const charts = make("div", { class: "ft-curves" });
  element.append(note, charts);
  let selected = null;
  let width = 640;

  const draw = () => {
    const room = charts.clientWidth;
    charts.classList.toggle("ft-two", room >= TWO_COLUMNS);
    width = room >= TWO_COLUMNS ? (room - GAP) / 2 : Math.max(240, room);
    const names = new Map();
    for (const curve of store.curves.values()) {
      if (curve.name === "epoch") continue; // it is a count of steps
      if (!names.has(curve.name)) names.set(curve.name, []);
      names.get(curve.name).push(curve);
    }
    const trainings = store.table("trainings");
    const chosen = selected !== null && [...store.curves.values()].some((curve) => curve.training === selected);
    note.textContent = !names.size ? "No values were reported so far."
      : chosen ? `Of ${trainings.name[selected]} in colour; choose it again to see all alike.`
        : "Choose a training job in the first table to highlight its lines.";
    const sorted = [...names].sort(([a], [b]) => (b === "loss") - (a === "loss") || a.localeCompare(b));
    charts.replaceChildren(...sorted.map(([name, curves]) => chart(name, curves, trainings, chosen)));
  };

  const chart = (name, curves, trainings, chosen) => {
    const shown = chosen ? [...curves.filter((curve) => curve.training !== selected), ...curves.filter((curve) => curve.training === selected)] : curves;
    const lines = shown.slice(-MOST_LINES);
    const values = lines.flatMap((curve) => curve.value);
    const last = Math.max(1, ...lines.map((curve) => curve.step.at(-1)));
    let [low, high] = [values.reduce((a, b) => Math.min(a, b), Infinity), values.reduce((a, b) => Math.max(a, b), -Infinity)];
    if (low === high) [low, high] = [low - 0.5, high + 0.5];
    const x = (step) => LEFT + (step / last) * (width - LEFT - 8);
    const y = (value) => HEIGHT - BOTTOM - ((value - low) / (high - low)) * (HEIGHT - BOTTOM - 8);
    const marks = [];
    for (const tick of ticks(low, high, 5)) {
      marks.push(makeSvg("line", { x1: LEFT, x2: width - 8, y1: y(tick), y2: y(tick), class: "ft-grid" }),
        makeSvg("text", { x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" }, words.number(tick)));
    }
    for (const tick of ticks(0, last, 4).slice(1)) {
      marks.push(makeSvg("text", { x: Math.min(x(tick), width - 24), y: HEIGHT - 6, "text-anchor": "middle" }, words.number(tick)));
    }
    const paths = lines.map((curve) => makeSvg("polyline", {
      points: curve.step.map((step, i) => `${x(step).toFixed(1)},${y(curve.value[i]).toFixed(1)}`).join(" "),
      fill: "none", stroke: colourOf(curve.training), class: chosen && curve.training !== selected ? "ft-line ft-faint" : "ft-line",
    }, makeSvg("title", {}, `${trainings.name?.[curve.training] ?? ""}: ${words.number(curve.value.at(-1))}`)));
    const some = lines.slice(-6).map((curve) => `${trainings.name?.[curve.training] ?? ""} ${words.number(curve.value.at(-1))}`).join(", ");
    const picture = makeSvg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": `${name} against steps; last values: ${some}` }, ...marks, ...paths);
    const cut = shown.length > lines.length ? `, ${lines.length} of ${shown.length} training jobs` : "";
    return make("figure", {}, make("figcaption", {}, make("strong", {}, name), ` against steps${cut}`), picture);
  };
  return { draw, select(training) { selected = training; } };
}
