"""The live page in a real browser: what is visible, at two widths, dark and light, and by keyboard."""

from __future__ import annotations

import signal
import subprocess
import time
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby

import pytest

from freetrain_parsl.campaign.lock import own_identity
from freetrain_parsl.campaign.store import RunStore
from freetrain_parsl.executor.journal import Journal
from freetrain_parsl.protocol import journal as record
from freetrain_parsl.protocol.reports import Progress
from tests.campaign.shell import FREETRAIN
from tests.cli.test_status import FACTS
from tests.extensions.pages.test_run_view import RUN
from tests.processes import hear_ctrl_c

pytestmark = pytest.mark.browser
HOSTILE = "<img src=http://example.org/x onerror=alert(1)>"
WIDTHS = {"wide": (1400, 900), "phone": (390, 844)}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Make a run whose driver is this process, with names that are markup."""
    directory = tmp_path_factory.mktemp("run")
    store = RunStore.create(directory, {**FACTS, "name": f"sweep {HOSTILE}"}, ["a", "b", HOSTILE])
    driver = store.begin_driver(*own_identity())
    path = directory / "journal.sqlite"
    journal = Journal(path)
    begin = time.time() - 200
    for at, entry in [*RUN[:-2], (141.0, record.TrainingSubmitted(HOSTILE, 1, 2, 1000))]:
        journal.write(begin + at - 100, entry)
    for step in range(1, 60):
        journal.write(begin + 40, record.ValuesSampled("a", 10 * step, {"loss": 2.0 / step, "accuracy": 1 - 1 / step}))
    journal.write(begin + 42, record.NodeSetAside("n2", 600.0, f"its function fails there: {HOSTILE}"))
    journal.write(begin + 43, record.BatchRequests("", 40.0, {"squeue": 4, "sbatch": 1}))
    progress = Progress(step=600, samples=600, samples_total=1000, rate=10.0, loss=0.5, slot_seconds=30.0)
    journal.keep_progress(begin + 44, "a", progress)
    journal.close()
    store.describe_driver(driver, "ft-", path)
    (directory / "logs").mkdir()
    (directory / "logs" / "a.log").write_text("2026-01-01T00:00:00.000Z 0 epoch 1: " + HOSTILE + "\n")
    return store


@pytest.fixture(scope="module")
def address(run):
    """Serve the run, as a user does."""
    command = [FREETRAIN, "dashboard", str(run.directory)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=hear_ctrl_c)  # noqa: PLW1509 - one signal, no lock
    lines = (line.strip() for line in server.stdout)
    yield next(line for line in lines if line.startswith("http://"))
    server.send_signal(signal.SIGINT)
    assert server.wait(20) == 130
    server.stdout.close()


def wait_until(chromium, expression):
    deadline = time.monotonic() + 20
    while not chromium.evaluate(expression):
        assert time.monotonic() < deadline, f"{expression}; the page has {chromium.evaluate('document.body.innerText')}"
        time.sleep(0.05)


@pytest.fixture
def page(chromium, address):
    """Open the page."""

    def open_page(width="wide", *, dark=False):
        chromium.open(address, width=WIDTHS[width][0], height=WIDTHS[width][1], dark=dark)
        wait_until(chromium, "document.querySelector('.ft-badge')?.textContent === 'running'")
        return chromium

    return open_page


def choose(chromium, tab):
    tabs = "[...document.querySelectorAll('[role=tab]')]"
    chromium.evaluate(f"{tabs}.find(tab => tab.textContent.startsWith('{tab}')).click()")
    wait_until(chromium, "document.querySelector('[role=tabpanel]:not([hidden])').innerText.length > 0")
    time.sleep(0.1)  # one frame
    return chromium.evaluate("document.querySelector('[role=tabpanel]:not([hidden])').innerText")


VIEWS = {
    "Training jobs": ("a", "running", "60 %", "40 s", "0.5"),
    "Loss and metrics": ("loss", "accuracy"),
    "Failures and repairs": ("the group of 2 nodes ended", "set aside for 600 s"),
    "Decisions": ("2 nodes joined", "a: assign to 2 nodes", "12.5"),
    "Windows": ("n[1-3]", "2 of 3 nodes used, in block ft-1"),
    "Blocks": ("ft-1", "77"),
    "Node time": ("held by our blocks", "squeue", "1 block requested, 1 started"),
}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_everything_is_visible_and_nothing_is_loaded_from_elsewhere(page, width, dark, tmp_path, address):
    chromium = page(width, dark=dark)
    for name, words in VIEWS.items():
        text = choose(chromium, name)
        for word in words:
            assert word in text, (name, word, text)
        chromium.screenshot(tmp_path / f"{name.replace(' ', '-')}-{width}.png")
        assert chromium.evaluate("document.documentElement.scrollWidth") <= WIDTHS[width][0], "no sideways scrolling"
    assert chromium.complaints() == []
    origin = address.partition("/?")[0]
    assert all(url.startswith((origin, "data:")) for url in chromium.requests())
    assert chromium.evaluate("document.querySelectorAll('img').length") == 0
    background = chromium.evaluate("getComputedStyle(document.querySelector('.ft-run')).backgroundColor")
    assert (background == "rgb(255, 255, 255)") is not dark


def test_the_token_is_not_in_the_address_and_a_reload_needs_none(page):
    chromium = page()
    assert "token" not in chromium.evaluate("location.href")
    chromium.evaluate("location.reload()")
    wait_until(chromium, "document.querySelector('.ft-badge')?.textContent === 'running'")


def test_the_nodes_are_drawn_and_the_picture_has_a_description(page):
    chromium = page()
    colours = """(() => {
      const c = document.querySelector('canvas'), d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
      const found = new Set();
      for (let i = 0; i < d.length; i += 4) found.add(`${d[i]},${d[i + 1]},${d[i + 2]}`);
      return [...found].join(' ');
    })()"""
    assert "230,159,0" in chromium.evaluate(colours), "the colour of the first training job"
    label = chromium.evaluate("document.querySelector('canvas').getAttribute('aria-label')")
    assert "3 nodes" in label
    assert "a on 1 node" in label


def press(chromium, key, code=0, text=""):
    for kind in ("keyDown", "keyUp"):
        typed = {"text": text} if text and kind == "keyDown" else {}
        chromium.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **typed)


def test_it_can_be_used_by_keyboard(page):
    chromium = page()
    chromium.evaluate("document.querySelector('[role=tab][aria-selected=true]').focus()")
    press(chromium, "ArrowRight", 39)
    selected = "document.querySelector('[role=tab][aria-selected=true]').textContent"
    assert chromium.evaluate(selected) == "Loss and metrics"
    assert chromium.evaluate("document.activeElement.textContent") == "Loss and metrics"
    press(chromium, "Home", 36)
    assert chromium.evaluate(selected).startswith("Training jobs")
    chromium.evaluate("document.querySelector('canvas').focus()")
    before = chromium.evaluate("document.querySelector('canvas').toDataURL()")
    press(chromium, "+", 187, "+")
    wait_until(chromium, f"document.querySelector('canvas').toDataURL() !== {before!r}")
    chromium.evaluate("document.querySelector('.ft-name').focus()")
    press(chromium, "Enter", 13, "\r")
    wait_until(chromium, "document.querySelector('.ft-log').innerText.includes('epoch 1')")
    assert chromium.evaluate("document.querySelector('.ft-name').getAttribute('aria-pressed')") == "true"


@pytest.mark.smoke
def test_what_happens_is_shown_without_a_reload(page, run):
    chromium = page()
    journal = Journal(run.directory / "journal.sqlite")
    journal.write(time.time(), replace(record.TrainingFailed("b", ""), error="ValueError: no such file"))
    journal.close()
    wait_until(chromium, "document.body.innerText.includes('ValueError: no such file')")


@pytest.mark.smoke
def test_stop_needs_a_confirmation(page, run):
    chromium = page()
    chromium.evaluate("document.querySelector('.ft-title .ft-stop').click()")
    assert chromium.evaluate("document.querySelector('dialog').open")
    assert chromium.evaluate("document.activeElement.textContent") == "Let it run"
    assert not run.stop_requested()
    chromium.evaluate("document.querySelector('dialog .ft-stop').click()")
    wait_until(chromium, "document.querySelector('dialog').innerText.includes('asked to stop')")
    assert run.stop_requested()


def test_a_server_that_is_gone_is_reported(chromium, run):
    command = [FREETRAIN, "dashboard", str(run.directory)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    address = next(line.strip() for line in server.stdout if line.strip().startswith("http://"))
    chromium.open(address, width=1400, height=900)
    wait_until(chromium, "document.querySelector('.ft-badge')?.textContent === 'running'")
    server.kill()
    server.wait()
    server.stdout.close()
    wait_until(chromium, "document.querySelector('.ft-connection').innerText.includes('connection is lost')")


@contextmanager
def serve_ended_run(directory, names, entries):
    """Serve a run of some records, whose driver has finished; yield the address."""
    store = RunStore.create(directory, FACTS, names)
    driver = store.begin_driver(*own_identity())
    journal = Journal(directory / "journal.sqlite")
    for at, entry in entries:
        journal.write(at, entry)
    journal.close()
    store.describe_driver(driver, "ft-", directory / "journal.sqlite")
    store.end_driver(driver, "finished")
    command = [FREETRAIN, "dashboard", str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            yield next(line.strip() for line in server.stdout if line.strip().startswith("http://"))
        finally:
            server.kill()


def test_a_run_is_finished_only_if_all_its_trainings_are(chromium, tmp_path):
    """As in notebooks; the driver itself has finished."""
    entries = [record.TrainingSubmitted("a", 1, 2, 1000), record.TrainingFailed("a", "ValueError: x")]
    with serve_ended_run(tmp_path, ["a"], enumerate(entries, 100)) as address:
        chromium.open(address, width=1400, height=900)
        wait_until(chromium, "document.querySelector('.ft-badge')?.textContent === 'failed'")


def test_jobs_that_share_a_node_have_lanes_of_its_row(chromium, tmp_path):
    """`b` has the first slot of n0, `a` the two last ones, the second is free; n1 is wholly `c`'s."""
    held = {"a": ["n0/2", "n0/3"], "b": ["n0/0"], "c": [f"n1/{lane}" for lane in range(4)]}
    begin = time.time() - 100
    entries = [(begin, record.PlannerStarted("", "milp", {}, 4))]
    entries += [(begin, record.TrainingSubmitted(name, 1, 4, None)) for name in held]
    entries += [(begin, record.BlockRequested("1", ["n0", "n1"], 900.0, None))]
    entries += [(begin + 1, record.BlockStarted("1", ["n0", "n1"], begin + 900))]
    entries += [(begin + 1, record.NodeJoined(node, "1", begin + 900)) for node in ("n0", "n1")]
    entries += [(begin + 2, record.FragmentStarted(n, 1, has, in_place=False, paused=0.0)) for n, has in held.items()]
    entries += [(begin + 90, record.FragmentEnded(n, 1, has, failure=False)) for n, has in held.items()]
    entries += [(begin + 91, record.TrainingFinished(name, trained=True, step=9)) for name in held]
    with serve_ended_run(tmp_path, list(held), entries) as address:
        chromium.open(address, width=1400, height=900)
        wait_until(chromium, "document.querySelector('.ft-badge')?.textContent === 'finished'")
        column = """(() => {
          const c = document.querySelector('canvas'), pen = c.getContext('2d'), seen = [];
          for (let y = 0; y < c.height; y++) seen.push(pen.getImageData(c.width / 2, y, 1, 1).data.slice(0, 3).join());
          return seen;
        })()"""
        jobs = {"86,180,233": "b", "230,159,0": "a", "0,158,115": "c"}
        drawn = [jobs.get(colour, "") for colour in chromium.evaluate(column)]
        bands = [(job, len(list(pixels))) for job, pixels in groupby(drawn)][1:-1]  # without margin and time axis
        assert [job for job, _ in bands] == ["b", "", "a", "", "c"]
        lane = bands[-1][1] / 4
        assert [round(height / lane) for _, height in bands if height > 4] == [1, 1, 2, 4], bands
