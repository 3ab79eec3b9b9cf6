"""Environment, versions, pacing, records, messages: no processes, no network."""

from __future__ import annotations

import itertools
import stat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetrain_parsl.campaign.launch import KEEP, scrubbed
from freetrain_parsl.errors import InvalidInput, RemoteError
from freetrain_parsl.extensions.globus.remote.campaign import RunRecords
from freetrain_parsl.extensions.globus.remote.compute import RequestBudget, poll_delays
from freetrain_parsl.extensions.globus.remote.messages import (
    FUNCTION,
    FUNCTION_SOURCE,
    Versions,
    check_run_name,
    parse_status,
)

SECRET = "s3cret-of-the-client"


def test_credentials_and_the_endpoints_variables_are_removed():
    environment = {
        "GLOBUS_COMPUTE_CLIENT_ID": "id",
        "GLOBUS_COMPUTE_CLIENT_SECRET": SECRET,
        "GC_TASK_UUID": "1",
        "PARSL_WORKER_RANK": "0",
        "AWS_SECRET_ACCESS_KEY": "abcdefgh",
        "HF_TOKEN": "hf_12345678",
        "WANDB_API_KEY": "0123456789",
        "MYSQL_PWD": "x",
        "GITHUB_PAT": "y",
        "BROKER": "amqps://user:password@host/",
        "COPY": f"x{SECRET}y",
        "http_proxy": "http://proxy:3128",
        "PATH": "/bin",
        "HOME": "/home/me",
    }
    assert scrubbed(environment) == {"http_proxy": "http://proxy:3128", "PATH": "/bin", "HOME": "/home/me"}


def test_the_endpoints_owner_may_pass_variables_on_but_never_those_of_globus():
    environment = {
        KEEP: "HF_TOKEN, GLOBUS_COMPUTE_CLIENT_SECRET",
        "HF_TOKEN": "hf_1",
        "GLOBUS_COMPUTE_CLIENT_SECRET": SECRET,
    }
    assert set(scrubbed(environment)) == {KEEP, "HF_TOKEN"}


@settings(max_examples=30)
@given(
    st.dictionaries(st.text("ABC_", min_size=1, max_size=3), st.text("ab:/@", max_size=12), max_size=3),
    st.text("ab:/@", min_size=8, max_size=9),
)
def test_no_value_with_the_secret_is_passed_on(environment, secret):
    result = scrubbed({**environment, "GLOBUS_COMPUTE_CLIENT_SECRET": secret, "ECHO": f"--secret={secret}"})
    assert all(secret not in value for value in result.values())


def test_versions_that_matter_are_compared():
    here = Versions("3.11.7", "0.1.0", "2.13.0+cpu")
    assert here.mismatch(Versions("3.11.2", "0.1.0", "2.13.1+cu128")) == ""
    assert here.mismatch(Versions.parse({"python": "3.12.1", "freetrain_parsl": "0.1.0", "torch": "2.6.0"})) == (
        "Python is 3.12 there and 3.11 here; torch is 2.6 there and 2.13 here"
    )
    assert "torch is none there" in here.mismatch(Versions.parse({"python": "3.11.7", "freetrain_parsl": "0.1.0"}))
    assert Versions.installed().mismatch(Versions.parse(Versions.installed().as_json())) == ""


@given(
    st.integers(1, 5),
    st.lists(st.floats(0, 30, allow_nan=False), min_size=1, max_size=40),
)
def test_no_minute_has_more_requests_than_permitted(per_minute, gaps):
    budget = RequestBudget(per_minute)
    now, times = 0.0, []
    for gap in gaps:
        now += gap
        now += budget.take(now)
        times.append(now)
    for first, last in zip(times, times[per_minute:], strict=False):
        assert last - first >= 60.0 - 1e-6


def test_polls_back_off():
    delays = list(itertools.islice(poll_delays(), 20))
    assert delays == sorted(delays)
    assert (delays[0], delays[-1]) == (0.5, 15.0)
    for number in range(1, 14):  # whatever a call takes, its answer is noticed late by a quarter of that at most
        passed, next_look = sum(delays[:number]), sum(delays[: number + 1])
        assert next_look - passed <= 0.25 * passed + 0.5


def test_records_are_found_by_name_by_campaign_and_by_age(tmp_path):
    times = iter(range(10))
    records = RunRecords(tmp_path / "state", clock=lambda: float(next(times)))
    first = records.create("a-1", "E1", tmp_path / "a.yaml")
    second = records.create("a-2", "E2", tmp_path / "a.yaml")
    third = records.create("b-1", "E1", tmp_path / "b.yaml")
    assert records.all() == [first, second, third]
    assert records.find(None) == third
    assert records.find("a-1") == first
    assert records.find(str(tmp_path / "a.yaml")) == second
    assert records.find(str(tmp_path / "a.yaml"), "E1") == first
    assert records.find("from-elsewhere", "E9").endpoint == "E9"
    with pytest.raises(InvalidInput, match="no run from-elsewhere was started from here"):
        records.find("from-elsewhere")
    assert all(stat.S_IMODE(path.stat().st_mode) & 0o077 == 0 for path in [tmp_path / "state"])
    records.forget("b-1")
    assert records.find(None) == second
    (tmp_path / "state" / "x.json").write_text("{")
    with pytest.raises(InvalidInput, match=r"x\.json is damaged"):
        records.all()
    (tmp_path / "state" / "x.json").unlink()
    (tmp_path / "state" / "x.json").mkdir()
    with pytest.raises(InvalidInput, match=r"x\.json cannot be read"):
        records.all()


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "-option", "a\n", "x" * 200, None, 3])
def test_names_of_runs_are_no_paths(name):
    with pytest.raises(InvalidInput, match="is not the name of a run"):
        check_run_name(name)


def test_the_function_says_in_one_line_that_the_package_is_missing(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "freetrain_parsl.extensions.globus.remote.verbs", None)
    namespace: dict = {}
    exec(FUNCTION_SOURCE, namespace)
    answer = namespace[FUNCTION]({"verb": "check"})
    assert "freetrain-parsl cannot be used in the endpoint's Python 3." in answer["error"]
    assert "\n" not in answer["error"]


@pytest.mark.parametrize("document", [{}, {"run": 1}, {"run": "a", "state": "b", "host": "c", "directory": "d"}])
def test_an_unexpected_answer_is_one_line(document):
    with pytest.raises(RemoteError, match="unexpected answer"):
        parse_status(document)
