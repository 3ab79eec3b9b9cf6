"""The Python object: it never blocks, shows what was seen last, and checks everything before it sends anything."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from freetrain_parsl.campaign.detached import RunStatus
from freetrain_parsl.errors import InvalidInput, RemoteError, UsageError
from freetrain_parsl.extensions.globus.remote import campaign as campaign_module
from freetrain_parsl.extensions.globus.remote.campaign import RemoteCampaign, RunRecords
from freetrain_parsl.extensions.globus.remote.compute import ComputeEndpoint
from freetrain_parsl.extensions.globus.remote.messages import check_run_name
from freetrain_parsl.extensions.globus.remote.preparation import prepare

ENDPOINT = "0e843812-9a83-4451-bef3-f1522edcb031"
APP = """\
from freetrain_parsl import training_app

@training_app
def train(session, lr=0.1):
    pass
"""


class RecordedEndpoint(ComputeEndpoint):
    """Answers from a list instead of a site."""

    def __init__(self) -> None:
        super().__init__(ENDPOINT)
        self.requests: list = []
        self.answers: list = []
        self.answering = threading.Event()
        self.answering.set()

    def call(self, request, timeout=0.0):
        self.requests.append(request)
        assert self.answering.wait(10)
        self.function = "F"
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def status(state: str, trainings=(), message: str = ""):
    summary = {"trainings": list(trainings)}
    return RunStatus("demo-1", state, "login1", "/home/me/x", message, summary).as_json()


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Write a campaign with its app; the module is forgotten afterwards, as another test has one of the same name."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "net_for_remote.py").write_text(APP)
    (tmp_path / "c.yaml").write_text("name: demo\ntrainings:\n  - app: net_for_remote.py:train\n")
    yield tmp_path
    sys.modules.pop("net_for_remote", None)


@pytest.fixture
def records(tmp_path):
    return RunRecords(tmp_path / "state")


def start(files, records, endpoint, **more):
    return RemoteCampaign.start(files / "c.yaml", endpoint=endpoint, records=records, **more)


def test_it_starts_in_the_background_and_is_found_again(files, records):
    endpoint = RecordedEndpoint()
    endpoint.answering.clear()
    campaign = start(files, records, endpoint, settings={})
    assert campaign.seen is None
    assert "not asked yet" in repr(campaign)
    endpoint.answers = [status("starting"), status("finished")]
    endpoint.answering.set()
    assert campaign.wait(sleep=lambda _: None).state == "finished"
    sent = endpoint.requests[0]
    assert (sent["verb"], sent["run"], sent["site"]) == ("start", campaign.run, {"name": "local"})
    assert RemoteCampaign.attach(records=records).run == campaign.run
    assert records.find(None).function == "F"


def test_it_shows_itself_in_a_notebook_with_everything_escaped(files, records):
    endpoint = RecordedEndpoint()
    trainings = [{"name": f"<b>{n}</b>", "state": "running", "share": 0.25} for n in range(25)]
    endpoint.answers = [status("running", trainings, "a < b")]
    campaign = start(files, records, endpoint)
    campaign.status  # noqa: B018 - asking is a call, not an attribute
    endpoint.answers.append(status("running", trainings, "a < b"))
    campaign.status().result()
    shown = campaign._repr_mimebundle_()
    assert "running on login1, seen 0 s ago; a < b" in shown["text/plain"]
    assert "<b>0</b>  running  25%" in shown["text/plain"]
    assert "… and 5 more" in shown["text/plain"]
    assert "&lt;b&gt;0&lt;/b&gt;" in shown["text/html"]
    assert "<b>" not in shown["text/html"]


def test_errors_are_raised_by_the_future_and_shown(files, records):
    endpoint = RecordedEndpoint()
    endpoint.answers = [RemoteError("the endpoint is offline")]
    campaign = start(files, records, endpoint)
    endpoint.answers.append(RemoteError("still offline"))
    with pytest.raises(RemoteError, match="still offline"):
        campaign.status().result()
    assert "error: still offline" in repr(campaign)
    assert records.find(None).run == campaign.run  # it may have been started


def test_a_wait_outlasts_an_endpoint_that_is_offline_for_a_while(files, records):
    endpoint = RecordedEndpoint()
    endpoint.answers = [status("starting"), RemoteError("offline"), status("running"), status("finished")]
    campaign = start(files, records, endpoint)
    slept: list[float] = []
    assert campaign.wait(sleep=slept.append).state == "finished"
    assert len(slept) == 2
    endpoint.answers = [RemoteError("offline")]
    with pytest.raises(RemoteError, match="offline"):
        campaign.wait(0.0)


def test_a_connection_that_hangs_is_given_up_and_the_next_call_gets_a_client_of_its_own(files, records, monkeypatch):
    """The process may end, too: the thread of the call does not keep it alive."""
    monkeypatch.setattr(campaign_module, "HUNG", 0.1)
    endpoint, hanging = RecordedEndpoint(), threading.Event()
    endpoint._client = object()
    endpoint.answering = hanging
    endpoint.answers = [status("running"), status("running")]
    with pytest.raises(RemoteError, match="no answer within 0 s: a connection hangs"):
        start(files, records, endpoint).status().result(5)
    assert endpoint._client is None
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "freetrain-call")
    hanging.set()
    assert RemoteCampaign.attach(records=records)._endpoint is not endpoint


def test_what_the_site_refuses_is_not_recorded(files, records):
    endpoint = RecordedEndpoint()
    prepared = prepare(files / "c.yaml", "local")
    campaign = RemoteCampaign.of(prepared, files / "c.yaml", endpoint, records)
    endpoint.answers = [InvalidInput("login1 has other versions")]
    with pytest.raises(InvalidInput):
        campaign.submit(prepared).result()
    assert records.all() == []


@pytest.mark.parametrize(
    ("campaign", "site", "settings", "message"),
    [
        ("trainings:\n  - app: gone.py:train\n", "local", [], r"gone\.py: no such file"),
        ("trainings:\n  - app: net_for_remote.py:trian\n", "local", [], r"c\.yaml:2: .*did you mean 'train'"),
        ("trainings: []\n", "local", [], "there are no 'trainings'"),
        ("trainings:\n  - app: net_for_remote.py:train\n    naem: x\n", "local", [], r"c\.yaml:3: unknown key"),
        (None, "perlmuter", [], "No such file|no shipped site"),
        (None, "local", ["depth=3"], "--set depth=…: neither the campaign nor the site file has"),
        (None, "local", ["depth"], "write --set name=value"),
        ("name: ${WHO}\ntrainings:\n  - app: net_for_remote.py:train\n", "local", [], r"c\.yaml:1: .*--set who"),
    ],
)
def test_bad_input_is_refused_before_anything_is_recorded_or_sent(files, records, campaign, site, settings, message):
    if campaign is not None:
        (files / "c.yaml").write_text(campaign)
    with pytest.raises(InvalidInput, match=message) as caught:
        prepare(files / "c.yaml", site, settings=settings)
    assert "\n" not in str(caught.value)


def test_variables_of_a_site_are_looked_up_there(files, monkeypatch):
    """A site file may use the site's own environment; what can be checked here is checked here."""
    (files / "site.yaml").write_text("system: slurm\nblock: {partition: '${QUEUE}'}\n")
    monkeypatch.setenv("QUEUE", "of-this-machine")
    request = prepare(files / "c.yaml", str(files / "site.yaml")).request
    assert request["settings"] == []
    assert "${QUEUE}" in request["site"]["text"]
    (files / "site.yaml").write_text("system: slrum\n")
    with pytest.raises(InvalidInput, match=r"site\.yaml:1: .*did you mean 'slurm'"):
        prepare(files / "c.yaml", str(files / "site.yaml"))


