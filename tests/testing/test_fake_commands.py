"""The fake commands: jobs run, their output can be parsed, unknown options are rejected."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import threading
import time
from contextlib import contextmanager
from datetime import timedelta

import pytest
from parsl.launchers import MpiExecLauncher, SrunLauncher
from parsl.providers import PBSProProvider, SlurmProvider
from parsl.providers.errors import SubmitException

from freetrain_parsl.campaign.files.yaml_file import Variables
from freetrain_parsl.campaign.site.providers import make_provider, make_window_source
from freetrain_parsl.campaign.site.site import Site
from freetrain_parsl.cluster.client import EmbeddedCluster
from freetrain_parsl.errors import BatchSystemError, InvalidSettings
from freetrain_parsl.executor.batch.providers import provider_for
from freetrain_parsl.extensions.pbs.source import PbsWindowSource
from freetrain_parsl.testing.window_suite import WindowSourceConformance
from freetrain_parsl.windows.base import BlockState
from freetrain_parsl.windows.commands import Commands
from freetrain_parsl.windows.slurm.source import SlurmWindowSource
from freetrain_parsl.windows.system import BlockSpec
from tests.support.fake_commands import (
    MISHAP_VARIABLE,
    PBS_COMMANDS,
    SLURM_COMMANDS,
    calls,
    clear_mishaps,
    install_fake_pbs,
    install_fake_slurm,
    set_mishap,
    steps,
)

pytestmark = pytest.mark.cluster

_RUNNING = BlockState.RUNNING
NODES = ("n00", "n01", "n02", "n03")
STEP = """echo "$FREETRAIN_CLUSTER_NODE hello"
trap 'echo "$FREETRAIN_CLUSTER_NODE saved"; exit 0' TERM
sleep 60 & wait"""


class Slurm:
    """A fake Slurm in front of a cluster."""

    kind, mark, launch, submit = "slurm", "#SBATCH", "srun --ntasks {nodes} bash", "sbatch"

    def __init__(self, directory, cluster, version):
        self.directory, self.fake, self.cluster = directory, directory / "fake", cluster
        self.bin = install_fake_slurm(self.fake, cluster.name, version=version)

    def source(self, queue="backfill", **settings):
        return SlurmWindowSource(partition=queue, **settings)

    def options(self, nodes, seconds, queue):
        assert seconds % 60 == 0
        return [f"--nodes={nodes}", f"--time={seconds // 60}", f"--partition={queue}", "--job-name=ft-test"]

    def provider(self, queue="backfill"):
        return SlurmProvider(
            partition=queue, nodes_per_block=2, walltime="00:05:00", launcher=SrunLauncher(overrides="--overlap")
        )

    def run(self, body, *, nodes=1, seconds=300, queue="backfill"):
        """Submit a batch script and return its job id."""
        script = self.directory / "job.sh"
        head = [f"{self.mark} {option}" for option in self.options(nodes, seconds, queue)]
        output = self.directory / "out"
        head += [f"{self.mark} {flag} {output}" for flag in ("-o", "-e")]
        script.write_text("\n".join(["#!/bin/bash", *head, body, ""]), encoding="utf-8")
        answer = subprocess.run([self.submit, str(script)], capture_output=True, text=True, check=True).stdout
        return answer.split()[-1]

    def step(self, nodes):
        """Return the line of a batch script that runs STEP on every node."""
        step = self.directory / "step.sh"
        step.write_text(STEP, encoding="utf-8")
        return f"{self.launch.format(nodes=nodes)} {step}"

    def output(self):
        file = self.directory / "out"
        return sorted(file.read_text(encoding="utf-8").split("\n")) if file.exists() else []


class Pbs(Slurm):
    """A fake PBS in front of a cluster."""

    kind, mark, launch, submit = "pbs", "#PBS", "trap : TERM\nmpiexec -n {nodes} --ppn 1 bash", "qsub"

    def __init__(self, directory, cluster, version):
        self.directory, self.fake, self.cluster = directory, directory / "fake", cluster
        self.bin = install_fake_pbs(self.fake, cluster.name, version=version)

    def source(self, queue="backfill", **settings):
        return PbsWindowSource(queue=queue, **settings)

    def options(self, nodes, seconds, queue):
        return [f"-l select={nodes}:ncpus=4", f"-l walltime={seconds}", f"-q {queue}", "-N ft-test"]

    def provider(self, queue="backfill"):
        return PBSProProvider(queue=queue, nodes_per_block=2, walltime="00:05:00", launcher=MpiExecLauncher())


FAKES = {"slurm 24.11": (Slurm, "24.11.5"), "slurm 22.05": (Slurm, "22.05.8"), "pbs": (Pbs, "23.06.06")}


@pytest.fixture(autouse=True, scope="module")
def runtime():
    """Separate the tests' clusters from the user's; short, because socket paths are limited."""
    with tempfile.TemporaryDirectory(prefix="ft-", dir="/tmp") as directory, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", directory)
        yield


@contextmanager
def fake_of(name, directory):
    """Start a cluster, and fake commands for it that are not on PATH yet."""
    kind, version = FAKES[name]
    with EmbeddedCluster(directory / "cluster", nodes=len(NODES), grace=timedelta(seconds=1)) as cluster:
        yield kind(directory, cluster, version)


@pytest.fixture(scope="module", params=FAKES)
def shared_fake(request, tmp_path_factory):
    with fake_of(request.param, tmp_path_factory.mktemp("shared")) as fake:
        yield fake


# What does not depend on the texts that a version of Slurm prints is tried with one of them.
one_slurm = pytest.mark.parametrize("shared_fake", ["slurm 24.11", "pbs"], indirect=True)


@pytest.fixture
def on_path(monkeypatch):
    """Prepend the commands of a fake to PATH."""
    return lambda fake: monkeypatch.setenv("PATH", str(fake.bin), prepend=":")


@pytest.fixture
def fake(shared_fake, on_path, tmp_path):
    """Provide a fake to one test, without jobs and mishaps, with the test's own directory."""
    shared_fake.directory = tmp_path
    on_path(shared_fake)
    yield shared_fake
    clear_mishaps(shared_fake.fake)
    client = shared_fake.cluster.client
    client.cancel(list(client.queue()))
    wait_for(client.queue, {})


