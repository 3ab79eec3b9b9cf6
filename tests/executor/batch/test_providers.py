"""Blocks through the user's provider: what its copy submits, and what is rejected beforehand."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import psutil
import pytest
from parsl.launchers import MpiExecLauncher, SrunLauncher
from parsl.providers import LocalProvider, PBSProProvider, SlurmProvider
from parsl.providers.errors import SubmitException

from freetrain_parsl import EmbeddedClusterProvider, FreeTrainExecutor, PlannerSettings
from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.executor.batch.providers import complaint_of, provider_for, window_source_for
from freetrain_parsl.windows.system import BlockSpec

if TYPE_CHECKING:
    from pathlib import Path

SPEC = BlockSpec("3", ("n1", "n2"), 540.0, 120.0)


@pytest.fixture
def submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return the batch script that a provider's copy passes to its submit command."""
    for command, answer in (("sbatch", "Submitted batch job 7"), ("qsub", "7.server"), ("sacct", "")):
        script = tmp_path / command
        script.write_text(
            f"#!/bin/sh\n[ $# = 0 ] || cat \"$1\" > {tmp_path}/script\nenv > {tmp_path}/env\necho '{answer}'\n"
        )
        script.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def submit(provider, spec=SPEC) -> list[str]:
        provider.script_dir = str(tmp_path)
        assert provider_for(provider, spec).submit("work", 1, "freetrain.x.y.block-3").startswith("7")
        return (tmp_path / "script").read_text().splitlines()

    return submit


def test_a_slurm_block_has_its_own_size_and_time_and_is_never_requeued(submitted) -> None:
    lines = submitted(SlurmProvider(partition="p", launcher=SrunLauncher(), cores_per_node=8))
    for line in (
        "nodes=2",
        "time=9",
        "no-requeue",
        "signal=USR1@1",
        "nodelist=n1,n2",
        "partition=p",
        "cpus-per-task=8",
    ):
        assert f"#SBATCH --{line}" in lines


def test_a_slurm_block_may_run_anywhere_where_all_windows_last(submitted) -> None:
    spec = BlockSpec("3", ("n1",), 540.0, 120.0, pinned=False)
    assert not any("nodelist" in line for line in submitted(SlurmProvider(launcher=SrunLauncher()), spec))


def test_a_pbs_block_shrinks_to_fit_on_hosts_of_its_own(submitted, tmp_path) -> None:
    lines = submitted(PBSProProvider(queue=None, account=None, cpus_per_node=4, launcher=MpiExecLauncher()))
    assert "#PBS -l min_walltime=00:02:00,max_walltime=00:09:00" in lines
    assert "#PBS -l select=2:ncpus=4" in lines
    assert "#PBS -l place=scatter" in lines
    assert not any("-l walltime" in line for line in lines)
    assert lines.index("trap : TERM") < lines.index(f"cd {tmp_path}")


def test_a_place_that_the_user_chose_stays(submitted) -> None:
    mine = PBSProProvider(queue=None, account=None, scheduler_options="#PBS -l place=pack", launcher=MpiExecLauncher())
    assert [line for line in submitted(mine) if "place=" in line] == ["#PBS -l place=pack"]


def test_the_users_provider_itself_stays_as_it_is() -> None:
    provider = SlurmProvider(launcher=SrunLauncher(), nodes_per_block=1, walltime="00:10:00")
    before = dict(vars(provider))
    provider_for(provider, SPEC)
    assert vars(provider) == before


@pytest.mark.parametrize("name", ["n1;rm -rf x", "n1\n#SBATCH --x", "$(x)", "", "-n"])
def test_nothing_but_a_node_name_gets_into_a_batch_script(name) -> None:
    with pytest.raises(InvalidSettings, match="node name"):
        provider_for(SlurmProvider(launcher=SrunLauncher()), BlockSpec("1", (name,), 60.0, 60.0))


def test_a_submit_command_that_hangs_is_ended(tmp_path) -> None:
    """Parsl's own function would leave it running, and it would submit later."""
    provider = provider_for(SlurmProvider(launcher=SrunLauncher(), cmd_timeout=1), SPEC)
    command = f"sh -c 'echo $$ > {tmp_path}/pid; exec sleep 600'"
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        provider.execute_wait(command)
    assert "did not end within 1 s" in complaint_of(caught.value)
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_the_complaint_is_what_the_batch_system_said() -> None:
    error = SubmitException("job", "Could not read job ID", stdout="", stderr="sbatch: error: a\nsbatch: error: b\n")
    assert complaint_of(error) == "sbatch: error: a; sbatch: error: b"
    assert complaint_of(RuntimeError("broken")) == "broken"
    assert complaint_of(RuntimeError()) == "RuntimeError"


@pytest.mark.parametrize(
    ("provider", "message"),
    [
        (SlurmProvider(), r"launcher=SrunLauncher\(\)"),
        (PBSProProvider(), r"launcher=MpiExecLauncher\(\)"),
        (LocalProvider(), "cannot query LocalProvider for windows"),
    ],
)
def test_a_provider_that_cannot_serve_is_refused_at_once(provider, message) -> None:
    with pytest.raises(InvalidSettings, match=message):
        FreeTrainExecutor(provider=provider)


def test_one_node_a_block_needs_no_launcher() -> None:
    FreeTrainExecutor(provider=SlurmProvider(), address="127.0.0.1", planner=PlannerSettings(max_nodes_per_block=1))


@pytest.mark.parametrize("label", ["a b", "a;b", "", "ü"])
def test_a_label_that_cannot_be_part_of_a_jobs_name_is_refused(label) -> None:
    with pytest.raises(InvalidSettings, match="label"):
        FreeTrainExecutor(label=label, provider=EmbeddedClusterProvider())


def test_windows_are_asked_for_as_the_provider_submits() -> None:
    source = window_source_for(SlurmProvider(partition="p", account="a", qos="q", exclusive=False))
    assert (source.partition, source.account, source.qos) == ("p", "a", "q")
    assert window_source_for(PBSProProvider(queue="debug", cpus_per_node=32)).queue == "debug"


def test_variables_of_the_user_do_not_override_what_the_script_states(
    submitted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm prefers ``SBATCH_…`` to the lines of the script."""
    for name in ("PARTITION", "TIMELIMIT", "REQUEUE", "NO_REQUEUE", "SIGNAL", "ACCOUNT"):
        monkeypatch.setenv(f"SBATCH_{name}", "other")
    submitted(SlurmProvider("debug", exclusive=False))
    seen = [line.partition("=")[0] for line in (tmp_path / "env").read_text().splitlines() if line.endswith("=other")]
    assert seen == ["SBATCH_ACCOUNT"], "a default that the script does not state"
