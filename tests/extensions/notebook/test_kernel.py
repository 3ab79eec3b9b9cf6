"""Campaigns from a real kernel: interrupted, restarted, seen from a second notebook, with functions of cells."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import psutil
import pytest

from freetrain_parsl.campaign.store import RunStore
from tests.campaign.shell import APP
from tests.extensions.notebook.kernel import Notebook, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.usefixtures("event_loop_closed"),
]

SITE = """\
system: local
block: {nodes: 2}
planner: {startup: 5 s, min_useful: 2 s, closing_margin: 1.5 s, max_walltime: 300 s, idle_timeout: 2 s, settle: 1 s}
rate_limits: {poll_interval: 0.5 s, submissions_per_minute: 100}
trainings: {threads_per_slot: 1, heartbeat_timeout: 4 s}
checkpoints: {interval: 600 s}
"""
CAMPAIGN = f"""\
name: two
trainings:
  - app: {APP}:train
    name: t{{lr}}
    arguments: {{epochs: 6, slow: SLOW}}
    grid: {{lr: [0.01, 0.02]}}
"""
START = """
from freetrain_parsl.extensions.notebook import Campaign
run = Campaign("campaign.yaml", config="site.yaml", run_dir="run").start()
"""
TABLES = "import sys; sys.modules['anywidget'] = None"  # as where the extra is not installed
UNTIL_STEPS = """
import time
while not all(row.share for row in run.snapshot().rows):
    time.sleep(0.2)
time.sleep(4)
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "site.yaml").write_text(SITE)
    (tmp_path / "campaign.yaml").write_text(CAMPAIGN.replace("SLOW", str(tmp_path / "slow")))
    return tmp_path


@pytest.fixture
def notebook(directory: Path, mark: str) -> Iterator[Notebook]:
    notebook = Notebook(directory, mark)
    yield notebook
    notebook.close()


def test_a_campaign_outlives_interrupts_and_kernels(notebook: Notebook, directory: Path, mark: str) -> None:
    """One driver runs from the first cell to the stop: it is found again, and a second notebook changes nothing."""
    (directory / "slow").touch()
    notebook.run(TABLES)
    first = notebook.run(START)
    assert "started run" in text_of(first)
    notebook.run(UNTIL_STEPS)
    assert "two: running, 0 of 2 training jobs finished, in run" in text_of(first), (
        "it was updated while another cell ran"
    )
    driver = RunStore(directory / "run").last_driver()
    assert driver is not None
    environment = psutil.Process(driver.pid).environ()
    assert not [name for name in environment if name.startswith(("JPY_", "JUPYTER", "MPLBACKEND"))]

    assert "KeyboardInterrupt" in notebook.interrupted("run.wait()", after=1.0)
    assert text_of(notebook.run("run.state")) == "'running'"

    second = Notebook(directory, mark)
    try:
        shown = text_of(second.run(START))
        assert "attached to run: it is running" in shown
        assert "controls this run" in shown
        refusal = second.fail("run.stop()")
        assert "read-only" in refusal
        assert len(refusal.splitlines()) == 1
        assert "two: running" in text_of(
            second.run("from freetrain_parsl.extensions.notebook import watch; view = watch('run')")
        )
    finally:
        second.close()

    notebook.restart()
    assert "attached to run: it is running" in text_of(notebook.run(START))
    assert RunStore(directory / "run").last_driver() is not None
    assert [item.pid for item in RunStore(directory / "run").drivers()] == [driver.pid], "nothing was started twice"

    assert text_of(notebook.run("run.stop()")) == "'stopped'"
    assert "to continue it: run.resume()" in text_of(notebook.run(START))
    (directory / "slow").unlink()
    resumed = notebook.run("run.resume()")
    assert text_of(notebook.run("run.wait(90)")) == "'finished'"
    assert "two: finished, 2 of 2 training jobs finished" in text_of(resumed)
    assert "data:image/png;base64" in resumed.outputs[-1].data["text/html"]
    assert text_of(notebook.run("run.results()['samples'].tolist()")) == "[1200, 1200]"
    assert "resumed from the checkpoint" in text_of(notebook.run("run.logs('t0.01')"))
    assert "no training job 't0.1'" in notebook.fail("run.logs('t0.1')")
    assert isinstance(notebook.run("run.timeline()").outputs[0].data["image/png"], str)