def main_job(fake, nodes, seconds):
    """Submit a main job directly to the cluster."""
    walltime = timedelta(seconds=seconds)
    return fake.cluster.client.submit(["sleep", "60"], nodes=nodes, walltime=walltime, preemptible=False)


def wait_for(ask, what, seconds=20.0):
    """Wait until `ask` returns the expected value, and return it."""
    deadline = time.monotonic() + seconds
    while (got := ask()) != what:
        assert time.monotonic() < deadline, f"waited for {what}, got {got}"
        time.sleep(0.05)
    return got


def state_of(source, job):
    return source.survey([job]).blocks[job].state


def test_nodes_of_a_pbs_are_of_two_kinds_by_what_their_blocks_select(on_path, tmp_path, monkeypatch):
    """Blocks of each kind are submitted with its queue and options, and run on nodes of that kind."""
    monkeypatch.chdir(tmp_path)  # Parsl's launcher leaves the list of nodes there
    text = """
system: pbs
kinds:
  even: {queue: backfill, select_options: island=even}
  odd: {queue: preemptible, select_options: island=odd, cores: 4}
"""
    site = Site.parse(text, "site.yaml", Variables({}, {}))
    with fake_of("pbs", tmp_path) as fake:
        on_path(fake)
        source = make_window_source(site)
        survey = source.survey()
        kinds = {node: window.node_kind for window in survey.windows for node in window.nodes}
        assert kinds == {"n00": "even", "n01": "odd", "n02": "even", "n03": "odd"}
        assert survey.nodes_by_kind == {"even": 2, "odd": 2}
        jobs = {}
        for kind in reversed(site.kinds):
            nodes = next(window.nodes for window in survey.windows if window.node_kind == kind.name)
            spec = BlockSpec(kind.name, nodes[:1], 120.0, 60.0, node_kind=kind.name)
            provider = provider_for(make_provider(site.of_kind(kind)), spec)
            provider.script_dir = str(tmp_path)
            jobs[kind.name] = provider.submit("sleep 60", 1, f"ft-{kind.name}")
        wait_for(lambda: {job: state_of(source, job) for job in jobs.values()}, dict.fromkeys(jobs.values(), _RUNNING))
        blocks = source.survey(list(jobs.values())).blocks
        assert {kind: blocks[job].nodes for kind, job in jobs.items()} == {"even": ("n00",), "odd": ("n01",)}
        source.cancel(list(jobs.values()))
        wait_for(fake.cluster.client.queue, {})


# -- windows -------------------------------------------------------------------------------------------------


def test_windows_are_those_of_the_cluster(fake):
    """Three nodes are a window until the planned start of the head job; the node in use is in none."""
    main_job(fake, 1, 90)
    head = main_job(fake, 4, 60)
    start = fake.cluster.client.expected_starts()[head]["start"]
    survey = fake.source().survey()
    assert [window.nodes for window in survey.windows] == [NODES[1:]]
    assert survey.windows[0].closes == pytest.approx(start, abs=1.5)
    assert set(survey.unused) == {"n00"}


