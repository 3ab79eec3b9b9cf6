"""Site files: the shipped ones are valid, and errors are reported in one line before any query."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from parsl.launchers import MpiExecLauncher, SingleNodeLauncher, SrunLauncher
from parsl.providers import PBSProProvider, SlurmProvider

from freetrain_parsl import CheckpointSettings, EmbeddedClusterProvider, RateLimits, RescaleCosts, TrainingSettings
from freetrain_parsl.campaign.files.yaml_file import Variables
from freetrain_parsl.campaign.site.providers import make_executor, make_provider, make_window_source
from freetrain_parsl.campaign.site.site import Site, shipped_sites
from freetrain_parsl.errors import InvalidInput, UsageError
from freetrain_parsl.extensions.globus.storage.home import GlobusHome
from freetrain_parsl.extensions.pbs.source import PbsWindowSource
from freetrain_parsl.planning.blocks import least_walltime
from freetrain_parsl.planning.objectives.base import OBJECTIVES
from freetrain_parsl.planning.policies import MilpPolicy
from freetrain_parsl.windows.slurm.source import SlurmWindowSource

VALUES = {"account": "abc123", "venv": "/sw/venv", "partition": "batch", "queue": "workq"}


def site(text: str, given: dict[str, str] | None = None) -> Site:
    return Site.parse(text, "site.yaml", Variables(given or {}, {}))


@pytest.fixture
def no_commands(monkeypatch):
    """No batch system command runs; Parsl's Slurm provider calls `sacct` in its constructor."""
    asked = []
    monkeypatch.setattr(
        SlurmProvider, "execute_wait", lambda self, command, timeout=None: asked.append(command) or (1, "", "disabled")
    )
    return asked


@pytest.mark.parametrize("name", ["aurora", "frontier", "local", "pbs", "perlmutter", "polaris", "slurm"])
def test_every_shipped_site_makes_a_provider_and_a_window_source(name: str, no_commands: list[str]) -> None:
    read = Site.load(name, Variables(VALUES, {}))
    kinds = {
        "slurm": (SlurmProvider, SlurmWindowSource),
        "pbs": (PBSProProvider, PbsWindowSource),
        "local": (EmbeddedClusterProvider, None),
    }
    provider, source = kinds[read.system]
    assert isinstance(make_provider(read), provider)
    if source is not None:
        before = list(no_commands)
        assert isinstance(make_window_source(read), source)
        assert no_commands == before, "a window source runs no command until it is queried"
    planner = read.planner_settings.in_seconds()
    assert least_walltime(planner) < planner.max_walltime


def test_the_shipped_sites_are_those_that_are_tested_here() -> None:
    assert shipped_sites().keys() == {"aurora", "frontier", "local", "pbs", "perlmutter", "polaris", "slurm"}


@pytest.mark.parametrize("name", ["aurora", "frontier", "perlmutter", "polaris"])
def test_a_real_site_tells_its_documentation_and_needs_an_account(name: str) -> None:
    assert "https://docs." in shipped_sites()[name].read_text(encoding="utf-8")
    with pytest.raises(InvalidInput, match=rf"{name}.yaml:\d+: block.account needs a value for \$\{{ACCOUNT\}}"):
        Site.load(name, Variables({"venv": "/v"}, {}))


@pytest.mark.parametrize("name", ["slurm", "pbs"])
@pytest.mark.parametrize("account", [None, ""])
def test_a_template_needs_no_account_where_jobs_have_none(name: str, account: str | None) -> None:
    given = {"partition": "p", "queue": "q"} | ({} if account is None else {"account": account})
    assert "account" not in Site.load(name, Variables(given, {})).block
    assert Site.load(name, Variables({**given, "account": "abc"}, {})).block["account"] == "abc"


SLURM = """\
system: slurm
block:
  partition: gpu
  account: abc
  qos: preempt
  constraint: a100
  scheduler_options: "#SBATCH --licenses=scratch"
  launcher_overrides: --cpus-per-task=8
  worker_init: module load python
  command_timeout: 90 s
node: {cores: 64, gpus: 4, memory: 256 GB, exclusive: false}
planner: {startup: 40 s, max_walltime: "02:00:00", max_nodes_per_block: 8}
rate_limits: {poll_interval: 20 s, submissions_per_minute: 3, max_pending_blocks: 2, standby_blocks: 0, max_refusals: 4}
trainings:
  {policy: window, threads_per_slot: 2, grace: 10 s, heartbeat_timeout: 20 s, peer_timeout: 15 s, max_restarts: 0,
   rescale_costs: {up: 3 s, start: 5 s}}
network: {node_interface: hsn0, driver_address: 10.0.0.1}
checkpoints: {directory: /scratch/me, interval: 5 min, least_free: 2 GB}
"""


