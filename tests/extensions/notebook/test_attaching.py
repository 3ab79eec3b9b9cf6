"""A cell that is run again: it attaches, or refuses in one line, and overwrites nothing."""

from __future__ import annotations

import json
import platform
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from freetrain_parsl import training_app
from freetrain_parsl.campaign.site.site import shipped_sites
from freetrain_parsl.campaign.store import RunStore
from freetrain_parsl.errors import InvalidApp, InvalidInput
from freetrain_parsl.executor.journal import Journal
from freetrain_parsl.extensions.notebook import Campaign, watch
from freetrain_parsl.extensions.notebook.cells import CellCampaign
from freetrain_parsl.protocol import journal as record
from freetrain_parsl.protocol.reports import Progress

APP = "@training_app\ndef train(session): ...\n"
CAMPAIGN = "trainings: [{app: 'net.py:train'}]\n"


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    """Make a run of a campaign file that was stopped before it began."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweep.yaml").write_text(CAMPAIGN)
    directory = tmp_path / "freetrain-run-sweep"
    directory.mkdir()
    create(directory, CAMPAIGN)
    return directory


def create(directory, text, variables=()):
    site = str(shipped_sites()["local"].absolute())
    facts = {"name": "sweep", "campaign_text": text, "site_file": site, "variables": dict(variables)}
    store = RunStore.create(directory, facts, ["train"])
    store.end_driver(store.begin_driver("elsewhere", 1, 1), "stopped")


def train_app(monkeypatch, factor):
    main = type(sys)("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    main.FACTOR = factor
    exec("def train(session):\n    return FACTOR", main.__dict__)
    return training_app(main.train)


def test_the_same_campaign_attaches(run_dir, capsys):
    """It says how the run ended, and starts nothing."""
    run = Campaign("sweep.yaml").start()
    out = capsys.readouterr().out
    assert "attached to freetrain-run-sweep: it is over (stopped); to continue it: run.resume()" in out
    assert run.controls
    assert run.state == "stopped"
    assert len(RunStore(run_dir).drivers()) == 1


def test_another_campaign_or_site_is_refused(run_dir):
    """A run is never mistaken for one of another file."""
    with pytest.raises(InvalidInput, match=r"is a run at .*local\.yaml, not at .*slurm\.yaml; give another run_dir"):
        Campaign("sweep.yaml", config="slurm").start()
    (run_dir.parent / "sweep.yaml").write_text(CAMPAIGN + "name: other\n")
    with pytest.raises(InvalidInput, match=r"another version of this campaign; .* watch\('.*freetrain-run-sweep'\)"):
        Campaign("sweep.yaml").start()


def test_a_run_with_other_settings_is_refused(run_dir, monkeypatch):
    """Those of the user decide, also if they were left out this time, not what else is in the environment."""
    monkeypatch.delenv("LR", raising=False)
    text = "trainings: [{app: 'net.py:train', arguments: {lr: '${LR:-0.1}', home: '${HOST_OF_TEST:-a}'}}]\n"
    (run_dir.parent / "sweep.yaml").write_text(text)
    (run_dir / "campaign.sqlite").unlink()
    create(run_dir, text, {"LR": "0.2", "HOST_OF_TEST": "b"})
    monkeypatch.setenv("HOST_OF_TEST", "c")
    assert Campaign("sweep.yaml", settings={"lr": 0.2}).start().state == "stopped"
    for settings, value in (({"lr": 0.3}, "0.3"), ({}, "0.1")):
        with pytest.raises(InvalidInput, match=rf"is a run with LR=0\.2, not {value}; give another run_dir"):
            Campaign("sweep.yaml", settings=settings).start()


def test_a_training_of_an_earlier_driver_keeps_its_last_loss(run_dir):
    """Until the present driver has one of it."""
    store = RunStore(run_dir)
    for number, reports in ((1, {"train": 0.5}), (2, {})):
        journal = Journal(run_dir / f"{number}.sqlite")
        for name, loss in reports.items():
            journal.write(1.0, record.TrainingSubmitted(name, 1, 1, None))
            journal.keep_progress(1.0, name, Progress(step=5, epoch=2, samples=10, samples_total=None, loss=loss))
        journal.close()
        driver = store.begin_driver("elsewhere", 1, 1)
        store.describe_driver(driver, "ft-", journal.path)
        store.end_driver(driver, "stopped")
    (row,) = watch(run_dir).snapshot().rows
    assert (row.epoch, row.loss) == (2, 0.5)


def test_threads_that_start_one_campaign_start_one_driver(tmp_path, monkeypatch):
    """The second attaches."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(APP)
    (tmp_path / "sweep.yaml").write_text(CAMPAIGN)
    started = []

    def run_detached(run_dir, command, *_):
        started.append(command)
        time.sleep(0.05)
        launched(run_dir, "")
        (run_dir / "driver" / "exit.1.1.json").unlink()
        process = {"command": command, "host": "elsewhere", "pid": 1, "started": 1, "since": time.time()}
        (run_dir / "driver" / "process.json").write_text(json.dumps(process))

    monkeypatch.setattr("freetrain_parsl.extensions.notebook.campaign.run_detached", run_detached)
    with ThreadPoolExecutor() as threads:
        runs = [threads.submit(Campaign("sweep.yaml").start) for _ in range(3)]
    assert [run.result().state for run in runs] == ["starting"] * 3
    assert len(started) == 1


