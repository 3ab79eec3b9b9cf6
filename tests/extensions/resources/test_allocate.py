"""`freetrain allocate`: its tables, its JSON, and its errors."""

from __future__ import annotations

import json
import re
import shlex
import sys
from types import SimpleNamespace

import pytest

from freetrain_parsl.cli import main
from freetrain_parsl.extensions.resources.policies import RESOURCE_POLICIES
from tests.support.resource_instances import generate_instance

ALL = ",".join(RESOURCE_POLICIES)


@pytest.fixture
def freetrain(tmp_path, monkeypatch, capsys):
    """Run the command as its entry point does, in a directory with an instance."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs.json").write_text(json.dumps(generate_instance(6, load=4.0, seed=2)))

    def run(line):
        monkeypatch.setattr(sys, "argv", ["freetrain", *shlex.split(line)])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        return SimpleNamespace(code=end.value.code or 0, out=out, err=err)

    return run


def test_the_json_accounts_for_every_job_and_resource(freetrain, tmp_path):
    done = freetrain(f"allocate jobs.json --policy {ALL} --json out.json")
    assert (done.code, done.err) == (0, "")
    figures = json.loads((tmp_path / "out.json").read_text())
    instance = json.loads((tmp_path / "jobs.json").read_text())
    assert figures["capacity"] == dict(zip(instance["resources"], instance["capacity"], strict=True))
    assert figures["load"] == pytest.approx(4.0, rel=0.02)
    assert [entry["policy"] for entry in figures["policies"]] == list(RESOURCE_POLICIES)
    for entry in figures["policies"]:
        assert [row["job"] for row in entry["jobs"]] == [job["name"] for job in instance["jobs"]]
        assert entry["utility"] == pytest.approx(sum(row["utility"] for row in entry["jobs"]))
        assert entry["bound"] >= entry["utility"] - 1e-9
        for resource, used in entry["used"].items():
            assert used == pytest.approx(sum(row["uses"].get(resource, 0.0) for row in entry["jobs"]))
            assert used <= figures["capacity"][resource] * (1 + 1e-9)
        for row in entry["jobs"]:
            served = row["workers"] > 0
            assert (row["servers"] > 0, row["seconds"] is not None, row["why_nothing"] is None) == (served,) * 3


def test_the_tables_show_what_each_job_gets_or_why_it_gets_nothing(freetrain, tmp_path):
    out = freetrain("allocate jobs.json").out
    served = set(re.findall(r"^(\S+-\d)(?: +\d+){2}", out, re.MULTILINE))
    unserved = set(re.findall(r"^(\S+) gets nothing: \d", out, re.MULTILINE))
    jobs = {job["name"] for job in json.loads((tmp_path / "jobs.json").read_text())["jobs"]}
    assert served
    assert unserved
    assert (served | unserved, served & unserved) == (jobs, set())


def test_several_policies_are_compared_in_eighty_columns(freetrain):
    out = freetrain(f"allocate jobs.json --policy {ALL}").out
    assert all(len(line) <= 80 for line in out.splitlines())
    for policy in RESOURCE_POLICIES:
        assert re.search(rf"^{policy} .* \d+(\.\d)?%", out, re.MULTILINE)
        assert f"\n{policy}: utility " in out


def test_one_policy_needs_no_table_of_policies(freetrain):
    out = freetrain("allocate jobs.json").out
    assert "of best" not in out
    assert "smd: utility" in out


def test_the_example_can_be_allocated(freetrain, tmp_path):
    assert freetrain("allocate --example example.json").out == "example.json\n"
    assert freetrain("allocate example.json").code == 0


def test_an_instance_without_jobs_is_an_empty_table(freetrain, tmp_path):
    (tmp_path / "none.json").write_text('{"resources": ["gpu"], "capacity": [0], "jobs": []}')
    done = freetrain(f"allocate none.json --policy {ALL}")
    assert (done.code, done.err) == (0, "")
    assert "0 jobs, load 0.00, 0 gpu" in done.out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("", "allocate: INSTANCE is missing; 'freetrain allocate --example FILE' writes one"),
        ("none.json", "none.json: cannot read the instance: No such file or directory"),
        ("jobs.json --policy smdd", "--policy: unknown 'smdd' (did you mean 'smd'?); available: esw, optimus, smd"),
        ("jobs.json --policy ,", "--policy: no name in ','"),
        ("jobs.json --time-limit 0", "--time-limit: must be more than 0 and at most 86,400 s, got 0"),
        ("jobs.json --time-limit nan", "--time-limit: must be more than 0"),
        ("jobs.json --json jobs.json", "--json jobs.json: this is an input already"),
        ("jobs.json --json no/out.json", "--json no/out.json: there is no directory"),
        ("--example no/jobs.json", "--example no/jobs.json: there is no directory"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(freetrain, arguments, problem):
    done = freetrain(f"allocate {arguments}")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"freetrain: {problem}")
    assert done.err.count("\n") == 1


def test_a_file_that_cannot_be_written_is_an_error(freetrain):
    done = freetrain("allocate jobs.json --json /dev/full")
    assert done.code == 2
    assert "/dev/full: cannot be written: No space left on device" in done.err


def test_brackets_in_names_are_no_markup(freetrain, tmp_path):
    document = generate_instance(2, load=1.0, seed=1)
    document["resources"][0] = "[bold]"
    document["jobs"][0]["name"] = "[red]job[/]"
    (tmp_path / "odd.json").write_text(json.dumps(document))
    out = freetrain(f"allocate odd.json --policy {ALL}").out
    assert "[bold]" in out
    assert "[red]job[/]" in out