def test_every_key_reaches_what_it_is_for(no_commands: list[str]) -> None:
    read = site(SLURM)
    provider = make_provider(read, [Path("/apps dir")])
    assert (provider.partition, provider.account, provider.qos, provider.constraint) == (
        "gpu",
        "abc",
        "preempt",
        "a100",
    )
    assert (provider.cores_per_node, provider.gpus_per_node, provider.mem_per_node) == (64, 4, 239)
    assert (provider.exclusive, provider.cmd_timeout) == (False, 90)
    assert "#SBATCH --licenses=scratch" in provider.scheduler_options
    assert isinstance(provider.launcher, SrunLauncher)
    assert provider.launcher.overrides == "--cpus-per-task=8"
    assert provider.worker_init == (
        "export PYTHONPATH='/apps dir'\"${PYTHONPATH:+:$PYTHONPATH}\"\nmodule load python\n"
    )
    planner = read.planner_settings.in_seconds()
    assert (planner.startup, planner.max_walltime, planner.max_nodes_per_block) == (40, 7200, 8)
    assert (planner.max_pending_blocks, planner.standby_blocks, planner.min_useful) == (2, 0, 60)
    assert (read.node.slots, read.node.accelerators) == (4, 4)
    assert read.checkpoint_dir == Path("/scratch/me")
    assert read.least_free == 2 * 10**9
    assert read.executor_settings == {
        "address": "10.0.0.1",
        "interface": "hsn0",
        "policy": "window",
        "grace": timedelta(seconds=10),
        "trainings": TrainingSettings(
            rescale_costs=RescaleCosts(up=timedelta(seconds=3), start=timedelta(seconds=5)),
            heartbeat_timeout=timedelta(seconds=20),
            peer_timeout=timedelta(seconds=15),
            max_restarts=0,
            threads_per_slot=2,
        ),
        "rate_limits": RateLimits(poll_interval=timedelta(seconds=20), submissions_per_minute=3, max_refusals=4),
        "checkpoints": CheckpointSettings(interval=timedelta(minutes=5)),
    }


def test_an_executor_is_made_of_it(no_commands: list[str], tmp_path: Path) -> None:
    executor = make_executor(site(SLURM.replace("/scratch/me", str(tmp_path))), run_dir=tmp_path / "run", run_id="r1")
    assert executor.job_prefix == "freetrain.freetrain.r1."
    assert executor.checkpoint_dir == tmp_path
    assert (executor.slots_per_node, executor.available_accelerators, executor.rate_limits.max_refusals) == (
        4,
        ["0", "1", "2", "3"],
        4,
    )
    assert isinstance(executor.windows, SlurmWindowSource)


def test_checkpoints_go_to_the_run_directory_unless_the_site_says_otherwise(tmp_path: Path) -> None:
    assert make_executor(site("system: local"), run_dir=tmp_path).checkpoint_dir == tmp_path / "checkpoints"


def test_pbs_asks_for_gpus_and_memory_of_the_node_once() -> None:
    text = "system: pbs\nblock: {queue: q, launcher_bind: --cpu-bind, launcher_overrides: --ppn 1%s}\n"
    node = "node: {cores: 32, gpus: 4, memory: 64 GiB}"
    provider = make_provider(site(text % "" + node))
    assert provider.select_options == "ngpus=4:mem=65536mb"
    assert isinstance(provider.launcher, MpiExecLauncher)
    assert (provider.launcher.bind_cmd, provider.launcher.overrides) == ("--cpu-bind", "--ppn 1")
    assert make_provider(site(text % ", select_options: 'ngpus=2:mem=1gb'" + node)).select_options == "ngpus=2:mem=1gb"


def test_windows_may_be_asked_for_elsewhere_than_blocks_are_submitted(no_commands: list[str]) -> None:
    read = site("system: pbs\nblock: {queue: prod, windows_in: tiny}")
    source = make_window_source(read)
    assert isinstance(source, PbsWindowSource)
    assert (make_provider(read).queue, source.queue) == ("prod", "tiny")