@one_slurm
def test_a_block_that_fits_starts_at_once_and_a_longer_one_waits(fake):
    main_job(fake, 1, 90)
    main_job(fake, 4, 60)
    source = fake.source()
    longer, fitting = fake.run("sleep 60", nodes=3, seconds=120), fake.run("sleep 60", nodes=3, seconds=60)
    assert wait_for(lambda: state_of(source, fitting), BlockState.RUNNING)
    survey = source.survey([fitting, longer])
    assert survey.blocks[fitting].nodes == NODES[1:]
    assert survey.blocks[longer].state is BlockState.PENDING
    assert survey.windows == ()


@one_slurm
def test_a_job_of_the_main_queue_goes_before_blocks(fake):
    """One of our blocks is preempted for it, and reports it."""
    source = fake.source()
    block = fake.run("sleep 60", nodes=4)
    wait_for(lambda: state_of(source, block), BlockState.RUNNING)
    main = fake.run("sleep 60", nodes=4, queue="main")
    wait_for(lambda: state_of(source, block), BlockState.PREEMPTED)
    wait_for(lambda: state_of(source, main), BlockState.RUNNING)


# -- jobs ----------------------------------------------------------------------------------------------------


@one_slurm
def test_the_script_runs_on_the_first_node_and_its_step_on_every_node(fake):
    job = fake.run(f'echo "$FREETRAIN_CLUSTER_NODE batch"\n{fake.step(3)}', nodes=3)
    wait_for(fake.output, ["", "n00 batch", "n00 hello", "n01 hello", "n02 hello"])
    assert state_of(fake.source(), job) is BlockState.RUNNING


@one_slurm
def test_every_task_hears_that_its_job_is_cancelled_and_may_save(fake):
    source = fake.source()
    job = fake.run(fake.step(2), nodes=2)
    wait_for(lambda: len(fake.output()), 3)
    source.cancel([job])
    wait_for(lambda: state_of(source, job), BlockState.CANCELLED)
    assert fake.output() == ["", "n00 hello", "n00 saved", "n01 hello", "n01 saved"]


@one_slurm
@pytest.mark.parametrize(("body", "state"), [("exit 0", BlockState.COMPLETED), ("exit 3", BlockState.FAILED)])
def test_how_the_script_ends_is_how_its_job_ends(fake, body, state):
    """The other nodes of the job end with it."""
    source = fake.source()
    job = fake.run(body, nodes=2)
    wait_for(lambda: state_of(source, job), state)


@one_slurm
def test_what_the_script_leaves_behind_ends_with_it(fake):
    job = fake.run(f"{fake.step(2)} &\nsleep 2", nodes=2)
    source = fake.source()
    wait_for(lambda: state_of(source, job).ended, True)
    wait_for(lambda: {node["job"] for node in fake.cluster.client.nodes().values()}, {None})


@pytest.mark.parametrize("shared_fake", ["pbs"], indirect=True)
def test_a_walltime_that_is_over_is_told(fake):
    """PBS counts seconds; Slurm's least walltime, a minute, is too long for a test."""
    job, source = fake.run("exec sleep 60", seconds=1), fake.source()
    wait_for(lambda: state_of(source, job), BlockState.TIMED_OUT)


@pytest.mark.smoke
def test_parsls_providers_submit_to_them(fake, monkeypatch):
    """Each launcher starts the command once on every node of the block."""
    monkeypatch.chdir(fake.directory)  # the launchers write a list of the nodes there
    provider = fake.provider()
    provider.script_dir = str(fake.directory)
    seen = fake.directory / "seen"
    job = provider.submit(f"echo one >> {seen}", 1, "ft-parsl")
    source = fake.source()
    wait_for(lambda: state_of(source, job), BlockState.COMPLETED)
    assert seen.read_text(encoding="utf-8") == "one\none\n"


def test_a_task_may_end_before_its_client_knows_that_it_was_started(monkeypatch, tmp_path):
    ended, send = threading.Event(), socket.send_fds

    def end_at_once():
        with listener.accept()[0] as client:
            _, files, _, _ = socket.recv_fds(client, 65536, 2)
            for file in files:
                os.close(file)
            client.sendall(b"3\n")
        ended.set()

    def send_slowly(*arguments):
        sent = send(*arguments)
        assert ended.wait(60)
        return sent

    monkeypatch.setattr(steps, "job_socket", lambda *_: tmp_path / "node")
    monkeypatch.setattr(socket, "send_fds", send_slowly)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "node"))
        listener.listen()
        node = threading.Thread(target=end_at_once)
        node.start()
        assert steps.run_tasks("1", ["unused"], [steps.StepTask(1, {})]) == 3
        node.join()


