// The live page: follows the stream of changes, shows the log of the chosen training, and can stop the run.
const start = () => {
  const main = document.getElementById("run");
  const part = (selector) => main.querySelector(selector);
  if (location.search) history.replaceState(null, "", location.pathname); // the token stays out of the history
  const connection = make("p", { class: "ft-connection", role: "status" }, "Reading the journal …");
  const place = make("div");
  const log = make("section", { class: "ft-run ft-log", "aria-label": "Log", hidden: true });
  const stopper = make("button", { type: "button", class: "ft-stop", hidden: true }, "Stop the run …");
  const dialog = make("dialog", { class: "ft-run", "aria-labelledby": "ft-stop-title" });
  main.replaceChildren(connection, place, log, dialog);
  const view = createRunView(place);
  part(".ft-title").append(stopper);

  // Changes.

  let running = false;
  const follow = () => {
    const source = new EventSource("events");
    source.onmessage = (event) => {
      const delta = JSON.parse(event.data);
      view.update(delta);
      running = delta.run.ended === null && delta.run.origin !== null && !delta.run.reading;
      stopper.hidden = !running;
      connection.textContent = "";
      document.title = `${delta.run.name}: ${delta.run.reading ? "reading" : delta.run.ended ?? "running"}`;
    };
    source.onerror = () => {
      if (source.readyState !== EventSource.CLOSED) {
        connection.textContent = "The connection is lost; trying again …";
        return;
      }
      connection.textContent = "The server refuses this page: its token has changed, or too many pages are open. Open the address that freetrain dashboard printed last; trying again in 10 s.";
      setTimeout(follow, 10_000);
    };
  };
  follow();

  // Logs.

  const title = make("h2");
  const lines = make("pre", { tabindex: 0, role: "log", "aria-live": "off" });
  const refresh = make("button", { type: "button" }, "Read again");
  log.append(make("div", { class: "ft-head" }, title, refresh), lines);
  let chosen = null;
  const readLog = async () => {
    if (chosen === null) return;
    const name = chosen;
    let answer;
    try {
      answer = await (await fetch(`log?training=${encodeURIComponent(name)}`)).json();
    } catch {
      answer = { message: "The log cannot be read: the server does not answer." };
    }
    if (name !== chosen) return;
    const atEnd = lines.scrollHeight - lines.scrollTop - lines.clientHeight < 40;
    lines.replaceChildren(...(answer.lines ?? [{ mark: true, text: answer.message }]).map((line) =>
      make("span", { class: line.mark ? "ft-mark" : "" }, `${line.mark ? "── " : ""}${line.text}\n`)));
    if (answer.lines?.length === 0) lines.textContent = "It has printed nothing so far.";
    if (atEnd) lines.scrollTop = lines.scrollHeight;
  };
  refresh.addEventListener("click", readLog);
  place.addEventListener("trainingselected", (event) => {
    chosen = event.detail.name;
    log.hidden = chosen === null;
    title.textContent = `Log of ${chosen}, the last 500 lines`;
    lines.replaceChildren();
    readLog();
  });
  setInterval(() => { if (running && document.visibilityState === "visible") readLog(); }, 5000);

  // Stop.

  const said = make("p", { role: "status" });
  const yes = make("button", { type: "button", class: "ft-stop" }, "Stop the run");
  const no = make("button", { type: "button" }, "Let it run");
  dialog.append(make("h2", { id: "ft-stop-title" }, "Stop this run?"),
    make("p", {}, "All training jobs save their state and end, and the run's jobs are withdrawn. freetrain resume continues it later."),
    said, make("div", { class: "ft-tools" }, yes, no));
  stopper.addEventListener("click", () => { said.textContent = ""; yes.hidden = yes.disabled = false; no.textContent = "Let it run"; dialog.showModal(); no.focus(); });
  no.addEventListener("click", () => dialog.close());
  yes.addEventListener("click", async () => {
    yes.disabled = true;
    const token = document.querySelector("meta[name=change-token]").content;
    try {
      const answer = await fetch("stop", { method: "POST", headers: { "X-FreeTrain-Change": token } });
      const text = await answer.text();
      said.textContent = answer.headers.get("content-type")?.startsWith("application/json") ? JSON.parse(text).message : text;
      yes.hidden = true;
      no.textContent = "Close";
    } catch {
      said.textContent = "The server does not answer; use freetrain stop.";
      yes.disabled = false;
    }
  });
};
addEventListener("DOMContentLoaded", start);

