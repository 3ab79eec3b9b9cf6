// The view of a run: createRunView(element) -> {update(delta), destroy()}.
//
// A delta is what freetrain_parsl.extensions.pages.run_view.RunView.since returns; `reset` begins anew. Text from the run becomes
// text nodes only, never markup. There are no inline styles in markup, so that a strict Content-Security-Policy holds.
import { createNodeChart } from "./node_chart.js";
import { createCurves } from "./curves.js";
import { colourOf, make, Store, words } from "./parts.js";

const STATES = ["running", "waiting", "failed", "cancelled", "finished"];
const LEVELS = ["repair", "failure", "error"];
const PHASES = {
  starting: "starting, until the workers are ready",
  training: "training",
  between: "ready, without a training job",
  leaving: "leaving: saving, and ending the block",
};
const ROWS_SHOWN = 100;

export function createRunView(element) {
  const store = new Store();
  const root = make("div", { class: "ft-run" });
  element.append(root);

  const title = make("h1");
  const state = make("span", { class: "ft-badge" });
  const lede = make("p", { class: "ft-lede" });
  const problem = make("p", { class: "ft-problem", role: "alert", hidden: true });
  const cards = make("dl", { class: "ft-cards" });
  const charts = make("div");
  root.append(make("header", {}, make("div", { class: "ft-title" }, title, state), lede), problem, cards, charts);

  let selected = null;
  const select = (training) => {
    selected = selected === training ? null : training;
    chart.select(selected);
    curves.select(selected);
    draw();
    const name = selected === null ? null : store.table("trainings").name[selected];
    element.dispatchEvent(new CustomEvent("trainingselected", { detail: { name }, bubbles: true }));
  };
  const chart = createNodeChart(charts, store, select);

  const panels = new Map();
  const tabs = make("div", { class: "ft-tabs", role: "tablist", "aria-label": "Parts of the run" });
  root.append(tabs);
  const prefix = `ft-${Math.random().toString(36).slice(2, 8)}`;
  const addPanel = (name, render) => {
    const id = `${prefix}-${panels.size}`;
    const body = make("div", { class: "ft-panel", role: "tabpanel", id: `${id}-panel`, "aria-labelledby": `${id}-tab`, tabindex: 0, hidden: true });
    const tab = make("button", { type: "button", role: "tab", id: `${id}-tab`, "aria-controls": `${id}-panel` }, name);
    const count = make("span", { class: "ft-count" });
    tab.append(count);
    tab.addEventListener("click", () => show(name));
    tabs.append(tab);
    root.append(body);
    panels.set(name, { tab, body, render, count, stale: true });
    return body;
  };
  let active = null;
  const show = (name) => {
    active = name;
    for (const [other, panel] of panels) {
      const on = other === name;
      panel.body.hidden = !on;
      panel.tab.setAttribute("aria-selected", String(on));
      panel.tab.tabIndex = on ? 0 : -1;
      if (on && tabs.scrollWidth > tabs.clientWidth) tabs.scrollLeft = panel.tab.offsetLeft - tabs.offsetLeft - 24;
    }
    draw();
  };
  tabs.addEventListener("keydown", (event) => {
    const names = [...panels.keys()];
    const moves = { ArrowRight: 1, ArrowLeft: -1, Home: -names.indexOf(active), End: names.length - 1 - names.indexOf(active) };
    if (!(event.key in moves)) return;
    event.preventDefault();
    show(names[(names.indexOf(active) + moves[event.key] + names.length) % names.length]);
    panels.get(active).tab.focus();
  });

  // Panels.

  const trainings = addPanel("Training jobs", () => renderTrainings());
  const curvesBody = addPanel("Loss and metrics", () => curves.draw());
  const curves = createCurves(curvesBody, store);
  const listing = (name, table, columns, caption, empty) => {
    const list = makeList(columns, caption, empty);
    addPanel(name, () => list.draw(store, table)).append(list.element);
  };
  const at = (key) => (rows, i) => words.clock(store, rows[key][i]);
  listing("Failures and repairs", "incidents", [
    ["Time", at("time")],
    ["What", (rows, i) => make("span", { class: `ft-level ft-${LEVELS[rows.level[i]]}` }, LEVELS[rows.level[i]])],
    ["Of", (rows, i) => rows.subject[i] || "run"],
    ["", (rows, i) => rows.text[i], "ft-wide"],
  ], "What failed, and what works again; newest first", "Nothing failed so far.");
  listing("Waits and notices", "notices", [
    ["Time", at("time")],
    ["Of", (rows, i) => rows.subject[i] || "run"],
    ["", (rows, i) => rows.text[i], "ft-wide"],
  ], "What waits, and nodes that the batch system reclaims or that were left early: no failures; newest first", "Nothing so far.");
  listing("Decisions", "decisions", [
    ["Time", at("time")],
    ["Because", (rows, i) => rows.cause[i], "ft-wide"],
    ["Decision", (rows, i) => rows.actions[i], "ft-wide"],
    ["Value", (rows, i) => value(rows.value[i], rows.proven[i]), "ft-number"],
    ["Solved in", (rows, i) => (rows.value[i] === null ? "" : `${rows.milliseconds[i]} ms`), "ft-number"],
  ], "Each decision of the planner, why it was made, and its value: the objective; newest first", "No decision so far.");
  listing("Windows", "windows", [
    ["Opened", at("opens")],
    ["Closes", (rows, i) => (rows.closes[i] === null ? "unknown" : words.clock(store, rows.closes[i]))],
    ["Nodes", (rows, i) => rows.nodes[i], "ft-number"],
    ["", (rows, i) => rows.names[i], "ft-wide"],
    ["What became of it", (rows, i) => windowOutcome(rows, i), "ft-wide"],
  ], "Groups of idle nodes that close at the same time; newest first", "No window was seen so far.");
  listing("Blocks", "blocks", [
    ["Block", (rows, i) => rows.name[i]],
    ["Job", (rows, i) => rows.job[i]],
    ["Nodes", (rows, i) => rows.nodes[i], "ft-number"],
    ["Walltime", (rows, i) => words.duration(rows.walltime[i]), "ft-number"],
    ["Requested", at("requested")],
    ["Started", at("started")],
    ["Ended", at("ended")],
    ["Why", (rows, i) => rows.reason[i], "ft-wide"],
  ], "Requests for nodes to the batch system; newest first", "No block was requested so far.");
  const accounts = addPanel("Node time", () => renderAccounts());

  // Training jobs: rows are made once, and cells change in place.

  const nodeKindNote = make("p", { class: "ft-note" });
  const trainingHead = ["Training", "State", "Done", "Left", "Nodes", "Samples/s", "Epoch", "Loss", "Changes", "Failures", "Remark"];
  const trainingBody = make("tbody");
  trainings.append(
    scrolling("Training jobs; choose one to highlight its nodes, curves and log", make("table", {}, make("thead", {}, make("tr", {}, ...trainingHead.map((name, place) => make("th", { scope: "col", class: place > 2 && place < 10 ? "ft-number" : "" }, name)))), trainingBody)),
    nodeKindNote,
  );
  const trainingRows = [];
  const renderTrainings = () => {
    const rows = store.table("trainings");
    for (let i = trainingRows.length; i < store.count("trainings"); i++) trainingRows.push(makeTrainingRow(i));
    for (const row of trainingRows) row.draw(rows);
    put(trainings.querySelectorAll("thead th")[4], store.run.shared_slots > 1 ? "Accelerators" : "Nodes");
    const order = trainingRows.map((_, i) => i).sort((a, b) => STATES.indexOf(rows.state[a]) - STATES.indexOf(rows.state[b]) || a - b);
    if (order.some((i, place) => trainingBody.children[place] !== trainingRows[i].element)) {
      const focused = root.ownerDocument.activeElement;
      trainingBody.append(...order.map((i) => trainingRows[i].element));
      if (trainingBody.contains(focused)) focused.focus();
    }
    nodeKindNote.textContent = trainingRows.length ? "" : "No training was submitted so far.";
  };
  const makeTrainingRow = (i) => {
    const swatch = make("span", { class: "ft-swatch", "aria-hidden": "true" });
    swatch.style.background = colourOf(i);
    const name = make("button", { type: "button", class: "ft-name" });
    name.addEventListener("click", () => select(i));
    const track = make("span", { class: "ft-track", "aria-hidden": "true" }, make("span"));
    track.firstChild.style.background = colourOf(i);
    const share = make("span");
    const cells = trainingHead.slice(1).map((_, place) => make("td", { class: place === 9 ? "ft-wide" : place > 1 ? "ft-number" : "" }));
    cells[1].append(share, track);
    cells[1].className = "ft-progress";
    const row = make("tr", {}, make("th", { scope: "row" }, swatch, name), ...cells);
    const draw = (rows) => {
      put(name, rows.name[i]);
      name.setAttribute("aria-pressed", String(selected === i));
      row.classList.toggle("ft-selected", selected === i);
      put(cells[0], rows.state[i]);
      cells[0].className = `ft-state ft-${rows.state[i]}`;
      put(share, rows.share[i] === null ? "–" : words.percent(rows.share[i]));
      track.firstChild.style.width = `${100 * (rows.share[i] ?? 0)}%`;
      put(cells[2], rows.state[i] === "running" ? timeLeft(rows, i) : "");
      put(cells[3], rows.nodes[i] ? String(rows.nodes[i]) : "");
      cells[3].title = rows.hosts[i] ?? "";
      put(cells[4], rows.state[i] === "running" && rows.rate[i] ? words.number(rows.rate[i]) : "");
      put(cells[5], rows.step[i] ? String(rows.epoch[i]) : "");
      put(cells[6], rows.loss[i] === null ? "" : words.number(rows.loss[i]));
      put(cells[7], rows.rescales[i] ? String(rows.rescales[i]) : "");
      put(cells[8], rows.failures[i] ? String(rows.failures[i]) : "");
      put(cells[9], rows.error[i] || rows.remark[i] || (rows.state[i] !== "waiting" ? "" : store.run.ended === null ? "waits for nodes" : "not finished"));
    };
    return { element: row, draw };
  };
  const timeLeft = (rows, i) =>
    rows.total[i] && rows.rate[i] ? words.duration(Math.max(0, rows.total[i] - rows.samples[i]) / rows.rate[i]) : "";

  // Node time, and requests to the batch system.

  const renderAccounts = () => {
    const run = store.run;
    const held = Object.values(run.node_seconds).reduce((sum, seconds) => sum + seconds, 0);
    const hours = (seconds) => words.number(seconds / 3600);
    const slots = run.shared_slots; // of a node that jobs share
    const accelerators = slots > 1 ? (seconds) => [make("td", { class: "ft-number" }, hours(slots * seconds))] : () => [];
    const line = (name, seconds, of, deep) => make("tr", {}, make("th", { scope: "row", class: ["", "ft-deep", "ft-deeper"][deep] }, name),
      make("td", { class: "ft-number" }, hours(seconds)), ...accelerators(seconds), make("td", { class: "ft-number" }, of ? words.percent(seconds / of) : ""));
    const lines = [line("held by our blocks", held, held, 0)];
    for (const [phase, seconds] of Object.entries(run.node_seconds)) {
      lines.push(line(PHASES[phase] ?? phase, seconds, held, 1));
      if (phase === "training") lines.push(line("of it in steps that count", run.useful_node_seconds, held, 2));
    }
    lines.push(line("requested, but given back before the walltime", run.returned_node_seconds, 0, 0));
    lines.push(line("requested, but preempted or lost before the walltime", run.cut_short_node_seconds, 0, 0));
    const head = (...names) => make("thead", {}, make("tr", {}, ...names.map((name, place) => make("th", { scope: "col", class: place ? "ft-number" : "" }, name))));
    const parts = [scrolling("Node-hours, by cause", make("table", { class: "ft-narrow" }, head("", "Node-hours", ...(slots > 1 ? ["Accelerator-hours"] : []), "Share"), make("tbody", {}, ...lines)))];
    const blocks = run.blocks;
    parts.push(make("p", { class: "ft-note" }, `${words.count(blocks.requested, "block")} requested, ${blocks.started} started; ${blocks.yielded} left early for jobs of other users; ${words.count(run.closing_notices, "notice")} that a node is reclaimed.`));
    const requests = requestsPerHour(store);
    if (requests.commands.length) {
      parts.push(scrolling("Requests to the batch system: commands that the driver ran, by hour", make("table", { class: "ft-narrow" },
        head("Hour from", ...requests.commands), make("tbody", {}, ...requests.hours.map(([hour, counts]) => make("tr", {},
          make("th", { scope: "row" }, words.clock(store, hour).slice(0, -3)), ...requests.commands.map((name) => make("td", { class: "ft-number" }, String(counts[name] ?? 0)))))))));
    }
    accounts.replaceChildren(...parts);
  };

  // The head.

  const renderHead = () => {
    const run = store.run;
    const rows = store.table("trainings");
    const counts = Object.fromEntries(STATES.map((name) => [name, 0]));
    for (let i = 0; i < store.count("trainings"); i++) counts[rows.state[i]] += 1;
    put(title, run.name);
    // As in notebooks and of remote runs: a driver that finished, but not all of its training jobs.
    const outcome = run.ended === "finished" && counts.failed + counts.waiting + counts.running ? "failed" : run.ended;
    const ended = run.reading ? "reading …" : outcome ?? "running";
    put(state, ended);
    state.className = `ft-badge ft-${run.reading ? "reading" : ended}`;
    put(lede, run.origin === null ? "The journal has no entries yet."
      : `${run.ended === null ? "Runs since" : "Ran from"} ${words.date(store, 0)}${run.ended === null ? "" : ` to ${words.date(store, run.now)}`}, ${words.duration(run.now)}${run.policy ? `, policy ${run.policy}` : ""}.`);
    const notes = [run.problem, run.starts_failed, ...run.reasons].filter(Boolean);
    put(problem, notes.join(" · "));
    problem.hidden = !notes.length;
    const held = Object.values(run.node_seconds).reduce((sum, seconds) => sum + seconds, 0);
    const left = run.ended === null ? `${counts.running} running, ${counts.waiting} waiting` : `${counts.waiting} not finished`;
    const facts = [
      ["Training jobs finished", `${counts.finished} of ${store.count("trainings")}`, counts.failed ? `${left}, ${counts.failed} failed` : left],
      ["Nodes in training", String(run.training_nodes), `${run.shared_slots > 1 ? `${run.training_slots} of their ${run.shared_slots * run.training_nodes} accelerators; ` : ""}${run.idle_nodes} more are idle`],
      ["Node-hours held", words.number(held / 3600), held ? `${words.percent(run.node_seconds.training / held)} of them training` : "no block has started"],
      ["Given back", `${words.number(run.returned_node_seconds / 3600)} h`, "node-hours requested, not needed"],
    ];
    if (cards.children.length !== facts.length) cards.replaceChildren(...facts.map(() => make("div", {}, make("dt"), make("dd", { class: "ft-value" }), make("dd"))));
    facts.forEach((fact, place) => fact.forEach((text, part) => put(cards.children[place].children[part], text)));
    for (const [name, table] of [["Training jobs", "trainings"], ["Waits and notices", "notices"], ["Decisions", "decisions"], ["Windows", "windows"], ["Blocks", "blocks"]]) {
      put(panels.get(name).count, store.count(table) ? String(store.count(table)) : "");
    }
    put(panels.get("Failures and repairs").count, run.failures ? String(run.failures) : "");
  };

  let asked = 0;
  const draw = () => {
    if (!store.run || asked) return;
    asked = requestAnimationFrame(() => {
      asked = 0;
      renderHead();
      chart.draw();
      panels.get(active).render();
    });
  };
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  scheme.addEventListener("change", draw);
  const resized = new ResizeObserver(draw);
  resized.observe(root);
  show("Training jobs");

  return {
    update(delta) {
      if (delta.reset) { trainingRows.length = 0; trainingBody.replaceChildren(); selected = null; }
      store.apply(delta);
      draw();
    },
    destroy() {
      cancelAnimationFrame(asked);
      scheme.removeEventListener("change", draw);
      resized.disconnect();
      root.remove();
    },
  };
}

