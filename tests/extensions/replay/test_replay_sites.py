"""`freetrain replay --site`: its figures, its report, and what it refuses."""

from __future__ import annotations

import json

import pytest

FIRST = "node,start,end\na,0,1200\nb,0,1200\nc,0,600\nz,7190,7200\n"
SECOND = "node,start,end\na,1000,7000\nb,1200,7000\nz,0,1\nz,7190,7200\n"
TRAINERS = """\
- {name: one, max: 2, curve: {1: 10, 2: 16}, rescale: {up: 2, down: 1}}
- {name: two, max: 2, curve: {1: 10, 2: 18}, rescale: {up: 2, down: 1}, work: 20000}
"""
SITES = "--site first=first.csv --site second=second.csv"


@pytest.fixture
def freetrain(tmp_path, monkeypatch, command):
    """Run the command as its entry point does, in a directory with two logs and a list of trainers."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "first.csv").write_text(FIRST)
    (tmp_path / "second.csv").write_text(SECOND)
    (tmp_path / "trainers.yaml").write_text(TRAINERS)
    return command


def test_two_sites_together_and_alone(freetrain, tmp_path):
    """The training jobs go from the first to the second, the figures agree, and the page names both sites."""
    call = f"replay {SITES} --trainers trainers.yaml --cost full --json out.json --report out.html"
    done = freetrain(call)
    assert (done.code, done.err) == (0, "")
    assert all(len(line) <= 80 for line in done.out.splitlines())
    result = json.loads((tmp_path / "out.json").read_text())
    first, second, apart, together, machine = result["ways"]
    assert [way["way"] for way in result["ways"]] == ["alone", "alone", "apart", "together", "one machine"]
    assert result["command"] == f"freetrain {call}"
    assert together["value"] > max(first["value"], second["value"], apart["value"])
    assert machine["value"] >= together["value"]
    assert result["gain"]["over_best_alone"] == together["value"] / max(first["value"], second["value"])
    assert result["gain"]["over_apart"] > 1
    moves = together["moves"]
    assert moves["count"] >= 2
    assert moves["bytes"] == 1e9 * moves["count"]
    assert moves["seconds"] >= 20 * moves["count"]  # 10 s of latency, and 1 GB at 100 MB/s
    assert (apart["moves"]["count"], together["samples_lost"], together["duplicate_samples"]) == (0, 0, 0)
    assert "no sample was lost or processed twice" in " ".join(done.out.split())
    page = (tmp_path / "out.html").read_text()
    assert all(word in page for word in ("first alone", "all, with moves", "as one machine", "MB/s"))


def test_rates_and_sizes_matter(freetrain, tmp_path):
    """A state that takes longer than the time between looks is never moved."""
    freetrain(f"replay {SITES} --trainers trainers.yaml --state-size 1e6 --json out.json")
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["ways"][3]["moves"]["count"] == 0
    (tmp_path / "rates.csv").write_text("from,to,megabytes_per_second,latency\nfirst,second,1e6,1\n")
    freetrain(f"replay {SITES} --trainers trainers.yaml --state-size 1e6 --transfers rates.csv --json out.json")
    result = json.loads((tmp_path / "out.json").read_text())
    assert [(link["from"], link["to"]) for link in result["ways"][3]["moves"]["links"]] == [("first", "second")]


def test_a_part_of_a_log_and_logs_of_different_length(freetrain, tmp_path):
    done = freetrain(
        "replay --site a=first.csv,hours=0.25,nodes=9 --site b=second.csv,from=0.5 --trainers trainers.yaml "
        "--json o.json"
    )
    result = json.loads((tmp_path / "o.json").read_text())
    assert [site["seconds"] for site in result["sites"]] == [900.0, 900.0]
    assert result["sites"][0]["nodes"] == 9
    assert "the log of b lasts 1.5 h and was cut to the shortest one's 0.25 h" in " ".join(done.out.split())


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("--site first", "give NAME=LOG"),
        ("--site =first.csv", "give NAME=LOG"),
        ("--site 'a b=first.csv'", "give NAME=LOG"),
        ("--site a=first.csv,nods=3", "unknown 'nods' (did you mean 'nodes'?)"),
        ("--site a=first.csv,nodes=x", "nodes must be a whole number"),
        ("--site a=first.csv,nodes=4,nodes=5", "give nodes=VALUE once"),
        ("--site a=first.csv,from=-1", "from must be a number of hours"),
        ("--site a=first.csv,from=5", "does not contain"),
        ("--site a=none.csv", "none.csv: cannot be read"),
        ("--site a=first.csv --site a=second.csv", "two sites are named 'a'"),
        (f"first.csv {SITES}", "LOG: give each log with its site"),
        (f"{SITES} --nodes 4", "--nodes: give it with its site"),
        (f"{SITES} --what-if", "--what-if: does not work with --site"),
        (f"{SITES} --concurrent 1", "--concurrent: does not work with --site"),
        (f"{SITES} --curves learned", "--curves learned: does not work with --site"),
        (f"{SITES} --knowledge estimated", "--knowledge estimated: does not work with --site"),
        (f"{SITES} --policy milp,equal-share", "one policy and one knowledge"),
        (f"{SITES} --transfers 0", "give a positive number of MB/s"),
        (f"{SITES} --transfers none.csv", "none.csv: cannot be read"),
        (f"{SITES} --state-size -1", "--state-size must be zero or more MB"),
        (f"{SITES} --look 0", "--look: must be 1 to 86,400 seconds"),
        (f"{SITES} --json first.csv", "--json first.csv: this is an input already"),
        ("first.csv --look 60", "--look: is about moves between sites"),
        ("first.csv --state-size 60", "--state-size: is about moves between sites"),
        ("first.csv --transfers 60", "--transfers: is about moves between sites"),
    ],
)
def test_what_is_refused(freetrain, tmp_path, options, problem):
    """In one line, before anything is written."""
    json_file = "" if "--json" in options else "--json out.json"
    done = freetrain(f"replay {options} --trainers trainers.yaml {json_file}")
    assert done.code == 2
    assert problem in done.err
    assert len(done.err.strip().splitlines()) == 1
    assert not (tmp_path / "out.json").exists()
    assert (tmp_path / "first.csv").read_text() == FIRST


def test_sweeps_are_refused(freetrain):
    (done,) = [freetrain(f"replay {SITES} --trainers sweep:2xtrainers.yaml")]
    assert done.code == 2
    assert "never ends" in done.err