def test_a_living_job_is_found_by_its_name(fake):
    job = fake.run("sleep 60")
    assert fake.source().find_jobs("ft-") == {job: "ft-test"}


# -- failures ------------------------------------------------------------------------------------------------


@one_slurm
@pytest.mark.parametrize("kind", ["down", "garbage", "refuse"])
def test_a_batch_system_in_trouble_is_an_error_that_passes(fake, kind):
    source = fake.source()
    source.survey()
    set_mishap(fake.fake, kind, value="busy" if kind == "refuse" else "")
    with pytest.raises(BatchSystemError):
        source.survey()
    clear_mishaps(fake.fake)
    assert source.survey().windows


@one_slurm
def test_a_command_that_hangs_is_given_up(fake, monkeypatch):
    """The environment sets mishaps too."""
    source = fake.source(run=Commands(timedelta(seconds=0.5)))
    monkeypatch.setenv(MISHAP_VARIABLE, "* hang")
    with pytest.raises(BatchSystemError, match="did not answer within"):
        source.survey()


@one_slurm
def test_a_slow_command_answers_in_the_end(fake):
    set_mishap(fake.fake, "slow", command=fake.submit, value="0.3")
    begin = time.monotonic()
    fake.run("exit 0")
    assert time.monotonic() - begin > 0.3


def test_a_refused_submission_says_why(fake):
    complaint = {"slurm": "Invalid account or account/partition combination specified", "pbs": "Invalid Account"}
    set_mishap(fake.fake, "refuse", command=fake.submit, value=complaint[fake.kind])
    provider = fake.provider()
    provider.script_dir = str(fake.directory)
    with pytest.raises(SubmitException) as refused:
        provider.submit("exit 0", 1, "ft-parsl")
    refusal = fake.source().explain_refusal(refused.value.stderr.strip())
    assert complaint[fake.kind] in refusal.reason
    assert not refusal.passing


def test_an_unknown_queue_is_refused(fake):
    with pytest.raises(InvalidSettings, match="backfil"):
        fake.source("backfil").check(60.0)
    with pytest.raises(subprocess.CalledProcessError) as refused:
        fake.run("exit 0", queue="nowhere")
    assert refused.value.stderr.count("\n") == 1
    assert not fake.source().explain_refusal(refused.value.stderr.strip()).passing


@pytest.mark.parametrize("name", ["slurm 24.11", "pbs"])
def test_a_cluster_that_is_gone_is_a_batch_system_that_is_down(name, on_path, tmp_path):
    with fake_of(name, tmp_path) as fake:
        on_path(fake)
        source = fake.source()
        fake.cluster.stop()
        with pytest.raises(BatchSystemError, match=r"controller|connect"):
            source.survey()


@pytest.mark.smoke
def test_what_the_fakes_do_not_know_they_refuse_in_one_line(fake):
    """Changes of the queries to the real ones are noticed."""
    for name in SLURM_COMMANDS if fake.kind == "slurm" else PBS_COMMANDS:
        answer = subprocess.run([name, "--no-such-option"], capture_output=True, text=True, check=False)
        assert answer.returncode != 0, name
        assert answer.stdout == "", name
        assert answer.stderr.count("\n") == 1, answer.stderr


@one_slurm
def test_calls_are_counted(fake):
    """The first round has more queries than the next: Slurm's nodes are then updated from its queue."""
    source = fake.source()
    source.survey()
    first = len(calls(fake.fake))
    source.survey()
    assert len(calls(fake.fake)) - first == (2 if isinstance(fake, Pbs) else 1)
    assert {words[0] for _, words in calls(fake.fake)} <= {*SLURM_COMMANDS, *PBS_COMMANDS}


@one_slurm
def test_fakes_are_not_installed_over_others(fake):
    with pytest.raises(InvalidSettings, match="already has commands"):
        install_fake_slurm(fake.fake, fake.cluster.name)


# -- the contract --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=FAKES)
def standing(request, tmp_path_factory):
    """Provide a fake with one of our jobs running."""
    with (
        fake_of(request.param, tmp_path_factory.mktemp("standing")) as fake,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("PATH", str(fake.bin), prepend=":")
        fake.job = fake.run("exec sleep 600")
        wait_for(lambda: state_of(fake.source(), fake.job), BlockState.RUNNING)
        patch.undo()
        yield fake


class TestContract(WindowSourceConformance):
    """Window sources fulfil their contract with each fake."""

    @pytest.fixture(autouse=True)
    def _standing(self, standing, on_path):
        on_path(standing)
        self.fake = standing

    def make_source(self):
        return self.fake.source()

    def own_job(self):
        return self.fake.job, "ft-test"