const value = (number, proven) => (number === null ? "" : `${words.number(number)}${proven ? "" : " (not proven best)"}`);

const windowOutcome = (rows, i) => {
  const end = rows.ended[i] === null ? "open" : "closed";
  const block = rows.used[i] && rows.blocks[i].includes(",") ? "blocks" : "block";
  return rows.used[i] ? `${rows.used[i]} of ${rows.nodes[i]} nodes used, in ${block} ${rows.blocks[i]}; ${end}` : rows.ended[i] === null ? "open, not used so far" : "closed, not used";
};

const requestsPerHour = (store) => {
  const rows = store.table("requests");
  const hours = new Map();
  const commands = new Set();
  for (let i = 0; i < store.count("requests"); i++) {
    const hour = Math.floor((store.run.origin + Math.max(0, rows.begin[i])) / 3600) * 3600 - store.run.origin;
    const counts = hours.get(hour) ?? {};
    counts[rows.command[i]] = (counts[rows.command[i]] ?? 0) + rows.count[i];
    commands.add(rows.command[i]);
    hours.set(hour, counts);
  }
  return { hours: [...hours].sort((a, b) => b[0] - a[0]), commands: [...commands].sort() };
};

const put = (element, text) => { if (element.textContent !== text) element.textContent = text; };

