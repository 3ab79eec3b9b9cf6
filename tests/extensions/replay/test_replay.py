"""`freetrain replay`: its options, its errors, and its output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from freetrain_parsl.planning.model import Decision
from freetrain_parsl.planning.policies import POLICIES, MilpPolicy, Policy

IDLE = "node,start,end\na,0,600\nb,0,300\nc,100,200\nc,400,600\n"
TRAINERS = """\
- {name: one, max: 2, curve: {1: 10, 2: 16}, rescale: {up: 2, down: 1}}
- {name: two, max: 2, curve: {1: 10, 2: 18}, rescale: {up: 2, down: 1}, work: 2000}
"""
KEYS = {
    *("policy", "knowledge", "objective", "horizon", "efficiency", "oracle", "oracle_ratio"),
    *(f"loss_{cause}" for cause in ("concavity", "unused", "split", "rescale", "preemption", "start")),
    *("events", "solves", "solve_ms", "proven_optimal_share", "refused", "blocks", "first_refusal", "wall_seconds"),
    *("jct", "node_hours", "used_by_kind", "idle_cost", "trainers", "series", "solve_histogram"),
}


@pytest.fixture
def freetrain(tmp_path, monkeypatch, command):
    """Run the command as its entry point does, in a directory with a log and a list of trainers."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "idle.csv").write_text(IDLE)
    (tmp_path / "trainers.yaml").write_text(TRAINERS)
    return command


@pytest.fixture
def replay(freetrain, tmp_path):
    """Replay with these options and return the JSON; only a table may be printed."""

    def run(options="", inputs="idle.csv --trainers trainers.yaml"):
        done = freetrain(f"replay {inputs} {options} --json out.json")
        assert (done.code, done.err) == (0, "")
        assert all(len(line) <= 80 for line in done.out.splitlines())
        return json.loads((tmp_path / "out.json").read_text())

    return run


def test_the_exact_call(freetrain, tmp_path):
    """A single policy's figures are in the list and at the top."""
    call = "replay idle.csv --trainers hpo:10 --policy milp --knowledge none --cost paper --horizon 120 --json OUT.json"
    done = freetrain(call)
    result = json.loads((tmp_path / "OUT.json").read_text())
    (entry,) = result["policies"]
    assert entry.keys() == KEYS
    assert (entry["policy"], entry["knowledge"], entry["horizon"]) == ("milp", "none", 120.0)
    assert result["efficiency"] == entry["efficiency"] > 0
    assert result["command"] == f"freetrain {call}"
    assert (result["cost"], result["trainers"]["count"]) == ("paper", 10)
    assert (done.code, done.err) == (0, "")
    assert "of what 2 dedicated nodes do" in " ".join(done.out.split())
    percents = [f"{100 * entry[key]:.1f} %" for key in ("efficiency", "oracle_ratio", "loss_preemption", "oracle")]
    assert all(percent in done.out for percent in percents)


def test_every_policy_with_every_knowledge(replay):
    result = replay("--policy milp,equal-share,milp --knowledge none,perfect")
    assert [(entry["policy"], entry["knowledge"]) for entry in result["policies"]] == [
        ("milp", "none"),
        ("milp", "perfect"),
        ("equal-share", "none"),
        ("equal-share", "perfect"),
    ]
    assert {entry["horizon"] for entry in result["policies"]} == {"adaptive"}
    assert "efficiency" not in result


def test_all_policies_can_be_replayed(replay):
    result = replay(f"--policy {','.join(POLICIES)}")
    assert all(entry["refused"] == 0 for entry in result["policies"])


def test_options_reach_the_replay(replay):
    paper = replay("--horizon 120 --cost paper")
    assert paper["loss_start"] == 0
    started = replay("--horizon 120 --cost full --start-seconds 5")["loss_start"]
    assert 0 < started < replay("--horizon 120 --cost full")["loss_start"], "30 s by default"
    free = replay("--horizon 120 --rescale-seconds 0,0")
    assert free["loss_rescale"] == free["loss_preemption"] == 0 < paper["loss_preemption"]
    assert replay("--nodes 64")["log"]["nodes"] == 64
    assert replay("--objective throughput")["objective"] == "throughput"
    assert replay("--objective max-min")["trainers"]["objective"] == "speedup", "the measure does not change"
    assert replay("--curves learned")["curves"] == "learned"
    slow, small = replay("--blocks 60"), replay("--blocks 60 --nodes-per-block 1")
    assert (slow["blocks_start_in"], slow["nodes_per_block"], small["nodes_per_block"]) == (60, None, 1)
    assert 0 < slow["blocks"]["requested"] <= small["blocks"]["requested"]
    assert slow["node_hours"]["used"] < paper["node_hours"]["used"]
    alone = replay("--concurrent 1")
    assert alone["concurrent"] == 1
    assert min(trainer["node_hours"] for trainer in alone["policies"][0]["trainers"]) == 0
    assert replay("--node-hour-price 2.5")["idle_cost"]["price_per_node_hour"] == 2.5


