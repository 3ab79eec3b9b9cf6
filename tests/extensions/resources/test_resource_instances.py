"""Instances with several resources: read with their known optimum, refused with file and field, generated."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetrain_parsl.errors import InvalidInput, InvalidSettings
from freetrain_parsl.extensions.resources.instances import parse_instance, read_instance
from freetrain_parsl.extensions.resources.policies import RESOURCE_POLICIES
from tests.support.resource_instances import generate_instance

TEN_JOBS = Path(__file__).parent / "data" / "ten-jobs.json"
GOOD = {
    "resources": ["gpu", "cpu"],
    "capacity": [4, 8],
    "jobs": [
        {
            "name": "net",
            "forward": [0.001, 0.002],
            "backward": [0.002, 0.004],
            "size": [10, 20],
            "batch": 64,
            "iterations": 1000,
            "worker": [1, 2],
            "server": [0, 1],
            "limit": [4, 8],
            "server_MBps": 500,
            "t1": 10,
            "t2": 0.5,
            "t3": 1,
        }
    ],
}
MISSING = object()
EXTREMES = st.sampled_from([1e-12, 1, 1e15])


def changed(path, value):
    """Return a good document with one value replaced, removed or added."""
    document = copy.deepcopy(GOOD)
    *parents, last = path
    target = document
    for name in parents:
        target = target[name]
    if value is MISSING:
        del target[last]
    else:
        target[last] = value
    return document


# An independent implementation of the same model computed these, the optimum with a proof.
@pytest.mark.parametrize(
    ("policy", "utility"), [("smd", 316.39), ("smd-two-stage", 206.223), ("esw", 183.764), ("optimus", 261.267)]
)
def test_policies_reach_the_known_utilities(policy, utility):
    problem = read_instance(TEN_JOBS).problem
    assert RESOURCE_POLICIES[policy]().allocate(problem).utility == pytest.approx(utility, rel=1e-5)
    assert problem.load == pytest.approx(3.0)


def test_hours_become_seconds():
    [job] = parse_instance(GOOD, "good").problem.jobs
    assert job.utility(3600.0) == 5.0
    assert job.combinations[0].seconds == pytest.approx(1000 * (64 * 0.006 + 0.02 + 0.02 + 64 * 0.003 + 0.02), rel=0.2)


def test_the_network_of_workers_can_be_given():
    slow = parse_instance(changed(("jobs", 0, "worker_MBps"), 1), "slow").problem.jobs[0]
    [usual] = parse_instance(GOOD, "good").problem.jobs
    assert slow.combinations.seconds.min() > 10 * usual.combinations.seconds.min()


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (("jobs",), MISSING, "jobs: missing"),
        (("jobs",), {}, "jobs: expected a list, got {}"),
        (("jobs", 0), 3, "jobs[0]: expected an object, got 3"),
        (("resource",), [], "resource: unknown field (did you mean 'resources'?)"),
        (("resources",), ["gpu", 1], "resources: expected a list of names, got ['gpu', 1]"),
        (("resources",), ["gpu", "gpu"], "resources need different names"),
        (("capacity",), [1], "capacity: expected 2 numbers, got 1"),
        (("capacity", 1), -1, "capacity[1]: must be zero or more, got -1"),
        (("jobs", 0, "name"), "", "jobs[0].name: expected a name, got ''"),
        (("jobs", 0, "name"), "a\nb", r"jobs[0].name: expected a name, got 'a\nb'"),
        (("jobs", 0, "forward"), [], "jobs[0].forward: expected at least 1 numbers, got 0"),
        (("jobs", 0, "backward"), [1], "jobs[0].backward: expected 2 numbers, got 1"),
        (("jobs", 0, "size", 1), "x", "jobs[0].size[1]: expected a number, got 'x'"),
        (("jobs", 0, "size", 1), True, "jobs[0].size[1]: expected a number, got True"),
        (("jobs", 0, "batch"), 0, "jobs[0].batch: must be more than zero"),
        (("jobs", 0, "iterations"), -5, "jobs[0].iterations: must be zero or more, got -5"),
        (("jobs", 0, "iterations"), 10**400, "jobs[0].iterations: must be zero, or from 1e-12 to 1e+15, got 1000"),
        (("jobs", 0, "server_MBps"), 1e-300, "jobs[0].server_MBps: must be zero, or from 1e-12 to 1e+15, got 1e-300"),
        (("jobs", 0, "x\ny"), 1, r"jobs[0].'x\ny': unknown field"),
        (("jobs", 0, "x" * 1000), 1, "jobs[0].'xxx"),
        (("jobs", 0, "t3"), MISSING, "jobs[0].t3: missing"),
        (("jobs", 0, "forwards"), [], "jobs[0].forwards: unknown field (did you mean 'forward'?)"),
        (("jobs", 0, "worker"), [5, 2], "jobs[0].limit: one worker and one server need [5.0, 3.0] together, its limit"),
        (("capacity",), [4, 2], "jobs[0].worker: one worker and one server need [1.0, 3.0] together, the capacity is"),
        (("jobs",), [GOOD["jobs"][0]] * 2, "two jobs are named 'net'"),
    ],
)
def test_bad_instances_are_refused_with_file_and_field(path, value, problem, tmp_path):
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(changed(path, value)))
    with pytest.raises(InvalidInput) as error:
        read_instance(file)
    message = str(error.value)
    assert f"bad.json: {problem}" in message
    assert "\n" not in message
    assert len(message) < 300


def test_a_step_that_takes_no_time_is_refused():
    job = {**GOOD["jobs"][0], "forward": [0, 0], "backward": [0, 0], "size": [0, 0]}
    with pytest.raises(InvalidInput, match=r"x: jobs\[0\].forward: a step takes no time"):
        parse_instance({**GOOD, "jobs": [job]}, "x")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{\n"jobs": [}', ":2: not JSON: Expecting value"),
        ('{"jobs": [NaN]}', ": not JSON: NaN is not a number"),
        ('{"jobs": 1, "jobs": 2}', ": not JSON: the field 'jobs' is there twice"),
        ("[" * 100_000, ": not JSON: it is nested too deeply"),
        (f'{{"jobs": {"9" * 5000}}}', ": not JSON: "),
        ("7", ": the document: expected an object, got 7"),
        ("", ":1: not JSON: Expecting value"),
    ],
)
def test_files_that_are_no_instance_are_refused(text, problem, tmp_path):
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(InvalidInput) as error:
        read_instance(file)
    assert f"bad.json{problem}" in str(error.value)
    assert "\n" not in str(error.value)


@given(
    st.fixed_dictionaries({name: st.lists(EXTREMES, min_size=2, max_size=2) for name in ("forward", "size")}),
    st.fixed_dictionaries(dict.fromkeys(("batch", "iterations", "server_MBps", "t1", "t2", "t3"), EXTREMES)),
)
@settings(max_examples=200, deadline=None)
def test_jobs_of_extreme_numbers_can_be_decided(layers, numbers):
    """The products of accepted numbers neither overflow nor vanish."""
    problem = parse_instance({**GOOD, "jobs": [{**GOOD["jobs"][0], **layers, **numbers}]}, "extreme").problem
    decision = RESOURCE_POLICIES["smd"]().allocate(problem)
    assert 0 <= decision.utility <= decision.bound * (1 + 1e-9)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match="cannot read the instance: No such file"):
        read_instance(tmp_path / "none.json")


@pytest.mark.parametrize("load", [0.5, 3.0, 6.0])
def test_generated_instances_have_their_load_and_can_be_read_back(load, tmp_path):
    document = generate_instance(20, load=load, seed=7)
    file = tmp_path / "generated.json"
    file.write_text(json.dumps(document))
    instance = read_instance(file)
    assert instance.seed == 7
    assert instance.problem.load == pytest.approx(load, rel=0.02)
    limits = np.sum([job.limit for job in instance.problem.jobs], axis=0)
    assert np.all(limits / instance.problem.capacity <= load)
    assert generate_instance(20, load=load, seed=7) == document


def test_a_generated_cluster_has_room_for_one_worker_and_one_server_of_each_job():
    for seed in range(20):
        parse_instance(generate_instance(1, load=100.0, seed=seed), "generated")


def test_generated_jobs_take_a_third_to_one_and_a_fifth_of_their_critical_time():
    document = generate_instance(40, load=3.0, seed=1)
    problem = parse_instance(document, "generated").problem
    shares = [
        job.combinations.seconds.min() / 3600 / entry["t3"]
        for job, entry in zip(problem.jobs, document["jobs"], strict=True)
    ]
    assert min(shares) == pytest.approx(0.3, abs=0.1)
    assert max(shares) == pytest.approx(1.2, abs=0.1)


@pytest.mark.parametrize(("jobs", "load"), [(0, 3.0), (5, 0.0), (5, float("nan"))])
def test_impossible_instances_are_not_generated(jobs, load):
    with pytest.raises(InvalidSettings):
        generate_instance(jobs, load=load, seed=1)