CELL = """
import torch
from pathlib import Path
from freetrain_parsl import training_app
from freetrain_parsl.extensions.notebook import Campaign

FACTOR = {factor}

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x)

@training_app
def train(session, lr, slow):
    x = torch.ones(40, 4)
    model, _ = session.prepare(Net(), torch.optim.SGD, lr=lr)
    data = session.loader(torch.utils.data.TensorDataset(x), batch_size=4)
    for _ in session.epochs(5):
        for (batch,) in data:
            end = time.monotonic() + 1.0
            while Path(slow).exists() and time.monotonic() < end:
                time.sleep(0.02)
            session.step(model(batch).square().mean())
    return {{"factor": FACTOR, "resumed": session.metrics["steps"]}}

import time
campaign = Campaign([{{"app": train, "arguments": {{"slow": "SLOW"}}, "grid": {{"lr": [0.01]}}}}], name="cells",
                    config="site.yaml")
"""


def test_a_function_of_a_cell_trains_and_its_change_is_noticed(notebook: Notebook, directory: Path) -> None:
    """A changed cell resumes nothing by itself: the choice is the user's, and what was chosen is printed."""
    slow = directory / "slow"
    slow.touch()
    cell = CELL.replace("SLOW", str(slow))
    notebook.run(TABLES)
    notebook.run(cell.format(factor=2))
    assert "started freetrain-run-cells" in text_of(notebook.run("run = campaign.start()"))
    notebook.run(UNTIL_STEPS.replace("time.sleep(4)", ""))
    notebook.run(cell.format(factor=2))
    assert "attached to freetrain-run-cells: it is running" in text_of(notebook.run("run = campaign.start()"))

    notebook.run(cell.format(factor=3))
    refusal = notebook.fail("campaign.start()")
    assert "__main__.FACTOR has changed since" in refusal
    assert len(refusal.splitlines()) == 1
    assert "stop it first" in notebook.fail("campaign.start(on_code_change='resume')")
    assert text_of(notebook.run("run.stop()")) == "'stopped'"
    assert "on_code_change='resume'" in notebook.fail("campaign.start()"), "not silently either"

    slow.unlink()
    chosen = text_of(notebook.run("run = campaign.start(on_code_change='restart')"))
    assert "__main__.FACTOR has changed: what has not finished starts over with the new code" in chosen
    notebook.run("run.wait(90)")
    assert text_of(notebook.run("[run.results()[key].tolist() for key in ('factor', 'resumed')]")) == "[[3], [50]]"
    notebook.run(cell.format(factor=4))
    assert "all training jobs have ended with the old code" in notebook.fail("campaign.start(on_code_change='resume')")


def test_what_is_refused_is_one_line_and_leaves_nothing(notebook: Notebook, directory: Path) -> None:
    """A user's mistake shows no traceback, and can be mended in place."""
    notebook.run("from freetrain_parsl.extensions.notebook import Campaign")
    (directory / "bad.yaml").write_text(CAMPAIGN.replace("lr:", "lx:").replace("t{lr}", "t"))
    refusal = notebook.fail("Campaign('bad.yaml', config='site.yaml').start()")
    assert len(refusal.splitlines()) == 1
    assert "bad.yaml:5" in refusal
    assert "lx" in refusal
    assert not (directory / "freetrain-run-bad").exists()
    start = "Campaign([{'app': 'missing.py:train'}], name='cells', config='site.yaml').start()"
    assert "no such file" in notebook.fail(start)
    assert not (directory / "freetrain-run-cells").exists()
    assert "no such file: nowhere, and no shipped site" in notebook.fail(
        "Campaign('bad.yaml', config='nowhere').start()"
    )