def test_the_horizon_is_the_policys(replay, monkeypatch):
    made = []

    class Seen(MilpPolicy):
        def __init__(self, objective, *, horizon=None):
            made.append((objective, None if horizon is None else horizon.total_seconds()))
            super().__init__(objective, horizon=horizon)

    monkeypatch.setitem(POLICIES, "milp", Seen)
    replay("--horizon 45.5 --objective priority")
    replay("--horizon adaptive")
    assert set(made) == {("priority", 45.5), ("speedup", None)}


def test_malformed_lines_are_skipped_and_counted_if_asked(freetrain, replay, tmp_path):
    (tmp_path / "idle.csv").write_text(IDLE + "d,9,8\n")
    assert replay("--lenient")["log"]["skipped"] == 1
    assert "malformed lines skipped: 1" in freetrain("replay idle.csv --trainers hpo:1 --lenient").out


def test_outages_are_left_out_if_asked(replay, tmp_path):
    (tmp_path / "idle.csv").write_text("a,0,40000\nb,20000,40000\n")
    assert replay()["node_hours"]["idle"] == pytest.approx(60000 / 3600)
    assert replay("--mask-outages 0.9")["node_hours"]["idle"] == pytest.approx(20000 / 3600)


def test_a_log_in_processors_and_partitions(freetrain, replay, tmp_path):
    """Half of the eight processors are of partition 1: two nodes."""
    job = "{} {} 0 {} {} -1 -1 {} 100 -1 1 -1 -1 -1 -1 {} -1 -1\n"
    rows = [(1, 0, 100, 4, 4, 1), (2, 0, 100, 4, 4, 2), (3, 150, 50, 4, 4, 1), (4, 300, 0, 2, 2, 1)]
    (tmp_path / "log.swf").write_text("; MaxProcs: 8\n" + "".join(job.format(*row) for row in rows))
    inputs = "log.swf --trainers trainers.yaml"
    assert replay("--processors-per-node 2", inputs)["log"]["nodes"] == 4
    result = replay("--processors-per-node 2 --partition 1 --nodes 2", inputs)
    assert result["node_hours"]["idle"] == pytest.approx((50 + 100) * 2 / 3600)
    assert result["log"]["zero_length"] == 1
    assert "jobs of less than a second: 1" in freetrain(f"replay {inputs}").out
    wrong = freetrain(f"replay {inputs} --partition 1")
    assert (wrong.code, "give the number of nodes of partition '1'" in wrong.err) == (2, True)


def test_what_if_is_shown_and_written(freetrain, tmp_path):
    done = freetrain("replay idle.csv --trainers trainers.yaml --what-if --json out.json --report page.html")
    assert (done.code, done.err) == (0, "")
    result = json.loads((tmp_path / "out.json").read_text())
    table = result["what_if"]
    as_given = table["efficiency"][table["rescale_factors"].index(1.0)]
    assert as_given[table["start_seconds"].index(0.0)] == pytest.approx(result["efficiency"])
    page = (tmp_path / "page.html").read_text().replace("\N{NO-BREAK SPACE}", " ")
    for share in (share for row in table["efficiency"] for share in row):
        assert f"{100 * share:.1f} %" in done.out
        assert f"<td>{100 * share:.1f} %</td>" in page
    assert "what_if" not in json.loads(_without_what_if(freetrain, tmp_path))


def _without_what_if(freetrain, tmp_path):
    freetrain("replay idle.csv --trainers trainers.yaml --json out.json")
    return (tmp_path / "out.json").read_text()


def test_too_few_trainers_are_told_of(freetrain, tmp_path):
    (tmp_path / "trainers.yaml").write_text("- {name: one, max: 1, curve: {1: 10}}\n")
    done = freetrain("replay idle.csv --trainers trainers.yaml --report page.html")
    note = "one trainer can use at most 1 of the 2 nodes that are idle on average; add trainers"
    assert f"Note: {note}" in " ".join(done.out.split())
    assert note in (tmp_path / "page.html").read_text()


