"""What the comparison with other ways measures from outside."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # tests have modules of equal names

from _peers_account import Held, at_once, held_on_idle, read_held, seconds_to_start, shares, trained_outside
from _peers_calls import count_calls
from _peers_workload import SAMPLE_SECONDS, SAMPLES, Job, jobs_of, read_records

JOB = Job("digits", "digits", 2, 0.05)
RECORD = (
    "JobId={job} Name=x JobState=PENDING Partition={partition} TimeLimit=20 StartTime=2026-01-01T00:00:{start} "
    "EndTime=2026-01-01T00:00:{end} NodeList={nodes} NodeCnt=1 SubmitTime=2026-01-01T00:00:{submit} ExitCode=0:0 \n"
)


@pytest.fixture(autouse=True)
def no_reference_runs(monkeypatch):
    monkeypatch.setattr("_peers_account.undisturbed_losses", lambda job: [0.1, 0.2, 0.3])


def write_steps(directory, process, *steps):
    folder = directory / "seen" / JOB.name
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"time": at, "epoch": epoch, "samples": list(samples)}) for at, epoch, samples in steps]
    (folder / f"{process}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def test_a_sample_counts_once_an_epoch_and_its_repetition_is_seen(tmp_path):
    write_steps(tmp_path, "a-1-1", (1.0, 0, range(48)), (2.0, 0, range(48, 96)))
    write_steps(tmp_path, "b-1-1", (3.0, 0, range(48, 96)), (4.0, 0, range(96, 144)))
    assert read_records(tmp_path, JOB, 9.0) == {"trained": 192, "useful": 144, "repeated": 48, "lost": 0}


def test_a_sample_that_a_complete_epoch_lacks_is_lost(tmp_path):
    write_steps(tmp_path, "a-1-1", (1.0, 0, range(SAMPLES - 5)), (2.0, 1, range(48)))
    assert read_records(tmp_path, JOB, 9.0)["lost"] == 5


def test_what_comes_after_the_end_does_not_count_and_is_not_missed(tmp_path):
    write_steps(tmp_path, "a-1-1", (1.0, 0, range(SAMPLES)), (2.0, 1, range(48)), (5.0, 1, range(48, SAMPLES)))
    (tmp_path / f"{JOB.name}.finished").write_text(json.dumps({"time": 5.1, "loss": 0.1}), encoding="utf-8")
    assert read_records(tmp_path, JOB, 3.0) == {
        "trained": SAMPLES + 48,
        "useful": SAMPLES + 48,
        "repeated": 0,
        "lost": 0,
    }
    assert shares(tmp_path, [JOB], [], [("a", 0.0, 100.0)], 3.0)["finished"] == 0
    after = shares(tmp_path, [JOB], [], [("a", 0.0, 100.0)], 6.0)
    assert after["finished"] == 1
    assert (after["loss_gap"], after["loss_spread"]) == (pytest.approx(-0.1), pytest.approx(0.2))
    assert after["useful_per_offered"] == pytest.approx(2 * SAMPLES * SAMPLE_SECONDS / 100.0)


def test_what_ended_unsaved_counts_only_if_it_finished_its_job(tmp_path):
    idle, stays = [("a", 0.0, 100.0)], [Held("1", 0.0, 1.0, 20.0, ("a",)), Held("1", 0.0, 30.0, 90.0, ("a",))]
    write_steps(tmp_path, "a-1-5000000000", (9.0, 0, range(SAMPLES)))
    write_steps(tmp_path, "a-2-35000000000", (40.0, 0, range(48)))
    found = shares(tmp_path, [JOB], stays, idle, 50.0, saves=False)
    assert (found["useful_per_offered"], found["samples_repeated"]) == (48 * SAMPLE_SECONDS / 100.0, SAMPLES)
    assert shares(tmp_path, [JOB], stays, idle, 95.0, saves=False)["useful_per_offered"] == 0.0
    (tmp_path / f"{JOB.name}.finished").write_text(json.dumps({"time": 80.0, "loss": 0.1}), encoding="utf-8")
    assert shares(tmp_path, [JOB], stays, idle, 95.0, saves=False)["useful_per_offered"] == found["useful_per_offered"]


def test_each_stay_of_a_requeued_job_is_read(tmp_path):
    file = tmp_path / "jobs.txt"
    first = RECORD.format(job=1, partition="preemptible", submit="00", start="05", end="15", nodes="node[01-02]")
    again = RECORD.format(job=1, partition="preemptible", submit="15", start="30", end="40", nodes="node03")
    other = RECORD.format(job=2, partition="main", submit="00", start="05", end="15", nodes="node04")
    never = RECORD.format(job=3, partition="preemptible", submit="20", start="50", end="50", nodes="(null)")
    file.write_text(first + other + again + never, encoding="utf-8")
    stays = read_held(file, "preemptible")
    assert [(stay.job, stay.end - stay.start, stay.nodes) for stay in stays] == [
        ("1", 10.0, ("node01", "node02")),
        ("1", 10.0, ("node03",)),
        ("3", 0.0, ()),
    ]
    assert {stay.state for stay in stays} == {"PENDING"}
    assert at_once(stays) == 2  # a requeued job is one job


def test_held_time_is_that_without_a_main_job():
    stay = Held("1", 0.0, 10.0, 30.0, ("a", "b"))
    assert held_on_idle([stay], [("a", 0.0, 20.0), ("b", 25.0, 60.0), ("c", 0.0, 60.0)]) == 15.0


def test_a_start_lasts_until_the_first_training_function_on_a_node(tmp_path):
    for name in ("a-1-7000000000", "b-2-5000000000", "b-3-45000000000"):
        write_steps(tmp_path, name, (8.0, 0, range(48)))
    stays = [
        Held("1", 0.0, 1.0, 30.0, ("a", "b")),
        Held("2", 0.0, 40.0, 50.0, ("b",)),
        Held("3", 0.0, 1.0, 9.0, ("c",)),
    ]
    assert seconds_to_start(tmp_path, stays) == [4.0, 5.0]


def test_steps_on_a_node_that_is_not_held_are_seen(tmp_path):
    write_steps(tmp_path, "a-1-1000000000", (5.0, 0, range(48)), (25.0, 0, range(48, 60)), (45.0, 0, range(60, 70)))
    stays = [Held("1", 0.0, 1.0, 9.0, ("a",)), Held("1", 0.0, 40.0, 50.0, ("a",)), Held("2", 0.0, 9.0, 40.0, ("b",))]
    assert trained_outside(tmp_path, stays, 60.0) == 12


def test_the_jobs_need_the_requested_time():
    jobs = jobs_of(3360.0)
    assert len({job.name for job in jobs}) == 8
    assert sum(job.node_seconds for job in jobs) == pytest.approx(3360.0, rel=0.1)


def test_file_system_calls_are_counted_by_place(tmp_path):
    lines = (
        '7 openat(AT_FDCWD</x>, "/env/lib/a.py", O_RDONLY) = 3</env/lib/a.py>',
        '7 newfstatat(3</env/lib/a.py>, "", {st_mode=S_IFREG|0644, st_size=10, ...}, AT_EMPTY_PATH) = 0',
        '8 newfstatat(AT_FDCWD</run/out>, "b.pt", {st_mode=S_IFREG|0644, st_size=10, ...}, 0) = 0',
        '8 openat(AT_FDCWD</x>, "/env/none", O_RDONLY <unfinished ...>',
        "8 <... openat resumed>) = -1 ENOENT (No such file or directory)",
        '8 execve("/env/bin/python", ["python", "/run/a.py"], 0x7ffd /* 9 vars */) = 0',
        '9 readlink("/proc/self/exe", "/env/bin/python", 4096) = 15',
        '9 openat(AT_FDCWD</x>, "/environment", O_RDONLY) = 3</environment>',
    )
    (tmp_path / "node01").write_text("\n".join(lines))
    assert count_calls(tmp_path, ["/env"], "/run") == (3, 1)
