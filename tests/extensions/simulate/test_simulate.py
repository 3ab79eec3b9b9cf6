"""`freetrain simulate`: its options, its errors, and its output."""

from __future__ import annotations

import json

import pytest

from tests.extensions.simulate.small_profiles import write_profiles

JOBS = "name,time,application,num_replicas,batch_size\na,0,net,2,128\nb,10,table,1,1024\nc,20,net,4,256\n"


@pytest.fixture
def freetrain(tmp_path, monkeypatch, command):
    """Run the command in a directory with a workload and its profiles."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs.csv").write_text(JOBS)
    write_profiles(tmp_path)
    return command


def test_the_exact_call(freetrain, tmp_path):
    call = "simulate jobs.csv --profiles . --cluster 2x2 --policy milp,tiresias --knowledge work --json out.json"
    done = freetrain(f"{call} --report page.html --csv jct.csv")
    assert (done.code, done.err) == (0, "")
    assert all(len(line) <= 80 for line in done.out.splitlines())
    result = json.loads((tmp_path / "out.json").read_text())
    assert [(entry["policy"], entry["knowledge"]) for entry in result["policies"]] == [
        ("milp", "work"),
        ("tiresias", "age"),
    ]
    keys = {
        "policy",
        "knowledge",
        "mean_jct",
        "median_jct",
        "p99_jct",
        "makespan",
        "restarts",
        "solve_ms_median",
        "jobs",
    }
    assert all(keys <= entry.keys() for entry in result["policies"])
    assert (tmp_path / "jct.csv").read_text().splitlines()[:2][0] == "policy,knowledge,job,jct"
    page = (tmp_path / "page.html").read_text()
    assert "Distribution of completion times" in page
    assert "<script" not in page
    assert "The life of" in page


def test_example_can_be_simulated(freetrain, tmp_path):
    done = freetrain("simulate --example there")
    assert (done.code, len(done.out.split())) == (0, 4)
    done = freetrain("simulate there/jobs.csv --profiles there --cluster 4x4 --policy tiresias,fcfs")
    assert (done.code, done.err) == (0, "")
    assert "40 jobs" in done.out


def test_missing_inputs_are_named(freetrain):
    assert "WORKLOAD is missing; 'freetrain simulate --example DIR'" in freetrain("simulate").err
    assert "a workload of applications needs --profiles, a job log --trainers" in freetrain("simulate jobs.csv").err


LISTED = "name,submit,min,max,work,curve\na,0,1,4,40000,1:10;4:30\nb,60,2,2,6000,2:20\n"
LOG = """JobID|Submit|Start|End|NNodes|Timelimit
1|2026-01-01T00:00:00|2026-01-01T00:00:00|2026-01-01T00:30:00|2|01:00:00
2|2026-01-01T00:10:00|2026-01-01T00:20:00|2026-01-01T00:40:00|x|01:00:00
"""


def test_lists_of_trainers_and_job_logs_are_workloads(freetrain, tmp_path):
    (tmp_path / "list.csv").write_text(LISTED)
    (tmp_path / "log").write_text(LOG)
    done = freetrain("simulate list.csv --cluster 2x2 --policy milp,ones,tiresias --interval 30 --json out.json")
    assert (done.code, done.err) == (0, "")
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["interval"] == 30
    assert [len(entry["jobs"]) for entry in result["policies"]] == [2, 2, 2]
    done = freetrain("simulate log --trainers list.csv --cluster 2x2 --policy fcfs --lenient")
    assert (done.code, done.err) == (0, "")
    assert "1 jobs" in done.out


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("simulate list.csv --cluster 1x2", "list.csv:2: trainer 'a': max is 4 GPUs, the cluster has 2"),
        ("simulate list.csv --knowledge curves", "--knowledge curves is for workloads with --profiles"),
        ("simulate list.csv --profiles . --trainers list.csv", "give one of them"),
        ("simulate list.csv --interval 0", "the interval between two decisions must be at least 1 s, got 0.0"),
        ("simulate log --trainers list.csv", "log:3: NNodes must be an integer, got 'x'"),
    ],
)
def test_wrong_own_workloads_are_refused_in_one_line(freetrain, tmp_path, call, message):
    (tmp_path / "list.csv").write_text(LISTED)
    (tmp_path / "log").write_text(LOG)
    done = freetrain(call)
    assert done.code == 2
    assert message in done.err
    assert done.err.count("\n") == 1


def test_names_of_jobs_cannot_become_markup(freetrain, tmp_path):
    (tmp_path / "jobs.csv").write_text(JOBS.replace("a,0", "<b>,0").replace("c,20", "<c>,20").replace("b,10", "<d>,10"))
    freetrain("simulate jobs.csv --profiles . --cluster 2x2 --policy milp --report page.html")
    page = (tmp_path / "page.html").read_text()
    assert not any(tag in page for tag in ("<b>", "<c>", "<d>"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--cluster 16", "a cluster is NODESxGPUS, as in 16x4, got '16'"),
        ("--cluster 1x2", "jobs.csv:4: job 'c' asks for 4 GPUs, the cluster has 2"),
        ("--policy best", "unknown policy 'best'"),
        ("--knowledge all", "--knowledge: unknown 'all'"),
        ("--json nowhere/out.json", "--json nowhere/out.json: there is no directory"),
        ("--profiles nowhere", "nowhere/applications.csv: cannot be read: No such file or directory"),
    ],
)
def test_wrong_options_are_refused_in_one_line(freetrain, options, message):
    done = freetrain(f"simulate jobs.csv --profiles . --cluster 2x2 {options}")
    assert done.code == 2
    assert message in done.err
    assert done.err.count("\n") == 1