@pytest.mark.parametrize("name", ["my site.yaml", "_site.yaml", "größe (2).yaml", ".yaml"])
def test_a_site_file_of_any_name_is_accepted_at_the_site(files, name):
    (files / name).write_text("system: local\n")
    sent = prepare(files / "c.yaml", str(files / name)).request["site"]["file"]
    assert check_run_name(sent) == sent


@pytest.mark.parametrize(("submitted", "left"), [(True, 1), (False, 0)])
def test_a_login_that_is_refused_after_the_start_was_sent_does_not_lose_the_run(files, records, submitted, left):
    endpoint = RecordedEndpoint()
    endpoint.submitted = submitted
    endpoint.answers = [UsageError("the login is refused")]
    preparation = prepare(files / "c.yaml", "local")
    campaign = RemoteCampaign.of(preparation, files / "c.yaml", endpoint, records)
    with pytest.raises(UsageError, match="the login is refused"):
        campaign.submit(preparation).result()
    assert len(records.all()) == left


@pytest.mark.parametrize("answer", [{}, {"trainings": 5, "text": 1, "done": "x", "message": None}])
def test_answers_of_another_shape_are_one_line(records, answer):
    endpoint = RecordedEndpoint()
    campaign = RemoteCampaign(records.create("demo-1", ENDPOINT, Path("c.yaml")), endpoint=endpoint, records=records)
    for call in (campaign.logs, campaign.results, campaign.clean, campaign.status):
        endpoint.answers = [answer]
        with pytest.raises(RemoteError, match="unexpected answer"):
            call().result()