def test_accelerators_may_have_names(no_commands: list[str]) -> None:
    read = site("system: slurm\nnode: {accelerators: ['0.0', '0.1', 2]}\nblock: {launcher: single}")
    assert read.node.accelerators == ("0.0", "0.1", "2")
    assert read.node.slots == 3
    assert isinstance(make_provider(read).launcher, SingleNodeLauncher)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("site: x", "site.yaml:1: 'system' is missing; it is one of local, slurm, pbs"),
        (
            "system: slurmm",
            r"site.yaml:1: system: must be local or slurm or pbs, got 'slurmm' \(did you mean 'slurm'\?\)",
        ),
        ("system: slurm\nblok: {}", r"site.yaml:2: unknown key 'blok' \(did you mean 'block'\?\)"),
        ("system: slurm\nblock: {queue: x}", "site.yaml:2: unknown key 'block.queue'"),
        ("system: pbs\nblock: {qos: x}", r"site.yaml:2: unknown key 'block.qos'"),
        ("system: local\nblock: {partition: x}", "unknown key 'block.partition'"),
        ("system: local\nblock: {cluster: c, nodes: 3}", "a named cluster has its own nodes"),
        ("system: slurm\nblock: {partition: 'a; rm -rf /'}", "block.partition: must not contain blanks"),
        ("system: pbs\nblock: {account: $(id)}", "block.account: must not contain blanks"),
        ("system: slurm\nblock: {scheduler_options: --qos=x}", "each line begins with '#SBATCH '"),
        ("system: slurm\nblock: {launcher: aprun}", "block.launcher: must be srun or mpiexec"),
        ("system: pbs\nblock: {launcher: mpirun, launcher_bind: x}", "requires the launcher mpiexec"),
        ("system: slurm\nnode: {gpus: -1}", "node.gpus: must be a whole number of at least 0"),
        ("system: slurm\nnode: {gpus: 2, slots: 4}", "there are 2 accelerators for 4 slots"),
        ("system: slurm\nnode: {accelerators: many}", "node.accelerators: must be a number, or a list of names"),
        ("system: slurm\nnode: {accelerators: [0.1]}", "a list of names in quotes"),
        ("system: slurm\nnode: {memory: 64}", "node.memory: an amount of memory must be written like"),
        ("system: slurm\nplanner: {startup: 60}", "site.yaml:2: planner.startup: a duration must be written like"),
        (
            "system: slurm\nplanner: {max_walltime: 0 s}",
            "planner: PlannerSettings: max_walltime must be at least 1 s, got 0 s",
        ),
        ("system: slurm\nplanner: {max_pending_blocks: 1}", "unknown key 'planner.max_pending_blocks'"),
        ("system: slurm\nrate_limits: {standby_blocks: -1}", "must be a whole number of at least 0"),
        ("system: slurm\nrate_limits: {poll_interval: 0 s}", "rate_limits.poll_interval: must be longer than zero"),
        ("system: slurm\nrate_limits: {max_pending_blocks: 0}", "must be a whole number of at least 1"),
        (
            "system: slurm\ntrainings: {objective: x}",
            "site.yaml:2: trainings.objective: .*unknown objective 'x'; available",
        ),
        ("system: slurm\ntrainings: {policy: best}", "site.yaml:2: trainings.policy: .*unknown policy 'best'"),
        ("system: slurm\ntrainings: {rescale_costs: 5 s}", "trainings.rescale_costs: should be a mapping"),
        (
            "system: slurm\nnetwork: {driver_interface: a, driver_address: b}",
            "give driver_address or driver_interface, not both",
        ),
        ("system: slurm\ncheckpoints: {least_free: 5}", "an amount of memory"),
    ],
)
def test_a_mistake_is_one_line_with_file_line_and_key(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        site(text)
    assert "\n" not in str(refused.value)


def test_a_missing_interface_of_this_host_is_refused(tmp_path: Path) -> None:
    read = site("system: local\nnetwork: {driver_interface: nonexistent0}")
    with pytest.raises(InvalidInput, match="this host has no interface 'nonexistent0' with an address; it has"):
        make_executor(read, run_dir=tmp_path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="No such file"):
        Site.load(tmp_path / "none.yaml")
    with pytest.raises(
        InvalidInput, match=r"no shipped site of that name \(did you mean 'polaris'\?\); shipped: aurora"
    ):
        Site.load("polari")
    with pytest.raises(InvalidInput, match="Is a directory"):
        Site.load(tmp_path)
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidInput, match="it is not text in UTF-8"):
        Site.load(tmp_path / "bytes.yaml")


