"""Built-in trainers and user-defined lists."""

from __future__ import annotations

import math

import pytest

from freetrain_parsl.errors import InvalidInput, InvalidSettings
from freetrain_parsl.extensions.replay.trainer_files import MODELS
from freetrain_parsl.extensions.replay.trainers import trainer_set, with_costs
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.model import CostsInSeconds
from freetrain_parsl.planning.objectives.base import OBJECTIVES


@pytest.fixture
def write(tmp_path):
    def write(text, name="trainers.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def test_hpo_is_so_many_endless_shufflenets():
    hpo = trainer_set("hpo:10")
    assert (hpo.name, hpo.objective, len({trainer.name for trainer in hpo.trainers})) == ("hpo:10", "throughput", 10)
    for trainer in hpo.trainers:
        assert (trainer.min_nodes, trainer.max_nodes, trainer.work_left) == (1, 64, math.inf)
        assert (trainer.curve, trainer.costs) == (MODELS["shufflenet"].curve, CostsInSeconds(18, 12))
    assert hpo.trainers[0].rate(64) == 145081.5


def test_mixed_takes_the_models_in_turn():
    mixed = trainer_set("mixed:9")
    assert mixed.objective == "speedup"
    assert [trainer.name.partition("-")[0] for trainer in mixed.trainers] == [*MODELS, "alexnet", "vgg16"]
    assert all(17.9 < trainer.costs.up < 18.1 and 11.9 < trainer.costs.down < 12.1 for trainer in mixed.trainers)
    assert [t.submitted for t in mixed.trainers] == [0] * 9


@pytest.mark.parametrize("spec", ["hpo:0", "hpo:", "mixed:-1", "hpo:ten", "mixed:1e3"])
def test_a_set_needs_a_number(spec):
    with pytest.raises(InvalidSettings, match="expected a number after the colon"):
        trainer_set(spec)


def test_a_sweep_has_equal_members_for_each_trainer_of_a_list(write):
    path = write("[{name: a, max: 2, work: 9, curve: vgg16}, {name: b, max: 1, work: 5, submit: 7, curve: {1: 5}}]")
    swept = trainer_set(f"sweep:12x{path}")
    assert (swept.name, swept.objective) == ("sweep:12xtrainers.yaml", "throughput")
    assert {name: len(members) for name, members in swept.sweeps.items()} == {"a": 12, "b": 12}
    assert swept.trainers == swept.sweeps["a"] + swept.sweeps["b"]
    last = swept.trainers[-1]
    assert (last.name, last.max_nodes, last.work_left, last.submitted) == ("b-11", 1, 5.0, 7.0)
    changed = with_costs(swept, 3, 4)
    assert changed.trainers == changed.sweeps["a"] + changed.sweeps["b"]
    assert {trainer.costs for trainer in changed.trainers} == {CostsInSeconds(3, 4)}


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("sweep:", "expected a number and trainers, as in sweep:64xtrainers"),
        ("sweep:0xhpo:1", "expected a number and trainers"),
        ("sweep:8xsweep:2xhpo:1", "a sweep cannot be swept"),
        ("sweep:8xhpo:1", "'shufflenet-0' never ends, .* 'work'"),
        ("sweep:8xnone.txt", "unknown trainers 'none.txt'"),
    ],
)
def test_a_sweep_needs_a_number_and_a_list_with_work(spec, problem):
    with pytest.raises(InvalidSettings, match=problem):
        trainer_set(spec)


@pytest.mark.parametrize("spec", ["hpo", "imagenet:3", "trainers.txt"])
def test_an_unknown_set_is_refused(spec):
    with pytest.raises(InvalidSettings, match="give hpo:N, mixed:N, single:N, sweep:NxLIST, or the path"):
        trainer_set(spec)


def test_costs_can_be_given_for_all(write):
    path = write("[{name: a, max: 2, curve: {1: 5}, rescale: {up: 9, start: 7}}, {name: b, max: 1, curve: vgg16}]")
    changed = with_costs(trainer_set(path), 1, 2)
    assert [trainer.costs for trainer in changed.trainers] == [CostsInSeconds(1, 2, 7), CostsInSeconds(1, 2, 0)]


