"""Site files written by `freetrain init`."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from freetrain_parsl.campaign.files.yaml_file import Variables
from freetrain_parsl.campaign.site.site import Site
from freetrain_parsl.campaign.site.site_draft import LoginHost, draft_checkpoints, draft_site
from freetrain_parsl.cluster.system import EmbeddedSystem
from freetrain_parsl.windows.machine import Machine, NodeType, Queue
from freetrain_parsl.windows.state import Partition

HOST = LoginHost(Path("/venv/bin/python"))
NAMES = st.text(st.characters(exclude_categories=("C", "Z"), exclude_characters="$;`\"'\\<>"), min_size=1, max_size=20)


GPU_NODES = ((NodeType(64, 4, 262144), 10),)


def queue(name="gpu", *, types=GPU_NODES, qos="", **limits):
    return Queue(Partition(name, ("n1", "n2"), **limits), types, qos=qos)


def parsed(text):
    return Site.parse(text, "draft.yaml", Variables(environment={}))


@pytest.mark.parametrize("system", ["slurm", "pbs"])
def test_the_draft_is_a_valid_site_file_with_what_was_found(system):
    chosen = queue(max_walltime=1800.0, preemptible=True, grace=45.0, qos="spare")
    machine = Machine(system, (chosen, queue("main")), "perl", ("m1", "m2"))
    text = draft_site(machine, chosen, LoginHost(Path("/venv/bin/python"), scratch=Path("/scratch/ada")))
    site = parsed(text)
    assert (site.name, site.system) == ("perl", system)
    assert site.block["partition" if system == "slurm" else "queue"] == "gpu"
    assert site.block["account"] == "m1"
    assert site.node.gpus == site.node.slots == site.units_per_node == 4
    assert "# share: false" in text
    assert site.planner_settings.closing_margin.total_seconds() == 45
    assert site.planner_settings.max_walltime.total_seconds() == 1800
    assert site.checkpoint_dir == Path("/scratch/ada/freetrain")
    assert "also open to you: main" in text
    assert "you may also charge m2" in text


def test_an_account_on_the_command_line_is_used():
    machine = Machine("slurm", (queue(),), accounts=("m1", "m2"))
    assert parsed(draft_site(machine, queue(), HOST, "m2")).block["account"] == "m2"


def test_where_jobs_have_no_account_none_is_asked_for():
    text = draft_site(Machine("slurm", (queue(),), has_accounts=False), queue(), HOST)
    assert "no accounting database" in text
    assert "PROJECT" not in text
    assert "qos:" not in text
    assert "# account: PROJECT" in draft_site(Machine("slurm", (queue(),)), queue(), HOST)


def test_nodes_of_different_types_are_pointed_out():
    mixed = queue(types=((NodeType(64, 0, 262144), 90), (NodeType(32, 4, 131072), 10)))
    text = draft_site(Machine("slurm", (mixed,)), mixed, HOST)
    assert "90 with 64 cores, 256 GiB; 10 with 32 cores, 4 GPUs, 128 GiB" in text
    assert parsed(text).node.gpus is None
    assert "# slots: 2 " in text
    assert "share" not in text.partition("node:")[2].replace("shares", "")


def test_several_networks_are_listed_and_one_is_not():
    several = LoginHost(Path("/p"), interfaces={"eth0": ["10.0.0.1"], "ib0": ["10.1.0.1"]})
    machine = Machine("slurm", (queue(),))
    assert "eth0 (10.0.0.1), ib0 (10.1.0.1)" in draft_site(machine, queue(), several)
    assert "driver_interface" not in draft_site(
        machine, queue(), LoginHost(Path("/p"), interfaces={"eth0": ["10.0.0.1"]})
    )


@given(NAMES, NAMES, st.sampled_from(["slurm", "pbs"]), st.floats(60, 1e6) | st.just(math.inf))
def test_any_name_is_read_back_as_it_is(name, account, system, walltime):
    """Names such as `on`, `1e5` or `a: b` are quoted."""
    chosen = queue(name, max_walltime=walltime)
    text = draft_site(Machine(system, (chosen,), name, (account,)), chosen, HOST)
    block = yaml.safe_load(text.replace("$${", "${"))["block"]
    assert block["partition" if system == "slurm" else "queue"] == name
    assert parsed(text).block["account"] == account


def test_without_a_batch_system_it_is_an_embedded_cluster():
    site = parsed(EmbeddedSystem().draft(4) + draft_checkpoints(HOST))
    assert (site.system, site.block["nodes"]) == ("local", 4)
    assert site.executor_settings["trainings"].threads_per_slot == 1  # else each virtual node uses all cores
    assert site.planner_settings.min_useful.total_seconds() == 5