@pytest.mark.parametrize("name", ["aurora", "frontier", "perlmutter", "polaris"])
def test_a_shipped_site_that_activates_an_environment_runs_its_python(name: str) -> None:
    read = Site.load(name, Variables(VALUES, {}))
    assert "/bin/activate" in read.block["worker_init"]
    assert read.node.python == "python"


@pytest.mark.parametrize("system", ["local", "slurm", "pbs"])
def test_python_and_container_reach_the_executor_with_the_directories_of_the_apps(system: str, tmp_path: Path) -> None:
    read = site(
        f"system: {system}\nnode:\n  python: python3.11\n"
        "  container: {image: /i/torch.sif, binds: ['/data:/d:ro'], options: ['--nv'], command: singularity}"
    )
    assert (read.node.python, read.node.container.options) == ("python3.11", ("--nv",))
    if system == "local":
        executor = make_executor(read, run_dir=tmp_path, import_paths=[Path("/my/apps")])
        assert executor.node_python == "python3.11"
        assert executor.container.words() == [
            *("singularity", "exec", "--nv", "--bind=/my/apps", "--bind=/data:/d:ro", "/i/torch.sif"),
        ]


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ("python: 'python; rm -rf ~'", "site.yaml:2: node.python: node_python 'python; rm -rf ~' may hold letters"),
        ("container: {binds: [/a]}", "node.container.image: is missing; give it like 'image: /images/torch.sif'"),
        ("container: {image: '/my images/t.sif'}", "container image '/my images/t.sif' may hold letters"),
        ("container: {image: /t.sif, options: --nv}", "node.container.options: should be a list"),
        ("container: {image: /t.sif, options: [nv]}", "container option 'nv'"),
        ("container: {image: /t.sif, gpu: yes}", "unknown key 'node.container.gpu'"),
    ],
)
def test_a_python_or_container_that_cannot_be_started_is_refused(node: str, message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        site(f"system: slurm\nnode: {{{node}}}")
    assert message in str(caught.value)


def test_an_objective_is_that_of_the_sites_policy(tmp_path: Path) -> None:
    file = tmp_path / "site.yaml"
    file.write_text("system: local\ntrainings: {objective: deadline}\n")
    policy = Site.load(str(file), Variables()).executor_settings["policy"]
    assert isinstance(policy, MilpPolicy)
    assert policy._objective is OBJECTIVES["deadline"]


HERE, HOME = (f"{digit * 8}-0000-4000-8000-000000000000" for digit in "ac")
GLOBUS = f"""\
system: local
checkpoints:
  directory: /scratch/me/ft
  globus:
    collection: {HERE}
    path: /ft
    lease: 10 min
    home:
      collection: {HOME}
      path: /~/freetrain
"""


def test_a_home_on_globus_is_read() -> None:
    home = Site.parse(GLOBUS, "s.yaml", Variables({}, {})).home
    assert isinstance(home, GlobusHome)
    globus = home.settings
    assert home.root == Path("/scratch/me/ft")
    assert str(globus.local) == "aaaaaaaa-0000-4000-8000-000000000000:/ft"
    assert globus.home.join("owners", "x") == "/~/freetrain/owners/x"
    assert globus.lease.total_seconds() == 600


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("  directory: /scratch/me/ft\n", "", "s.yaml:4: checkpoints.globus: needs checkpoints.directory"),
        ("aaaaaaaa-", "x", "s.yaml:5: checkpoints.globus: 'x0000-4000-8000-000000000000' is not the UUID"),
        ("path: /ft", "path: ft", "s.yaml:5: checkpoints.globus: 'ft' is not a directory on a collection"),
        ("path: /ft", "path: /a/../ft", "s.yaml:5: checkpoints.globus: '/a/../ft' is not a directory"),
        ("    path: /ft\n", "", "s.yaml:5: checkpoints.globus.path: is missing"),
        ("      path: /~/freetrain\n", "", "s.yaml:9: checkpoints.globus.home.path: is missing"),
        ("lease: 10 min", "lease: 1 s", "s.yaml:5: checkpoints.globus: a lease must be at least 2 s"),
        ("lease: 10 min", "leese: 10 min", "s.yaml:7: unknown key 'checkpoints.globus.leese'"),
        (f"{HOME}\n      path: /~/freetrain", f"{HERE}\n      path: /ft/x", "overlap"),
    ],
)
def test_a_wrong_home_is_refused_with_file_and_line(old: str, new: str, message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        Site.parse(GLOBUS.replace(old, new), "s.yaml", Variables({}, {}))
    assert message in str(caught.value)