def test_cells_that_changed_while_the_driver_starts_are_refused(tmp_path, monkeypatch):
    """The command of the driver is the same; it trains what was written before."""
    monkeypatch.chdir(tmp_path)

    def run_detached(run_dir, command, *_):
        launched(run_dir, "")
        (run_dir / "driver" / "exit.1.1.json").unlink()
        process = {"command": command, "host": "elsewhere", "pid": 1, "started": 1, "since": time.time()}
        (run_dir / "driver" / "process.json").write_text(json.dumps(process))

    monkeypatch.setattr("freetrain_parsl.extensions.notebook.campaign.run_detached", run_detached)
    for _ in range(2):
        assert Campaign([{"app": train_app(monkeypatch, 2)}]).start().state == "starting"
    for changed in ({"app": train_app(monkeypatch, 3)}, {"app": train_app(monkeypatch, 2), "priority": 2}):
        with pytest.raises(InvalidInput, match="is starting another campaign"):
            Campaign([changed]).start()


def test_files_and_directories_may_begin_with_a_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    campaign = Campaign("~/sweep.yaml", run_dir="~/run")
    assert repr(campaign) == f"<campaign {tmp_path}/sweep.yaml, run directory {tmp_path}/run>"
    with pytest.raises(InvalidInput, match="there is no user 'nobody-of-that-name'"):
        watch("~nobody-of-that-name/run")


def test_a_directory_with_the_name_of_a_site_does_not_hide_it(run_dir):
    (run_dir.parent / "local").mkdir()
    assert Campaign("sweep.yaml", config="local").start().state == "stopped"


def test_a_read_only_notebook_overwrites_nothing(tmp_path, monkeypatch):
    """Another notebook's run keeps the code that it was started with, whatever is chosen here."""
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "freetrain-run-cells"
    old = CellCampaign.of([{"app": train_app(monkeypatch, 1)}], "cells", tmp_path)
    old.write(directory / "notebook")
    create(directory, old.text)
    before = (directory / "notebook" / "cells.pickle").read_bytes()
    changed = Campaign([{"app": train_app(monkeypatch, 2)}], name="cells")
    with pytest.raises(InvalidApp, match=r"__main__\.FACTOR has changed since .*, which is stopped with the old"):
        changed.start()
    monkeypatch.setattr("freetrain_parsl.extensions.notebook.campaign.take_control", lambda _: False)
    with pytest.raises(InvalidInput, match="is shown here read-only; resume it "):
        changed.start(on_code_change="resume")
    assert (directory / "notebook" / "cells.pickle").read_bytes() == before


