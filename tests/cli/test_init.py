"""`freetrain init`."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from freetrain_parsl.campaign.files.yaml_file import Variables
from freetrain_parsl.campaign.site.site import Site
from freetrain_parsl.cli import init as module
from freetrain_parsl.cli.sources import SourceOptions, choose_source
from freetrain_parsl.errors import BatchSystemError
from freetrain_parsl.executor.batch.slurm import SlurmSystem
from freetrain_parsl.windows.machine import Machine, NodeType, Queue
from freetrain_parsl.windows.state import Partition

NODES = ((NodeType(32, 4, 65536), 2),)
OPEN = Queue(Partition("spare", ("n1", "n2"), preemptible=True), NODES)
CLOSED = Queue(Partition("debug", ("n1",)), NODES, refusal="partition 'debug' is down: jobs in it do not start")
MACHINE = Machine("slurm", (OPEN, CLOSED), "tiny", ("m1",))


@pytest.fixture
def invoke(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "_describe", lambda system: MACHINE if system.shared else None)
    app = typer.Typer()
    app.command()(module.init)
    return lambda *arguments: CliRunner().invoke(app, arguments)


def test_it_writes_the_file_that_the_following_commands_use(invoke, tmp_path):
    result = invoke("--system", "slurm")
    assert result.exit_code == 0
    site = Site.load(tmp_path / "site.yaml")
    assert (site.name, site.block["partition"], site.block["account"]) == ("tiny", "spare", "m1")
    assert result.stderr.splitlines()[-1] == "next:  freetrain windows"
    assert choose_source(SourceOptions(), Variables()).title == "site tiny, Slurm, partition spare"
    assert "is down" in result.stderr


def test_a_file_of_another_name_is_named_in_the_next_command(invoke):
    assert invoke("my site.yaml", "--system", "slurm").stderr.splitlines()[-1] == (
        "next:  freetrain windows --config 'my site.yaml'"
    )


def test_standard_output_holds_only_the_file(invoke, tmp_path):
    result = invoke("-", "--system", "slurm")
    (tmp_path / "copy.yaml").write_text(result.stdout)
    assert Site.load(tmp_path / "copy.yaml").name == "tiny"
    assert not (tmp_path / "-").exists()


def test_an_existing_file_is_not_overwritten(invoke, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("mine")
    result = invoke(str(file), "--system", "slurm")
    assert result.exit_code == 2
    assert result.stderr == f"freetrain init: {file} exists; give another name, or --force to overwrite it\n"
    assert file.read_text() == "mine"
    assert invoke(str(file), "--system", "slurm", "--force").exit_code == 0
    assert Site.load(file).name == "tiny"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--system", "slrum"], "--system must be slurm, pbs or local, got 'slrum' (did you mean 'slurm'?)"),
        (["--system", "slurm", "--partition", "spar"], "there is no such partition (did you mean 'spare'?)"),
        (["--system", "slurm", "--partition", "debug"], "partition debug: partition 'debug' is down"),
        (["--system", "slurm", "--account", "m2"], "--account m2: you may charge m1"),
        (["--system", "local", "--account", "m2"], "--partition and --account are for Slurm and PBS"),
        (["nowhere/site.yaml", "--system", "local"], "nowhere/site.yaml cannot be written: No such file or directory"),
    ],
)
def test_mistakes_are_refused_in_one_line(invoke, arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr.splitlines()[-1]


def test_without_a_batch_system_the_embedded_cluster_is_used(invoke, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    result = invoke()
    assert result.exit_code == 0
    assert Site.load(tmp_path / "site.yaml").system == "local"
    assert result.stderr.splitlines()[-1] == "next:  freetrain run CAMPAIGN.yaml"


@pytest.mark.parametrize(("arguments", "hint"), [((), True), (("--system", "slurm"), False)])
def test_commands_without_a_cluster_lead_to_the_embedded_one_unless_the_system_was_chosen(
    invoke, monkeypatch, arguments, hint
):
    def fail(system):
        raise BatchSystemError("scontrol failed: Unknown host")

    monkeypatch.setattr(module, "_describe", fail)
    monkeypatch.setattr(module, "_system", lambda named: SlurmSystem())
    result = invoke(*arguments)
    assert result.exit_code != 0
    assert ("--system local" in result.stderr) == hint