WATCH = """
import parsl
from datetime import timedelta
from freetrain_parsl import EmbeddedClusterProvider, FreeTrainExecutor, RateLimits, PlannerSettings, TrainingSettings
from freetrain_parsl.extensions.notebook import watch
executor = FreeTrainExecutor(
    provider=EmbeddedClusterProvider(nodes=2),
    planner=PlannerSettings(startup=timedelta(seconds=5), min_useful=timedelta(seconds=2)),
    trainings=TrainingSettings(threads_per_slot=1),
    rate_limits=RateLimits(poll_interval=timedelta(seconds=0.5)),
)
parsl.load(parsl.Config(executors=[executor]))
futures = {lr: train.options(name=f"t{lr}")(lr=lr, slow="SLOW") for lr in (0.01, 0.02)}
view = watch(futures)
"""


@pytest.mark.smoke
def test_futures_of_this_kernel_are_watched(notebook: Notebook, directory: Path) -> None:
    """The view follows them; an interrupt of a cell that waits for them does not harm them."""
    slow = directory / "slow"
    slow.touch()
    notebook.run(TABLES)
    notebook.run(CELL.format(factor=2))
    shown = notebook.run(WATCH.replace("SLOW", str(slow)))
    assert "t0.02     waiting" in text_of(shown)
    notebook.run(UNTIL_STEPS.replace("run.", "view."))
    assert "t0.02     running" in text_of(shown)
    assert "KeyboardInterrupt" in notebook.interrupted("futures[0.01].result()", after=1.0)
    slow.unlink()
    assert text_of(notebook.run("view.wait(90)")) == "'ended'"
    assert "2 of 2 training jobs finished" in text_of(shown)
    assert text_of(notebook.run("view.results()['resumed'].tolist()")) == "[50, 50]"
    assert "finished at step 50" in text_of(notebook.run("view.logs('t0.01')"))
    assert "all 2 training jobs have ended" in text_of(notebook.run("view.explain()"))
    notebook.run("parsl.dfk().cleanup()")


def test_start_returns_while_the_campaign_begins(notebook: Notebook, directory: Path) -> None:
    """It waits neither for imports nor for the batch system; the driver is stopped also while it starts."""
    notebook.run("from freetrain_parsl.extensions.notebook import Campaign")
    begin = time.monotonic()
    notebook.run(START)
    assert time.monotonic() - begin < 10, "1 s where nothing else runs"
    assert text_of(notebook.run("run.state")) in ("'starting'", "'running'")
    assert "another campaign" in notebook.fail(START.replace('"campaign.yaml"', '"other.yaml"'))
    assert text_of(notebook.run("run.stop()")) == "'stopped'", "also while the driver starts"


def test_a_run_is_shown_once_in_a_cell_and_goes_on_updating_in_others(notebook: Notebook, directory: Path) -> None:
    """`run` below `run = Campaign(…).start()` left a second table, which stayed at "starting"."""
    notebook.run(TABLES)
    cells = [
        notebook.run(source)
        for source in (
            f"{START}\nrun",
            "run",
            "from freetrain_parsl.extensions.notebook import watch\nwatched = watch(run.directory)\nwatched",
        )
    ]
    assert [len([o for o in cell.outputs if o.output_type != "stream"]) for cell in cells] == [1, 1, 1]
    # In one cell: the client drops updates of earlier cells that it receives while none runs.
    assert text_of(notebook.run("watched.wait(90)\nrun.wait(90)")) == "'finished'"
    for cell in cells:
        assert "2 of 2 training jobs finished" in text_of(cell)


def test_what_the_driver_refuses_is_shown_and_raised(notebook: Notebook, directory: Path) -> None:
    """An import that fails is known only there; the cell can be mended and run again."""
    (directory / "broken.py").write_text("import missing_package\n@training_app\ndef train(session): ...\n")
    text = (directory / "campaign.yaml").read_text()
    (directory / "campaign.yaml").write_text("trainings: [{app: 'broken.py:train'}]\n")
    notebook.run(TABLES)
    shown = notebook.run(START)
    assert text_of(notebook.run("run.wait(60)")) == "'failed'"
    refusal = notebook.fail("run.results()")
    assert "No module named 'missing_package'" in refusal
    assert len(refusal.splitlines()) == 1
    assert "campaign.yaml:1: trainings[1].app: importing broken from" in text_of(shown)
    (directory / "campaign.yaml").write_text(text)
    assert "started run" in text_of(notebook.run(START))
    assert text_of(notebook.run("run.wait(90)")) == "'finished'"