def test_a_function_that_cannot_travel_leaves_no_directory(tmp_path, monkeypatch):
    """The same cell can be mended and run again."""
    monkeypatch.chdir(tmp_path)
    app = train_app(monkeypatch, (number for number in range(3)))
    with pytest.raises(InvalidApp, match="global 'FACTOR'"):
        Campaign([{"app": app}], name="cells").start()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("campaign", "more", "message"),
    [
        ({"app": "a.py:train"}, {}, "give a campaign file, or a list of training jobs as dicts"),
        ("sweep.yaml", {"name": "x"}, "name is for campaigns without a file"),
        ("sweep.yaml", {"settings": ["lr=1"]}, "settings are a dict with the names of variables"),
        ("sweep.yaml", {"settings": {"lr": None}}, "settings: lr must be a text or a number, got None"),
    ],
)
def test_what_is_no_campaign_is_refused(campaign, more, message):
    """Before anything is looked at."""
    with pytest.raises(InvalidInput, match=message):
        Campaign(campaign, **more)


def test_a_directory_that_cannot_be_made_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "a.py").write_text(APP)
    with pytest.raises(InvalidInput, match="file/run: Not a directory; choose another directory"):
        Campaign([{"app": "a.py:train"}], run_dir="file/run").start()


def test_a_directory_with_something_else_is_kept(tmp_path, monkeypatch):
    """Nothing is written into it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").touch()
    (tmp_path / "a.py").write_text(APP)
    with pytest.raises(InvalidInput, match="is not empty, and not a run"):
        Campaign([{"app": "a.py:train"}], run_dir="run").start()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("text", "config", "message"),
    [
        (CAMPAIGN, "local", r"sweep\.yaml:1: trainings\[1\]\.app: no such file: .*/net\.py"),
        (CAMPAIGN + "nodes: 3\n", "local", r"sweep\.yaml:2: unknown key 'nodes'"),
        (CAMPAIGN, "nowhere", "no such file: nowhere, and no shipped site"),
    ],
)
def test_what_shows_at_once_is_refused_before_a_process_starts(text, config, message, tmp_path, monkeypatch):
    """It leaves nothing behind, so that the same cell can be mended and run again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("freetrain_parsl.extensions.notebook.campaign.run_detached", lambda *_: pytest.fail("started"))
    (tmp_path / "sweep.yaml").write_text(text)
    with pytest.raises(InvalidInput, match=message):
        Campaign("sweep.yaml", config=config).start()
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.yaml"]


def launched(run_dir, output, *, code=2):
    """Write the files of a driver that has ended before it created its run."""
    driver = run_dir / "driver"
    driver.mkdir(parents=True)
    record = {"command": ["run"], "host": platform.node(), "pid": 1, "started": 1, "since": 1.0}
    (driver / "process.json").write_text(json.dumps(record))
    (driver / "exit.1.1.json").write_text(json.dumps({"code": code}))
    (driver / "output.log").write_text(output)


def test_what_the_driver_refuses_is_shown_and_raised(tmp_path, capsys):
    """In one line, without the name of the command that was run."""
    launched(tmp_path / "run", "freetrain run: c.yaml:3: training job 'a' needs 9 nodes\n")
    view = watch(tmp_path / "run")
    assert "run: failed, 0 of 0 training jobs finished" in capsys.readouterr().out
    assert "\nc.yaml:3: training job 'a' needs 9 nodes" in view.snapshot().text()
    with pytest.raises(InvalidInput, match=r"^c\.yaml:3: training job 'a' needs 9 nodes$"):
        view.results()
    assert view.wait() == "failed"
    assert str(view.explain()) == "c.yaml:3: training job 'a' needs 9 nodes"
    assert str(view.timeline()) == "run: no node has been used yet"


