"""The section ``kinds`` of a site file, and campaigns that ask for kinds of nodes."""

from __future__ import annotations

from pathlib import Path

import pytest
from parsl.providers import PBSProProvider, SlurmProvider

from freetrain_parsl.campaign.campaign import Campaign
from freetrain_parsl.campaign.providers import make_executor, make_provider, make_window_source
from freetrain_parsl.campaign.run import CampaignRun
from freetrain_parsl.campaign.site import Site
from freetrain_parsl.campaign.yaml_file import Variables
from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.windows.node_kinds import WindowsByKind
from freetrain_parsl.windows.slurm.source import SlurmWindowSource

SLURM = """
system: slurm
block: {account: abc, worker_init: module load torch}
node: {cores: 32, memory: 64 GB}
kinds:
  gpu: {partition: a100, gres: "gpu:4", gpus: 4, cores: 64, speed: 12, worker_init: module load cuda}
  cpu: {partition: batch, constraint: milan}
"""
LOCAL = """
system: local
kinds:
  fast: {nodes: 2, speed: 4}
  slow: {nodes: 3, slots: 2}
"""
NAMED = """
system: local
block: {cluster: mine}
kinds:
  fast: {nodes: "n[00-01]"}
  slow: {nodes: "n[02-04],n07"}
"""


def site(text: str) -> Site:
    return Site.parse(text, "site.yaml", Variables({}, {}))


@pytest.fixture
def no_commands(monkeypatch):
    """Parsl's Slurm provider calls `sacct` in its constructor."""
    monkeypatch.setattr(SlurmProvider, "execute_wait", lambda self, command, timeout=None: (1, "", "disabled"))


def test_a_kind_has_what_differs_and_the_rest_of_the_site(no_commands) -> None:
    read = site(SLURM)
    gpu, cpu = read.kinds
    assert (gpu.node.cores, gpu.node.slots, gpu.node.accelerators, gpu.speed) == (64, 4, 4, 12.0)
    assert (cpu.node.cores, cpu.node.slots, cpu.node.accelerators, cpu.speed) == (32, 1, 0, 1.0)
    provider = make_provider(read.of_kind(gpu))
    assert isinstance(provider, SlurmProvider)
    assert (provider.partition, provider.account, provider.gpus_per_node, provider.mem_per_node) == (
        "a100",
        "abc",
        4,
        60,
    )
    assert provider.worker_init.splitlines() == ["module load torch", "module load cuda"]
    assert "--gres=gpu:4" in provider.scheduler_options
    source = make_window_source(read)
    assert isinstance(source, WindowsByKind)
    assert isinstance(source.first, SlurmWindowSource)
    assert source.first.partition == "a100"


def test_kinds_of_pbs_are_queues_or_select_options() -> None:
    read = site("system: pbs\nkinds:\n  a: {queue: gpu}\n  b: {queue: cpu, select_options: ncpus=8}\n")
    providers = [make_provider(read.of_kind(kind)) for kind in read.kinds]
    assert all(isinstance(provider, PBSProProvider) for provider in providers)
    assert [(p.queue, p.select_options) for p in providers] == [("gpu", ""), ("cpu", "ncpus=8")]


def test_an_embedded_cluster_has_the_nodes_of_all_kinds(tmp_path: Path) -> None:
    executor = make_executor(site(LOCAL), run_dir=tmp_path)
    fast, slow = executor.node_kinds
    assert (fast.provider.nodes, fast.provider.only) == (5, ("n00", "n01"))
    assert (slow.provider.only, slow.slots_per_node) == (("n02", "n03", "n04"), 2)
    assert fast.provider._connection is slow.provider._connection
    assert [kind.block["only"] for kind in site(NAMED).kinds] == [("n00", "n01"), ("n02", "n03", "n04", "n07")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            LOCAL.replace("speed: 4", "speeed: 4"),
            "site.yaml:4: unknown key 'kinds.fast.speeed' (did you mean 'speed'?)",
        ),
        (LOCAL.replace("nodes: 2, ", ""), "site.yaml:4: kinds.fast.nodes: is missing; give the number of nodes"),
        (LOCAL.replace("speed: 4", "speed: 0"), "site.yaml:4: kinds.fast.speed: must be more than zero, got 0"),
        (LOCAL.replace("fast:", "9x:"), "site.yaml:4: kinds.9x: a kind of node is named by 1 to 32 letters"),
        ("system: local\nkinds:\n  fast: {nodes: 2}\n", "site.yaml:3: kinds: a single kind has no name"),
        (LOCAL + "block: {nodes: 9}\n", "site.yaml:4: kinds: the kinds have the nodes; remove block.nodes"),
        (NAMED.replace("[02-", "[01-"), "site.yaml:6: kinds.slow: its nodes are those of 'fast'"),
        (NAMED.replace("n[00-01]", "n[00-01"), "site.yaml:5: kinds.fast.nodes: 'n[00-01' is not a list of nodes"),
        (SLURM.replace("a100", "a b"), "site.yaml:6: kinds.gpu.partition: must not contain blanks"),
        (SLURM.replace("gpus: 4", "gpus: 4, queue: x"), "site.yaml:6: unknown key 'kinds.gpu.queue'"),
        (
            "system: slurm\nkinds:\n  a: {partition: x}\n  b: {partition: x}\n",
            "site.yaml:4: kinds.b: its nodes are those",
        ),
        ("system: slurm\nkinds: [a, b]\n", "site.yaml:2: kinds: should be a mapping"),
    ],
)
def test_a_mistake_is_one_line_with_file_line_and_key(text: str, message: str) -> None:
    with pytest.raises(InvalidInput) as error:
        site(text)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def campaign(options: str) -> Campaign:
    text = f"trainings:\n  - app: slow_app.py:train\n    {options}\n"
    return Campaign.parse(text, "c.yaml", Path(__file__).parent, Variables({}, {}))


def test_a_campaign_states_kinds_and_their_curves() -> None:
    (training,) = campaign("scaling: {fast: {1: 90}, slow: {1: 10, 2: 19}}").trainings
    assert training.app.node_kinds == ("fast", "slow")
    assert training.app.request("t").scaling_by_kind["slow"](2) == 19.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("node_kinds: fast", "c.yaml:3: trainings[1].node_kinds: should be a list of kinds of nodes, such as [gpu]"),
        ("scaling: {fast: {1: 90}, 2: 7}", "c.yaml:3: trainings[1].scaling: must be a mapping"),
    ],
)
def test_a_wrong_campaign_is_refused(options: str, message: str) -> None:
    with pytest.raises(InvalidInput) as error:
        campaign(options)
    assert str(error.value).startswith(message)


def test_a_campaign_that_needs_unknown_nodes_is_refused_before_a_run_is_created(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"c.yaml:3: training 'slow_app' needs nodes of kind 'gpu'; .* fast, slow"):
        CampaignRun.create(campaign("node_kinds: [gpu]"), site(LOCAL), tmp_path / "run")
    with pytest.raises(InvalidInput, match=r"kind 'gpu'; site.yaml has none"):
        CampaignRun.create(campaign("node_kinds: [gpu]"), site("system: local\n"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