// A table with a note above it, in a box that scrolls by itself, also by keyboard.
const scrolling = (note, table) => make("div", {}, make("p", { class: "ft-note" }, note),
  make("div", { class: "ft-scroll", tabindex: 0, role: "region", "aria-label": note }, table));

// A table of the newest rows, with a button for more.
const makeList = (columns, caption, empty) => {
  const body = make("tbody");
  const note = make("p", { class: "ft-note" });
  const more = make("button", { type: "button", hidden: true }, "Show more");
  const head = make("tr", {}, ...columns.map(([name, , style]) => make("th", { scope: "col", class: style === "ft-number" ? style : "" }, name)));
  const element = make("div", {}, scrolling(caption, make("table", {}, make("thead", {}, head), body)), note, more);
  let shown = ROWS_SHOWN;
  let latest = null;
  const draw = (store, table) => {
    latest = [store, table];
    const rows = store.table(table);
    const last = store.count(table) - 1;
    const first = Math.max(store.first(table), last - shown + 1);
    const made = [];
    for (let i = last; i >= first; i--) {
      made.push(make("tr", {}, ...columns.map(([, cell, style]) => {
        const content = cell(rows, i);
        return make("td", { class: style ?? "" }, content instanceof Node ? content : String(content ?? ""));
      })));
    }
    body.replaceChildren(...made);
    const dropped = store.first(table);
    put(note, last < 0 ? empty : first > dropped || !dropped ? "" : `${dropped.toLocaleString()} older ones are not shown; the journal has them.`);
    more.hidden = first <= dropped;
  };
  more.addEventListener("click", () => { shown += 10 * ROWS_SHOWN; draw(...latest); });
  return { element, draw };
};
