"""The section ``kinds`` of a site file, and campaigns that ask for kinds of nodes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from parsl.providers import PBSProProvider, SlurmProvider

from freetrain_parsl.campaign.files.campaign import Campaign
from freetrain_parsl.campaign.files.yaml_file import Variables
from freetrain_parsl.campaign.run import CampaignRun
from freetrain_parsl.campaign.site.providers import (
    ask_slots,
    describe_unused,
    make_executor,
    make_provider,
    make_window_source,
    refuse_too_large,
)
from freetrain_parsl.campaign.site.site import Site
from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.windows.base import Survey, WindowSource
from freetrain_parsl.windows.node_kinds import WindowsByKind
from freetrain_parsl.windows.slurm.source import SlurmWindowSource

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        (LOCAL.replace("speed: 4", "speed: 0"), "site.yaml:4: kinds.fast.speed: must be more than zero, got '0'"),
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
    return Campaign.parse(text, "c.yaml", Path(__file__).parents[1], Variables({}, {}))


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
    with pytest.raises(
        InvalidInput, match=r"c.yaml:3: training job 'slow_app' needs nodes of kind 'gpu'; .* fast, slow"
    ):
        CampaignRun.create(campaign("node_kinds: [gpu]"), site(LOCAL), tmp_path / "run")
    with pytest.raises(InvalidInput, match=r"kind 'gpu'; site.yaml has none"):
        CampaignRun.create(campaign("node_kinds: [gpu]"), site("system: local\n"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "site_text", "message"),
    [
        (
            "min_nodes: 4",
            LOCAL,
            "time, all of one kind, but site.yaml has only 2 of kind 'fast' and 3 of kind 'slow'; lower min_nodes",
        ),
        ("{min_nodes: 3, node_kinds: [fast]}", LOCAL, "but site.yaml has only 2 of kind 'fast'; lower min_nodes"),
        ("min_nodes: 5", NAMED, "but site.yaml has only 2 of kind 'fast' and 4 of kind 'slow'; lower"),
        (
            "min_nodes: 3",
            "system: local\nblock: {nodes: 2}\n",
            "at the same time, but site.yaml has only 2; lower min_nodes",
        ),
    ],
)
def test_a_training_larger_than_the_nodes_of_the_site_file_is_refused_before_a_run_is_created(
    options: str, site_text: str, message: str, tmp_path: Path
) -> None:
    options = options.strip("{}").replace(", ", "\n    ")
    with pytest.raises(InvalidInput) as error:
        CampaignRun.create(campaign(f"max_nodes: 8\n    {options}"), site(site_text), tmp_path / "run")
    assert str(error.value).startswith("c.yaml:4: training job 'slow_app' needs min_nodes=")
    assert message in str(error.value)
    assert not (tmp_path / "run").exists()


class CountedSource(WindowSource):
    """A batch system of which only the number of nodes matters."""

    def __init__(self, survey: Survey) -> None:
        self.answer, self.queries = survey, 0

    def survey(self, job_ids: Sequence[str] = ()) -> Survey:
        self.queries += 1
        return self.answer

    def cancel(self, job_ids: Sequence[str]) -> None:
        raise AssertionError(job_ids)

    def find_jobs(self, prefix: str) -> dict[str, str]:
        raise AssertionError(prefix)


@pytest.mark.parametrize(
    ("survey", "message"),
    [
        (Survey(0.0, nodes=2), "the batch system has only 2; lower min_nodes"),
        (Survey(0.0, nodes=4, nodes_by_kind={"gpu": 2, "cpu": 2}), "only 2 of kind 'gpu' and 2 of kind 'cpu'; lower"),
        (Survey(0.0, nodes=4), ""),
        (Survey(0.0, nodes=5, nodes_by_kind={"gpu": 2, "cpu": 3}), ""),
        (Survey(0.0), ""),
    ],
)
def test_a_training_larger_than_the_batch_system_is_refused_before_it_starts(
    survey: Survey, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = CountedSource(survey)
    monkeypatch.setattr("freetrain_parsl.campaign.site.providers.make_window_source", lambda site: source)
    refuse_too_large(campaign("max_nodes: 8"), site(SLURM))
    assert source.queries == 0  # one node is not too large
    large = campaign("min_nodes: 3\n    max_nodes: 8")
    if not message:
        refuse_too_large(large, site(SLURM))
        return
    with pytest.raises(InvalidInput, match=r"c.yaml:3: training job 'slow_app' needs min_nodes=3 nodes") as error:
        refuse_too_large(large, site(SLURM))
    assert message in str(error.value)


SHARED = "system: local\nblock: {nodes: 2}\nnode: {slots: 4}\n"


@pytest.mark.parametrize(
    ("options", "site_text", "message"),
    [
        (
            "accelerators: 12",
            SHARED,
            "accelerators=12, which are 3 nodes, at the same time, but site.yaml has only 2; lower accelerators",
        ),
        ("min_accelerators: 9\n    max_nodes: 8", SHARED, "min_accelerators=9, which are 3 nodes, at the same time"),
        (
            "min_accelerators: 9\n    max_nodes: 8",
            f"{SHARED}  share: false\n".replace("{slots: 4}", "\n  slots: 4"),
            "3",
        ),
        ("accelerators: 3", SHARED, "c.yaml:3: training job 'slow_app': accelerators=3: a job has 1, 2, 4 acc"),
        ("accelerators: 2", LOCAL, "accelerators=2: its kinds of nodes have different numbers of accelerators (1, 2)"),
        ("max_nodes: 2\n    min_nodes: 3", SHARED, "max_nodes (2) is less than min_nodes (3)"),
    ],
)
def test_a_size_that_the_site_does_not_have_is_refused_before_a_run_is_created(
    options: str, site_text: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInput) as error:
        CampaignRun.create(campaign(options), site(site_text), tmp_path / "run")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_whether_jobs_share_nodes_is_a_key_of_the_node() -> None:
    """Only nodes with equal numbers of slots are shared."""
    assert (site(SHARED).units_per_node, site(SHARED).slots_per_node) == (4, {"": 4})
    whole = site("system: local\nnode: {slots: 4, share: false}\n")
    assert (whole.units_per_node, whole.slots_per_node) == (1, {"": 4})
    assert (site(LOCAL).units_per_node, site(LOCAL).slots_per_node) == (1, {"fast": 1, "slow": 2})
    assert site(LOCAL.replace("slots: 2", "slots: 1")).units_per_node == 1


@pytest.mark.parametrize(("text", "choice"), [("", "auto"), ("node: {image: off}\n", "off")])
def test_whether_nodes_start_from_an_image_is_a_key_of_the_node(text: str, choice: str, tmp_path: Path) -> None:
    executor = make_executor(site(f"system: local\n{text}"), run_dir=tmp_path)
    assert executor.node_image == choice
    assert (executor.node_start is None) is (choice == "off")


def test_a_container_is_an_image_already(tmp_path: Path) -> None:
    text = "system: local\nnode: {image: always, container: {image: /images/torch.sif}}\n"
    assert make_executor(site(text), run_dir=tmp_path).node_start is None


def test_another_word_for_an_image_is_refused() -> None:
    with pytest.raises(InvalidInput, match="must be auto or off or always or full, got 'alway'"):
        site("system: local\nnode: {image: alway}\n")


class GpuSource(CountedSource):
    """A batch system that tells the GPUs of its nodes."""

    def __init__(self, *gpus: int) -> None:
        super().__init__(Survey(0.0))
        self.gpus = frozenset(gpus)

    def gpus_on_nodes(self) -> frozenset[int]:
        return self.gpus


AUTO = "system: slurm\nblock: {partition: p}\nnode: {slots: auto%s}\n"


@pytest.mark.parametrize(
    ("options", "gpus", "shape"),
    [
        ("", (4,), (4, 4, 4)),
        ("", (), (1, 0, None)),  # not told
        ("", (0,), (1, 0, None)),
        (", gpus: 2", (8,), (2, 2, 2)),  # stated
        (", accelerators: ['0.0', '0.1']", (1,), (2, ("0.0", "0.1"), None)),
    ],
)
def test_slots_are_the_gpus_that_the_batch_system_tells(
    options: str, gpus: tuple[int, ...], shape: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("freetrain_parsl.campaign.site.providers.make_window_source", lambda site: GpuSource(*gpus))
    node = ask_slots(site(AUTO % options)).node
    assert (node.slots, node.accelerators, node.gpus) == shape
    assert not node.asks_slots


def test_a_system_that_cannot_be_asked_for_slots_says_so():
    with pytest.raises(InvalidInput, match=r"node.slots: the batch system local does not report accelerators; give"):
        site("system: local\nnode: {slots: auto}\n")


def test_nodes_with_different_numbers_of_gpus_are_refused_or_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    def source(asked):
        return GpuSource(*{"a": (4,), "b": (8,), "p": (4, 8)}[asked.block["partition"]])

    monkeypatch.setattr("freetrain_parsl.campaign.site.providers.make_window_source", source)
    with pytest.raises(InvalidInput, match=r"node.slots: .* different numbers of GPUs \(4, 8\); state"):
        ask_slots(site(AUTO % ""))
    kinds = site(AUTO % "" + "kinds:\n  small: {partition: a}\n  large: {partition: b}\n")
    assert ask_slots(kinds).slots_per_node == {"small": 4, "large": 8}


def test_gpus_that_no_slot_uses_are_told() -> None:
    read = site("system: slurm\nnode: {gpus: 2}\n")
    assert describe_unused(read, GpuSource(4)) == (
        "nodes have 4 GPUs, but 2 slots by site.yaml: with node.gpus: 4, each GPU is a slot"
    )
    assert not describe_unused(read, GpuSource(2))
    assert not describe_unused(read, GpuSource())
    assert not describe_unused(site("system: slurm\nnode: {gpus: 2, exclusive: false}\n"), GpuSource(4))
