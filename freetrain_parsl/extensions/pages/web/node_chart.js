// Nodes over time, on a canvas: training jobs in colours, others grey. Zoom by wheel, keys or buttons; drag moves.
import { colourOf, make, words } from "./parts.js";

const IDLE = 1, OTHERS = 2, OURS = 3;
const LABELS = 76, AXIS = 22, TALLEST = 420, ROW = 16, LANE = 9;
const SPANS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 10800, 21600, 43200, 86400, 172800, 604800];

export function createNodeChart(element, store, select) {
  const canvas = make("canvas", { tabindex: 0, role: "img", "aria-describedby": null });
  const tip = make("div", { class: "ft-tip", hidden: true });
  const buttons = make("div", { class: "ft-tools", role: "group", "aria-label": "Zoom" });
  const legend = make("ul", { class: "ft-legend" });
  const note = make("p", { class: "ft-note" });
  const frame = make("div", { class: "ft-chart" }, canvas, tip);
  element.append(make("section", { "aria-label": "Nodes over time" },
    make("div", { class: "ft-head" }, make("h2", {}, "Nodes over time"), buttons), legend, frame, note));

  let from = 0, to = null; // shown seconds; to = null: until now
  let low = 0, high = null; // shown rows; high = null: all
  let selected = null;
  let order = [], place = [], ordered = -1;

  const span = () => [from, to ?? Math.max(1, store.run?.now ?? 1)];
  const rowSpan = () => [low, high ?? Math.max(1, order.length)];
  const zoomTime = (factor, at = 0.5) => {
    const [begin, end] = span();
    const whole = Math.max(1, store.run.now);
    const length = Math.min(whole, Math.max(10, (end - begin) * factor));
    const middle = begin + (end - begin) * at;
    setTime(middle - length * at, length);
  };
  const setTime = (begin, length) => {
    const whole = Math.max(1, store.run.now);
    from = Math.max(0, Math.min(begin, whole - length));
    to = from + length >= whole - 0.5 && begin <= 0 ? null : from + length;
    draw();
  };
  const zoomRows = (factor, at = 0.5) => {
    const [begin, end] = rowSpan();
    const length = Math.min(order.length, Math.max(4, (end - begin) * factor));
    setRows(begin + (end - begin - length) * at, length);
  };
  const setRows = (begin, length) => {
    low = Math.max(0, Math.min(begin, order.length - length));
    high = length >= order.length ? null : low + length;
    draw();
  };
  const everything = () => { from = low = 0; to = high = null; draw(); };
  const lastHour = () => setTime(Math.max(0.1, store.run.now - 3600), Math.min(3600, store.run.now));
  for (const [text, name, act] of [["+", "Zoom in", () => zoomTime(0.5)], ["−", "Zoom out", () => zoomTime(2)],
    ["↕+", "Fewer nodes", () => zoomRows(0.5)], ["↕−", "More nodes", () => zoomRows(2)], ["1 h", "Last hour", lastHour], ["All", "Show everything", everything]]) {
    const button = make("button", { type: "button", "aria-label": name, title: name }, text);
    button.addEventListener("click", () => store.run && act());
    buttons.append(button);
  }
  const keys = {
    "+": () => zoomTime(0.5), "=": () => zoomTime(0.5), "-": () => zoomTime(2), "0": everything,
    ArrowLeft: () => pan(-0.2, 0), ArrowRight: () => pan(0.2, 0), ArrowUp: () => pan(0, -0.2), ArrowDown: () => pan(0, 0.2),
    PageUp: () => zoomRows(0.5), PageDown: () => zoomRows(2),
  };
  const pan = (x, y) => {
    const [begin, end] = span();
    const [top, bottom] = rowSpan();
    if (x) setTime(Math.max(0.1, begin + x * (end - begin)), end - begin);
    if (y) setRows(top + y * (bottom - top), bottom - top);
  };
  canvas.addEventListener("keydown", (event) => {
    if (!(event.key in keys) || event.ctrlKey || event.metaKey || event.altKey || !store.run) return;
    event.preventDefault();
    keys[event.key]();
  });
  const inside = (event) => {
    const box = canvas.getBoundingClientRect();
    return [(event.clientX - box.left - LABELS) / (box.width - LABELS), (event.clientY - box.top) / (box.height - AXIS)];
  };
  canvas.addEventListener("wheel", (event) => {
    if (!(event.ctrlKey || event.shiftKey) || !store.run) return; // the page scrolls
    event.preventDefault();
    const [x, y] = inside(event);
    const factor = (event.deltaY || event.deltaX) > 0 ? 1.25 : 0.8;
    if (event.shiftKey) zoomRows(factor, clamp(y));
    else zoomTime(factor, clamp(x));
  }, { passive: false });
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "touch" || !store.run) return;
    drag = { at: inside(event), time: span(), rows: rowSpan(), moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!store.run) return;
    const [x, y] = inside(event);
    if (drag) {
      const [dx, dy] = [x - drag.at[0], y - drag.at[1]];
      drag.moved ||= Math.abs(dx) + Math.abs(dy) > 0.005;
      const [time, rows] = [drag.time[1] - drag.time[0], drag.rows[1] - drag.rows[0]];
      if (drag.moved && to !== null) setTime(Math.max(0.1, drag.time[0] - dx * time), time);
      if (drag.moved && high !== null) setRows(drag.rows[0] - dy * rows, rows);
    } else describe(x, y, event);
  });
  canvas.addEventListener("pointerup", (event) => {
    const [x, y] = inside(event);
    const found = drag && !drag.moved ? whatIsAt(x, y) : null;
    drag = null;
    if (found?.training !== undefined) select(found.training);
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });

  const clamp = (share) => Math.min(1, Math.max(0, share));
  // The parts of nodes that a fragment has: calls act(node, first lane, number of lanes); of a whole node, 0 and its slots.
  const eachPart = (parts, i, act) => {
    const slots = parts.slots[i];
    for (let run = 0; run < parts.nodes[i].length; run += 2) {
      const end = parts.nodes[i][run] + parts.nodes[i][run + 1];
      for (let unit = parts.nodes[i][run]; unit < end;) {
        const node = Math.floor(unit / slots);
        const next = Math.min(end, (node + 1) * slots);
        act(node, unit - node * slots, next - unit);
        unit = next;
      }
    }
  };
  const whatIsAt = (x, y) => {
    if (x < 0 || x > 1 || y < 0 || y > 1) return null;
    const [begin, end] = span();
    const [top, bottom] = rowSpan();
    const time = begin + x * (end - begin);
    const row = top + y * (bottom - top);
    const node = order[Math.floor(row)];
    if (node === undefined) return null;
    const parts = store.table("fragments");
    for (let i = store.count("fragments") - 1; i >= 0; i--) {
      if (parts.begin[i] > time || (parts.end[i] ?? Infinity) < time) continue;
      const lane = (row % 1) * parts.slots[i];
      let lanes = null;
      eachPart(parts, i, (one, first, number) => { if (one === node && lane >= first && lane < first + number) lanes = { first, number, slots: parts.slots[i] }; });
      if (lanes) return { node, time, training: parts.training[i], lanes };
    }
    const spans = store.table("spans");
    for (let i = store.count("spans") - 1; i >= 0; i--) {
      if (spans.node[i] === node && spans.begin[i] <= time && (spans.end[i] ?? Infinity) >= time) return { node, time, state: spans.state[i] };
    }
    return { node, time };
  };
  const describe = (x, y, event) => {
    const found = whatIsAt(x, y);
    tip.hidden = !found;
    if (!found) return;
    const who = found.training !== undefined ? store.table("trainings").name[found.training]
      : { [IDLE]: "idle", [OTHERS]: "other users, or down", [OURS]: "ours, without a training job" }[found.state] ?? "unknown";
    const kind = store.table("nodes").kind[found.node];
    const { first, number, slots } = found.lanes ?? {};
    const part = number < slots ? `/${first}${number > 1 ? `-${first + number - 1}` : ""}` : "";
    tip.textContent = `${store.table("nodes").name[found.node]}${part}${kind ? ` (${kind})` : ""}, ${words.clock(store, found.time)}: ${who}`;
    const box = frame.getBoundingClientRect();
    const left = event.clientX - box.left;
    tip.style.left = `${Math.max(0, Math.min(left + 12, box.width - tip.offsetWidth - 4))}px`;
    tip.style.top = `${event.clientY - box.top + 16}px`;
  };

  const arrange = () => {
    if (ordered === store.nodesVersion) return;
    ordered = store.nodesVersion;
    const names = store.table("nodes").name ?? [];
    const collator = new Intl.Collator("en", { numeric: true });
    order = names.map((_, i) => i).sort((a, b) => collator.compare(names[a], names[b]));
    order.forEach((node, row) => { place[node] = row; });
  };

  const draw = () => {
    if (!store.run) return;
    arrange();
    const width = frame.clientWidth;
    if (!width) return;
    const shared = store.run.shared_slots;
    const body = Math.min(TALLEST, Math.max(48, (shared > 1 ? Math.max(ROW, LANE * shared) : ROW) * order.length));
    const scale = globalThis.devicePixelRatio || 1;
    canvas.style.height = `${body + AXIS}px`;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round((body + AXIS) * scale);
    const style = getComputedStyle(element.closest(".ft-run"));
    const colour = (name) => style.getPropertyValue(`--ft-${name}`).trim();
    const pen = canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, body + AXIS);
    const [begin, end] = span();
    const [top, bottom] = rowSpan();
    const tall = body / (bottom - top);
    const gap = tall > 6 ? 1 : 0;
    const x = (time) => LABELS + ((time - begin) / (end - begin)) * (width - LABELS);
    const bar = (node, first, last, inset = 0, part = 1, share = 0) => {
      const y = (place[node] - top) * tall;
      if (y + tall < 0 || y > body) return;
      const height = (tall - gap - 2 * inset) * part;
      pen.fillRect(first, y + gap / 2 + inset + share * (tall - gap - 2 * inset), Math.max(last - first, 0.5), Math.max(height, 0.35));
    };
    pen.save();
    pen.beginPath();
    pen.rect(LABELS, 0, width - LABELS, body);
    pen.clip();
    pen.fillStyle = colour("blank");
    pen.fillRect(LABELS, 0, width - LABELS, body);
    const spans = store.table("spans");
    const fills = { [IDLE]: colour("idle"), [OTHERS]: colour("others"), [OURS]: colour("ours") };
    const now = store.run.now;
    for (const state of [IDLE, OTHERS, OURS]) {
      pen.fillStyle = fills[state];
      for (let i = 0; i < store.count("spans"); i++) {
        if (spans.state[i] !== state) continue;
        const last = spans.end[i] ?? now;
        if (last >= begin && spans.begin[i] <= end) bar(spans.node[i], x(spans.begin[i]), x(last));
      }
    }
    const parts = store.table("fragments");
    const sizes = {}; // members that share a node
    for (let i = 0; i < store.count("fragments"); i++) sizes[parts.array[i]] = Math.max(sizes[parts.array[i]] ?? 1, parts.lane[i] + 1);
    for (let i = 0; i < store.count("fragments"); i++) {
      const last = parts.end[i] ?? now;
      if (last < begin || parts.begin[i] > end) continue;
      pen.globalAlpha = selected === null || selected === parts.training[i] ? 1 : 0.18;
      pen.fillStyle = colourOf(parts.training[i]);
      const lanes = sizes[parts.array[i]];
      eachPart(parts, i, (node, first, number) => {
        const part = number / parts.slots[i];
        bar(node, x(parts.begin[i]), x(last), gap, part / lanes, first / parts.slots[i] + (parts.lane[i] / lanes) * part);
      });
      if (parts.failure[i] && parts.end[i] !== null) {
        pen.fillStyle = colour("failure");
        if (parts.slots[i] > 1) eachPart(parts, i, (node, first, number) => bar(node, x(last) - 1, x(last) + 1, gap, number / parts.slots[i], first / parts.slots[i]));
        else for (let run = 0; run < parts.nodes[i].length; run += 2) bar(parts.nodes[i][run], x(last) - 1, x(last) + 1);
      }
    }
    pen.globalAlpha = 1;
    pen.restore();
    pen.font = `${style.getPropertyValue("--ft-small") || "12px"} ${style.fontFamily}`;
    pen.fillStyle = colour("quiet");
    drawNames(pen, top, bottom, tall, body);
    drawAxis(pen, begin, end, x, body, width, colour("rule"));
    canvas.setAttribute("aria-label", summary());
    legend.replaceChildren(...[["idle", "idle"], ["others", "other users, or down"], ["ours", "ours: starting, or between training jobs"]].map(([name, text]) =>
      make("li", {}, make("span", { class: `ft-swatch ft-fill-${name}` }), text)), make("li", {}, make("span", { class: "ft-swatch ft-fill-trainings" }), "a training job, in its colour"));
    note.textContent = order.length ? "Ctrl and wheel, or + and −, zoom in time; Shift and wheel, or Page Up and Page Down, in nodes; arrows or dragging move; 0 shows everything. Nodes that were never idle or ours are not known."
      : "No node is known yet.";
  };
  const drawNames = (pen, top, bottom, tall, body) => {
    const names = store.table("nodes").name ?? [];
    const step = Math.max(1, Math.ceil(13 / tall));
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (let row = Math.ceil(top / step) * step; row < Math.min(bottom, order.length); row += step) {
      const y = (row - top + 0.5) * tall;
      if (y < 4 || y > body - 3) continue;
      pen.fillText(fit(pen, names[order[row]], LABELS - 8), LABELS - 6, y);
    }
  };
  const fit = (pen, text, width) => {
    if (pen.measureText(text).width <= width) return text;
    let cut = text;
    while (cut && pen.measureText(`…${cut}`).width > width) cut = cut.slice(1);
    return `…${cut}`;
  };
  const drawAxis = (pen, begin, end, x, body, width, rule) => {
    const wanted = Math.max(2, (width - LABELS) / 110);
    const step = SPANS.find((one) => (end - begin) / one <= wanted) ?? SPANS.at(-1);
    const offset = new Date(1000 * store.run.origin).getTimezoneOffset() * 60;
    const first = Math.ceil((store.run.origin - offset + begin) / step) * step - store.run.origin + offset;
    pen.textAlign = "center";
    pen.textBaseline = "top";
    pen.strokeStyle = rule;
    for (let time = first; time <= end; time += step) {
      const text = words.clock(store, time);
      const half = pen.measureText(text).width / 2;
      pen.beginPath();
      pen.moveTo(x(time), body);
      pen.lineTo(x(time), body + 4);
      pen.stroke();
      pen.fillText(step >= 60 ? text.replace(/:00$/, "") : text, Math.min(x(time), width - half), body + 7);
    }
  };
  const summary = () => {
    const rows = store.table("trainings");
    const running = [];
    for (let i = 0; i < store.count("trainings"); i++) if (rows.nodes[i]) running.push(`${rows.name[i]} on ${words.count(rows.nodes[i], store.run.shared_slots > 1 ? "accelerator" : "node")}`);
    const shown = running.slice(0, 8).join(", ") + (running.length > 8 ? ` and ${running.length - 8} more` : "");
    return `${words.count(order.length, "node")} over ${words.duration(store.run.now)}. ${shown ? `Now training: ${shown}.` : "No training runs now."} The tables below have the same content.`;
  };
  return { draw, select(training) { selected = training; } };
}