def test_the_page_is_written(freetrain, tmp_path):
    done = freetrain("replay idle.csv --trainers trainers.yaml --policy milp,equal-share --report page.html")
    page = (tmp_path / "page.html").read_text()
    assert done.code == 0
    assert "Your idle nodes: 2.0 of 3 on average" in page
    assert "freetrain replay idle.csv --trainers trainers.yaml" in page
    assert sorted(path.name for path in tmp_path.iterdir()) == ["idle.csv", "page.html", "trainers.yaml"]


@pytest.mark.parametrize(
    ("log", "trainers"),
    [
        ("idle.csv", "trainers.yaml"),
        ("jobs.swf", "trainers.csv"),
        ("sacct.txt", "trainers.yaml"),
        pytest.param("idle.csv", "trainers.csv", marks=pytest.mark.slow),
        pytest.param("jobs.swf", "trainers.yaml", marks=pytest.mark.slow),
        pytest.param("sacct.txt", "trainers.csv", marks=pytest.mark.slow),
    ],
)
def test_examples_can_be_replayed(freetrain, replay, log, trainers):
    """Each log with each list; job logs also with estimates."""
    written = freetrain("replay --example ex")
    assert (written.code, written.err) == (0, "")
    assert {f"ex/{log}", f"ex/{trainers}"} <= set(written.out.split())
    knowledge = "none,perfect" if log == "idle.csv" else "none,estimated,perfect"
    result = replay(f"--nodes 32 --knowledge {knowledge} --horizon 120", f"ex/{log} --trainers ex/{trainers}")
    assert [entry["knowledge"] for entry in result["policies"]] == knowledge.split(",")
    assert all(entry["efficiency"] > 0.5 for entry in result["policies"])
    assert result["trainers"]["count"] == 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "LOG is missing; 'freetrain replay --example DIR'"),
        ("idle.csv", "--trainers is missing"),
        ("none.csv --trainers hpo:2", "none.csv: cannot be read: No such file or directory"),
        ("empty.csv --trainers hpo:2", "empty.csv: no idle intervals"),
        ("overlap.csv --trainers hpo:2", "overlap.csv:2: node 'a' is already idle by line 1"),
        ("backwards.csv --trainers hpo:2", "backwards.csv:1: an interval must end after it starts"),
        ("backwards.csv --lenient --trainers hpo:2", "no idle interval"),
        ("sacct.txt --trainers hpo:2", "sacct.txt: 'sacct' does not report the size of the machine"),
        ("idle.csv --nodes 2 --trainers hpo:2", "3 distinct nodes, more than the 2 given"),
        ("idle.csv --nodes 0 --trainers hpo:2", "at least one node"),
        ("idle.csv --nodes 100000000000 --trainers hpo:2", "up to 1,000,000 nodes"),
        ("idle.csv --mask-outages 2 --trainers hpo:2", "must be in (0, 1]"),
        ("idle.csv --trainers hpo:0", "expected a number after the colon"),
        ("idle.csv --trainers best", "unknown trainers 'best'"),
        ("idle.csv --trainers none.yaml", "none.yaml: cannot read the list of trainers"),
        ("idle.csv --trainers curve.yaml", "curve.yaml:1: curve: trainer 'a': its curve starts at 2 nodes, min is 1"),
        ("idle.csv --trainers work.yaml", "work.yaml:1: work: must be more than zero, got '-5'"),
        ("idle.csv --trainers hpo:2 --policy mlip", "--policy: unknown 'mlip' (did you mean 'milp'?); available:"),
        ("idle.csv --trainers hpo:2 --policy ,", "--policy: no name in ','"),
        ("idle.csv --trainers hpo:2 --knowledge prefect", "--knowledge: unknown 'prefect' (did you mean 'perfect'?)"),
        ("idle.csv --trainers hpo:2 --knowledge none,estimated", "idle.csv: closing times cannot be estimated"),
        ("idle.csv --trainers hpo:2 --cost free", "--cost: unknown 'free'; available: full, paper"),
        ("idle.csv --trainers hpo:2 --curves know", "--curves: unknown 'know' (did you mean 'known'?)"),
        (
            "idle.csv --trainers hpo:2 --objective trouput",
            "--objective: unknown 'trouput' (did you mean 'throughput'?)",
        ),
        ("idle.csv --trainers hpo:2 --horizon soon", "--horizon soon: give a positive number of seconds, or adaptive"),
        ("idle.csv --trainers hpo:2 --horizon -5", "--horizon -5: give"),
        ("idle.csv --trainers hpo:2 --horizon nan", "--horizon nan: give"),
        ("idle.csv --trainers hpo:2 --horizon 1e99", "--horizon 1e99: give"),
        ("idle.csv --trainers hpo:2 --horizon 1e-9", "horizon"),
        ("idle.csv --trainers hpo:2 --concurrent 0", "at least one trainer"),
        ("idle.csv --trainers hpo:2 --cost full --start-seconds -1", "zero or more seconds"),
        ("idle.csv --trainers hpo:2 --blocks -1", "--blocks: must be 0 to 86,400 seconds, got -1"),
        ("idle.csv --trainers hpo:2 --blocks nan", "--blocks: must be 0 to 86,400 seconds, got nan"),
        ("idle.csv --trainers hpo:2 --nodes-per-block 2", "--nodes-per-block: blocks are requested with --blocks only"),
        ("idle.csv --trainers hpo:2 --blocks 9 --nodes-per-block 0", "--nodes-per-block: must be at least 1, got 0"),
        ("idle.csv --trainers hpo:2 --start-seconds 3", "--start-seconds: starts are charged with --cost full only"),
        ("idle.csv --trainers hpo:2 --rescale-seconds 5", "--rescale-seconds 5: give UP,DOWN"),
        ("idle.csv --trainers hpo:2 --rescale-seconds 5,-1", "--rescale-seconds 5,-1: give UP,DOWN"),
        ("idle.csv --trainers hpo:2 --rescale-seconds 5,inf", "--rescale-seconds 5,inf: give UP,DOWN"),
        ("idle.csv --trainers hpo:2 --node-hour-price -1", "--node-hour-price must be zero or more"),
        ("idle.csv --trainers hpo:2 --json no/out.json", "--json no/out.json: there is no directory"),
        ("idle.csv --trainers hpo:2 --report no/out.html", "--report no/out.html: there is no directory"),
        ("idle.csv --trainers hpo:2 --json folder", "--json folder: cannot be written"),
        ("idle.csv --trainers hpo:2 --json out --report ./out", "--report out: this is --json already"),
        ("idle.csv --trainers hpo:2 --json idle.csv", "--json idle.csv: this is an input already"),
        ("idle.csv --trainers work.yaml --report work.yaml", "work.yaml:1"),
        ("idle.csv --trainers hpo:2 --fusion h100-mlp", "--fusion: only members of sweeps are fused"),
        ("idle.csv --trainers sweep:8xswept.yaml --fusion h100-mpl", "unknown 'h100-mpl' (did you mean 'h100-mlp'?)"),
        (
            "idle.csv --trainers sweep:8xswept.yaml --fusion curve.csv",
            "curve.csv:2: fusion curve: a throughput must be",
        ),
        ("idle.csv --trainers sweep:8xswept.yaml --json swept.yaml", "--json swept.yaml: this is an input already"),
        ("idle.csv --trainers sweep:8xswept.yaml --what-if", "--what-if: does not work with sweeps"),
        ("idle.csv --trainers sweep:8xswept.yaml --blocks 60", "--blocks: sweeps are replayed in nodes that are idle"),
        ("idle.csv --trainers sweep:8xtrainers.yaml", "'one' never ends"),
        ("idle.csv --trainers sweep:8xwork.yaml", "work.yaml:1: work: must be more than zero, got '-5'"),
        ("--example .", "trainers.yaml already exists"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(freetrain, tmp_path, monkeypatch, arguments, message):
    """Errors are reported before anything is replayed or written."""
    files = {
        "empty.csv": "node,start,end\n",
        "overlap.csv": "a,0,9\na,5,12\n",
        "backwards.csv": "a,9,5\n",
        "sacct.txt": "JobID|Submit|Start|End|NNodes|Timelimit|State\n",
        "curve.yaml": "- {name: a, max: 4, curve: {2: 10, 4: 18}}\n",
        "work.yaml": "- {name: a, max: 4, curve: shufflenet, work: -5}\n",
        "swept.yaml": "- {name: a, max: 1, curve: shufflenet, work: 1e6}\n",
        "curve.csv": "members,throughput\n2,no\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "folder").mkdir()
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    monkeypatch.setattr(MilpPolicy, "allocate", lambda *_: pytest.fail("it was replayed"))
    done = freetrain(f"replay {arguments}")
    assert done.code == 2
    assert done.out == ""
    assert done.err.startswith("freetrain: ")
    assert done.err.count("\n") == 1
    assert message in done.err
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_a_file_that_cannot_be_written_after_all_is_one_line(freetrain):
    """The table is printed before."""
    done = freetrain("replay idle.csv --trainers hpo:1 --json /dev/full")
    assert done.code == 2
    assert "dedicated node" in done.out
    assert done.err == "freetrain: /dev/full: cannot be written: No space left on device\n"


def test_a_policy_that_breaks_its_contract_is_named_and_the_last_good_allocation_stays(
    freetrain, tmp_path, monkeypatch
):
    """Its first decision is valid; later ones allocate nodes that are not in the pool."""

    class Bad(Policy):
        name = "bad"

        def __init__(self, objective, *, horizon=None):
            self.asked = 0

        def allocate(self, pool, trainers, current, now):
            self.asked += 1
            node = next(iter(pool)) if self.asked == 1 else "moon"
            return Decision({trainers[0].name: frozenset([node])}, 0.0, proven_optimal=False, bound=0.0)

    monkeypatch.setitem(POLICIES, "bad", Bad)
    done = freetrain("replay idle.csv --trainers trainers.yaml --policy bad,milp --json out.json")
    bad, good = json.loads((tmp_path / "out.json").read_text())["policies"]
    assert done.code == 0
    assert (bad["refused"], bad["solves"]) == (bad["events"] - 1, 1)
    assert bad["node_hours"]["used"] == pytest.approx(600 / 3600), "the first node, to the end"
    assert (good["refused"], good["first_refusal"]) == (0, None)
    (warning,) = done.err.splitlines()
    assert warning.startswith(
        f"freetrain: warning: policy 'bad', closings none: {bad['refused']} of {bad['events']} decisions refused"
    )
    assert "'moon', which is not in the pool" in warning


def test_interrupted_it_ends_without_a_traceback(freetrain, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(MilpPolicy, "allocate", interrupt)
    done = freetrain("replay idle.csv --trainers hpo:2 --json out.json")
    assert (done.code, done.out) == (130, "")
    assert done.err == "freetrain: interrupted; nothing was written\n"
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize("option", ["--json", "--report"])
@pytest.mark.parametrize("through_a_link", [False, True])
def test_a_device_is_never_replaced(freetrain, tmp_path, option, through_a_link):
    """Not even as root, who has permission."""
    (tmp_path / "link").symlink_to("/dev/null")
    name = "link" if through_a_link else "/dev/null"
    done = freetrain(f"replay idle.csv --trainers hpo:1 {option} {name}")
    assert (done.code, done.err) == (0, "")
    assert Path("/dev/null").is_char_device()
    assert (tmp_path / "link").is_symlink()


def test_progress_is_shown_on_a_terminal(freetrain, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    done = freetrain("replay idle.csv --trainers hpo:2 --policy milp,equal-share")
    assert done.code == 0
    for bar in ("reading idle.csv", "oracle", "milp, closings none", "equal-share, closings none"):
        assert bar in done.err


def test_a_sweep_is_replayed_fused_and_one_by_one(freetrain, tmp_path):
    """On one node, four members of 200 s end after 400 s if fused, and three one by one."""
    (tmp_path / "one.csv").write_text("node,start,end\na,0,600\n")
    (tmp_path / "swept.yaml").write_text("- {name: net, max: 1, curve: {1: 10}, work: 2000}\n")
    (tmp_path / "curve.csv").write_text("members,throughput\n4,2.0\n")
    call = "replay one.csv --trainers sweep:4xswept.yaml --fusion curve.csv --node-hour-price 3 --json out.json"
    done = freetrain(f"{call} --report out.html")
    assert (done.code, done.err) == (0, "")
    result = json.loads((tmp_path / "out.json").read_text())
    (entry,) = result["policies"]
    assert entry["sweep"]["finished"] == 4
    assert entry["one_by_one"]["finished"] == 3
    assert result["trainers"] == {"spec": "sweep:4xswept.yaml", "count": 4, "objective": "throughput"}
    text = " ".join(done.out.split())
    assert "milp none fused 4 4.0 0.1 36 6.67 min milp none one by one 3 3.0 0.2 18 6.67 min" in text
    assert "4 of 4 members would have finished in the idle nodes, fused as curve.csv with milp, against 3" in text
    assert "worth 0.3 of 0.5." in text
    assert "fused as curve.csv, against 3 one by one" in (tmp_path / "out.html").read_text()


def test_without_a_curve_a_sweep_trains_one_by_one(freetrain, tmp_path):
    (tmp_path / "swept.yaml").write_text("- {name: net, max: 1, curve: {1: 10}, work: 1000}\n")
    done = freetrain("replay idle.csv --trainers sweep:4xswept.yaml --report out.html --json out.json")
    assert (done.code, done.err) == (0, "")
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["fusion"] == {"name": "none", "points": [[1, 1.0]]}
    assert "fused" not in done.out