def test_a_run_that_was_refused_can_be_started_again(tmp_path, monkeypatch):
    """The directory is not taken for a run of something else."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(APP)
    (tmp_path / "sweep.yaml").write_text(CAMPAIGN)
    launched(tmp_path / "freetrain-run-sweep", "freetrain run: the partition is down\n")
    started = []
    monkeypatch.setattr(
        "freetrain_parsl.extensions.notebook.campaign.run_detached", lambda *given: started.append(given)
    )
    assert Campaign("sweep.yaml").start().controls
    [(run_dir, command, directory, _)] = started
    assert run_dir == tmp_path / "freetrain-run-sweep"
    assert command[:2] == ["run", str(tmp_path / "sweep.yaml")]
    assert directory == tmp_path


SITE = "site: mine\nsystem: slurm\nblock: {partition: spare}\n"


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Be in a directory with a campaign; the drivers that are started, which do not run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(APP)
    (tmp_path / "sweep.yaml").write_text(CAMPAIGN)
    started = []

    def start(run_dir, *given):
        launched(run_dir, "freetrain run: the partition is down\n")
        started.append(given)

    monkeypatch.setattr("freetrain_parsl.extensions.notebook.campaign.run_detached", start)
    return started


def test_the_site_of_the_directory_is_used_and_named(started, tmp_path, monkeypatch, capsys):
    """As by `freetrain run` there: the driver is left to find it, in the directory of the campaign's cell."""
    (tmp_path / "site.yaml").write_text(SITE)
    campaign = Campaign("sweep.yaml")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    campaign.start()
    [(command, directory, _)] = started
    assert ("--config" in command, directory) == (False, tmp_path)
    assert capsys.readouterr().out.splitlines()[0] == "using site.yaml; config chooses another site"


def test_the_site_of_the_directory_is_checked_before_a_process_starts(started, tmp_path):
    """With its file and line."""
    (tmp_path / "site.yaml").write_text(SITE + "nodes: 3\n")
    with pytest.raises(InvalidInput, match=r"site\.yaml:4: unknown key 'nodes'"):
        Campaign("sweep.yaml").start()
    assert not started


def test_a_site_that_any_user_can_write_is_used_only_if_it_is_named(started, tmp_path, capsys):
    """It says so, and the driver looks at it in the same way."""
    (tmp_path / "site.yaml").write_text(SITE)
    (tmp_path / "site.yaml").chmod(0o666)
    Campaign("sweep.yaml").start()
    assert "site.yaml is not used, any user can write it; to use it nevertheless, name it with config\n" in (
        capsys.readouterr().out
    )
    Campaign("sweep.yaml", config="site.yaml", run_dir="other").start()
    commands = [command for command, _, _ in started]
    assert "--config" not in commands[0]
    assert commands[1][2:4] == ["--config", "site.yaml"]


def test_a_cell_without_a_site_attaches_to_the_run_wherever_it_was_started(run_dir, capsys):
    """As after a `freetrain init` in its directory."""
    (run_dir.parent / "site.yaml").write_text(SITE)
    assert Campaign("sweep.yaml").start().state == "stopped"
    assert "attached to freetrain-run-sweep" in capsys.readouterr().out


def test_a_run_that_was_removed_is_named_in_one_line(run_dir):
    """Whatever the notebook asks of it."""
    run = Campaign("sweep.yaml").start()
    shutil.rmtree(run_dir)
    for ask in (run.results, run.timeline, run.explain, run.snapshot, run.wait, run.stop):
        with pytest.raises(InvalidInput, match=r"freetrain-run-sweep was removed, or its campaign\.sqlite$"):
            ask()
    assert repr(run).endswith("freetrain-run-sweep was removed, or its campaign.sqlite")


def test_a_run_that_starts_on_another_host_is_not_started_again(tmp_path, monkeypatch, capsys):
    """Whether that process still runs cannot be seen here."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweep.yaml").write_text(CAMPAIGN)
    campaign = Campaign("sweep.yaml")
    launched(tmp_path / "freetrain-run-sweep", "")
    driver = tmp_path / "freetrain-run-sweep" / "driver"
    (driver / "exit.1.1.json").unlink()
    command = ["run", str(tmp_path / "sweep.yaml"), "--run-dir", str(driver.parent)]
    record = {"command": command, "host": "elsewhere", "pid": 1, "started": 1, "since": time.time()}
    (driver / "process.json").write_text(json.dumps(record))
    assert campaign.start().state == "starting"
    assert "attached to freetrain-run-sweep: it is starting" in capsys.readouterr().out
    (driver / "process.json").write_text(json.dumps({**record, "command": ["run", "other.yaml"]}))
    with pytest.raises(InvalidInput, match="is starting another campaign"):
        campaign.start()
