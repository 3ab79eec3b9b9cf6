"""Choice of the batch system that the verbs query."""

from __future__ import annotations

from datetime import timedelta

import pytest
import typer

from freetrain_parsl.cli import sources
from freetrain_parsl.cli.sources import SourceOptions, choose_source, errors_in_one_line, read_variables
from freetrain_parsl.cluster.system import EmbeddedSystem
from freetrain_parsl.errors import BatchSystemError, ClusterGone, UsageError
from freetrain_parsl.planning.settings import PlannerSettings, RescaleCosts

SITE = """
system: slurm
block: {partition: "${PART}", account: phys}
planner: {startup: 40 s, min_useful: 15 min}
trainings: {policy: window, rescale_costs: {up: 1 s, down: 2 s, start: 3 s}}
"""


@pytest.fixture
def here(monkeypatch, tmp_path):
    """Set the commands on PATH and whether an embedded cluster runs; record what would be queried."""

    def arrange(*commands: str, embedded: bool = False):
        for command in commands:
            (tmp_path / command).write_text("#!/bin/sh\n")
            (tmp_path / command).chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setattr(EmbeddedSystem, "is_here", lambda self: embedded)
        monkeypatch.setattr(sources, "_make_source", lambda system, given: system.name)

    return arrange


def choose(**options):
    return choose_source(SourceOptions(**options), read_variables(None))


@pytest.mark.parametrize(
    ("commands", "embedded", "system"),
    [((), False, "local"), ((), True, "local"), (("sinfo",), False, "slurm"), (("pbsnodes",), False, "pbs")],
)
def test_the_system_that_is_here_is_asked(here, commands, embedded, system):
    here(*commands, embedded=embedded)
    chosen = choose()
    assert (chosen.source, chosen.remark) == (system, "")


def test_where_several_are_here_it_says_which_was_asked(here):
    here("sinfo", "pbsnodes", embedded=True)
    chosen = choose()
    assert chosen.source == "slurm"
    assert chosen.remark == ("using Slurm, since sinfo is on PATH; use --system pbs or --system local for another")


@pytest.mark.parametrize(("options", "system"), [({"system": "pbs"}, "pbs"), ({"cluster": "c1"}, "local")])
def test_an_option_decides(here, options, system):
    here("sinfo")
    assert choose(**options).source == system


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"system": "slrum"}, "--system must be slurm, pbs or local, got 'slrum' (did you mean 'slurm'?)"),
        ({"system": "local", "partition": "main"}, "--partition is not an option for the embedded cluster"),
        ({"system": "pbs", "qos": "low"}, "--qos is not an option for PBS"),
        ({"system": "slurm", "cluster": "c1"}, "--cluster is not an option for Slurm"),
        ({"config": "local", "account": "a"}, "--account and --config: the site file sets this; give only one of them"),
        ({"config": "local", "system": "pbs"}, "--system and --config: the site file sets this; give only one of them"),
    ],
)
def test_options_that_contradict_each_other_are_refused(here, options, message):
    here("sinfo")
    with pytest.raises(UsageError) as refused:
        choose(**options)
    assert str(refused.value) == message


def test_only_systems_that_others_use_are_asked_seldom(here):
    here()
    assert choose(system="local").least_interval == 0
    assert choose(system="slurm").least_interval == choose(system="pbs").least_interval == 2


def test_a_site_file_says_everything(tmp_path):
    """No batch system is queried."""
    (tmp_path / "site.yaml").write_text(SITE)
    variables = read_variables(["part=gpu"])
    chosen = choose_source(SourceOptions(config=str(tmp_path / "site.yaml")), variables)
    variables.refuse_unused()
    assert (chosen.source.partition, chosen.source.account) == ("gpu", "phys")
    assert chosen.title == "site site, Slurm, partition gpu"
    assert chosen.settings == PlannerSettings(startup=timedelta(seconds=40), min_useful=timedelta(minutes=15))
    assert (chosen.policy, chosen.costs) == (
        "window",
        RescaleCosts(timedelta(seconds=1), timedelta(seconds=2), timedelta(seconds=3)),
    )
    assert chosen.least_interval == 2


def test_options_reach_the_source():
    slurm = choose(system="slurm", partition="gpu", account="phys", qos="low", constraint="a100").source
    assert (slurm.partition, slurm.account, slurm.qos) == ("gpu", "phys", "low")
    pbs = choose(system="pbs", partition="workq", account="phys").source
    assert (pbs.queue, pbs.account) == ("workq", "phys")


@pytest.mark.parametrize("error", [UsageError("wrong"), BatchSystemError("wrong"), ClusterGone("wrong")])
def test_whatever_goes_wrong_is_one_line_and_exit_code_2(error, capsys):
    with pytest.raises(typer.Exit) as ended, errors_in_one_line("verb"):
        raise error
    assert ended.value.exit_code == 2
    assert capsys.readouterr().err == "freetrain verb: wrong\n"


def test_an_interrupt_ends_with_its_own_code():
    with pytest.raises(typer.Exit) as ended, errors_in_one_line("verb"):
        raise KeyboardInterrupt
    assert ended.value.exit_code == 130


def test_the_site_file_of_this_directory_is_used_and_said(here, monkeypatch, tmp_path):
    here("sinfo")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "site.yaml").write_text(SITE.replace("${PART}", "preempt"))
    chosen = choose()
    assert chosen.title == "site site, Slurm, partition preempt"
    assert chosen.remark == "using site.yaml; --config chooses another site"
    assert chosen.policy == "window"


@pytest.mark.parametrize("options", [{"partition": "debug"}, {"system": "slurm"}, {"qos": "spare", "account": "a"}])
def test_options_win_over_the_site_file_of_this_directory(here, monkeypatch, tmp_path, options):
    here("sinfo")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "site.yaml").write_text("system: slrum\n")
    chosen = choose(**options)
    assert chosen.source == "slurm"
    assert chosen.remark.startswith("site.yaml is not used, since --")
    assert all(f"--{name}" in chosen.remark for name in options)


def test_a_named_site_wins_over_the_one_of_this_directory(here, monkeypatch, tmp_path):
    here("sinfo")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "site.yaml").write_text("system: slrum\n")
    (tmp_path / "other.yaml").write_text(SITE.replace("${PART}", "long"))
    chosen = choose(config="other.yaml")
    assert (chosen.title, chosen.remark) == ("site other, Slurm, partition long", "")


def test_a_site_file_that_may_be_somebody_elses_is_said_and_not_used(here, monkeypatch, tmp_path):
    here("sinfo", "pbsnodes")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "site.yaml").write_text("system: local\n")
    (tmp_path / "site.yaml").chmod(0o666)
    chosen = choose()
    assert chosen.source == "slurm"
    first, second = chosen.remark.splitlines()
    assert first.startswith("site.yaml is not used, any user can write it")
    assert second.startswith("using Slurm")