def test_yaml_and_csv_say_the_same(write, tmp_path):
    (tmp_path / "own.csv").write_text("nodes,rate\n1,100\n4,300\n")
    yaml = trainer_set(
        write(
            """
            - {name: a, submit: 60, min: 2, max: 8, work: 1e6, curve: {2: 100, 4: 190.5}, rescale: {up: 3, start: 1}}
            - {name: b, max: 4, work: endless, curve: VGG16, priority: 2, deadline: 3600, count: 2}
            - name: c
              max: 4
              curve: own.csv
            """
        )
    )
    csv = trainer_set(
        write(
            "# with a comment\n"
            "name,submit,min,max,work,curve,rescale,priority,deadline,count\n"
            "a,60,2,8,1000000,2:100;4:190.5,up:3;start:1,,,\n"
            "b,,,4,endless,vgg16,,2,3600,2\n"
            "\n"
            "c,,,4,,own.csv,,,,\n",
            "trainers.csv",
        )
    )
    assert yaml.trainers == csv.trainers
    first, second, third, last = yaml.trainers
    assert (first.name, first.submitted, first.min_nodes, first.max_nodes, first.work_left) == ("a", 60, 2, 8, 1e6)
    assert (first.curve, first.costs) == (ScalingCurve({2: 100, 4: 190.5}), CostsInSeconds(up=3, start=1))
    assert (second.name, second.priority, second.deadline, second.costs) == ("b-0", 2, 3600, MODELS["vgg16"].costs)
    assert (third.name, third.deadline, third.work_left) == ("b-1", 3600, math.inf)
    assert (last.rate(4), last.costs, last.deadline) == (300, CostsInSeconds(), None)


@pytest.mark.parametrize(
    ("second", "objective"),
    [("curve: {1: 5}", "throughput"), ("curve: {1: 6}", "speedup"), ("curve: {1: 5}, priority: 2", "priority")],
)
def test_a_list_has_the_objective_that_suits_it(write, second, objective):
    trainers = trainer_set(write(f"[{{name: a, max: 1, curve: {{1: 5}}}}, {{name: b, max: 1, {second}}}]"))
    assert trainers.objective == objective
    assert objective in OBJECTIVES


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("work: -5", "work: must be more than zero, got '-5'"),
        ("work: much", "work: must be a number, got 'much'"),
        ("submit: -1", "submit: must be at least 0"),
        ("min: 9", r"min \(9\) is more than max \(4\)"),
        ("min: 1.5", "min: must be a whole number of at least 1"),
        ("curv: 3", r"unknown key 'curv' \(did you mean 'curve'\?\)"),
        ("max: 4", "max is duplicated"),
        ("priority: 0", "priority: must be more than zero"),
        ("deadline: .inf", "deadline: must be a number"),
        ("rescale: {up: -1}", "rescale cost 'up' must be zero or more seconds"),
        ("rescale: {sideways: 1}", "rescale: must give seconds for up, down and start"),
        ("rescale: fast", "rescale: must give seconds for up, down and start"),
    ],
)
def test_what_cannot_be_is_refused_by_line(write, line, problem):
    with pytest.raises(InvalidInput, match=rf"trainers\.yaml:4: .*{problem}"):
        trainer_set(write(f"- name: a\n  max: 4\n  curve: vgg16\n  {line}\n"))


@pytest.mark.parametrize(
    ("curve", "problem"),
    [
        ("{2: 100}", "its curve starts at 2 nodes, min is 1; add a point"),
        ("shuflenet", r"no curve 'shuflenet' \(did you mean 'shufflenet'\?\)"),
        ("3", "no curve 3; give a file, breakpoints, or a model"),
        ("'1:100;1:200'", "no curve '1:100;1:200'"),
        ("{1: -5}", "a rate must be zero or more"),
        ("{one: 5}", "a number of nodes must be a whole number"),
    ],
)
def test_a_curve_that_cannot_be_used_is_refused_by_line(write, curve, problem):
    with pytest.raises(InvalidInput, match=rf"trainers\.yaml:3: .*{problem}"):
        trainer_set(write(f"- name: a\n  max: 4\n  curve: {curve}\n"))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "trainers.yaml: contains no trainers"),
        ("name: a", "trainers.yaml:1: expected a list of trainers"),
        ("- a", "trainers.yaml:1: expected a trainer"),
        ("- {name: a", "trainers.yaml:1: not YAML"),
        ("- name: a\n  curve: vgg16", "trainers.yaml:1: max: is missing"),
        (
            "- {name: a, max: 1, curve: vgg16}\n- {name: a, max: 1, curve: vgg16}",
            "trainers.yaml:2: .*names must be unique",
        ),
        ("- {name: '', max: 1, curve: vgg16}", "trainers.yaml:1: name: is missing"),
    ],
)
def test_a_bad_list_is_refused(write, text, problem):
    with pytest.raises(InvalidInput, match=problem):
        trainer_set(write(text))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("name,max,curve\na,4\n", "trainers.csv:2: expected 3 fields"),
        ("name,max,curve\na,4,\n", "trainers.csv:2: curve: is missing"),
        ("name,max,curve,work\na,4,vgg16,-1\n", "trainers.csv:2: work: must be more than zero"),
        ("name,max,curve\n", "trainers.csv: contains no trainers"),
    ],
)
def test_a_bad_table_is_refused(write, text, problem):
    with pytest.raises(InvalidInput, match=problem):
        trainer_set(write(text, "trainers.csv"))


def test_a_list_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match="cannot read the list of trainers"):
        trainer_set(str(tmp_path / "none.yaml"))
