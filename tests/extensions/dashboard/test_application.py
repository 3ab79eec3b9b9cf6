"""The web application, without a server: what it answers, and to whom."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from freetrain_parsl.campaign.lock import own_identity
from freetrain_parsl.campaign.run_source import CampaignSource, open_source
from freetrain_parsl.campaign.store import RunStore
from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.executor.journal import Journal
from freetrain_parsl.extensions.dashboard.access import Access
from freetrain_parsl.extensions.dashboard.application import make_application
from freetrain_parsl.extensions.dashboard.feed import Feed
from freetrain_parsl.extensions.dashboard.jupyter import server_proxy
from freetrain_parsl.extensions.dashboard.server import ServerOptions
from freetrain_parsl.extensions.pages.run_view import RunView
from freetrain_parsl.report.run_reader import DriverJournal, RunReader
from tests.cli.test_status import FACTS
from tests.extensions.dashboard.asgi_client import Client
from tests.extensions.pages.test_run_view import RUN

PAGE = "http://127.0.0.1:8000"


@pytest.fixture
def store(tmp_path):
    """Make a run whose driver is this process."""
    store = RunStore.create(tmp_path, FACTS, ["a", "b"])
    driver = store.begin_driver(*own_identity())
    path = tmp_path / "journal.sqlite"
    journal = Journal(path)
    for time, entry in RUN:
        journal.write(time, entry)
    journal.close()
    store.describe_driver(driver, "ft-", path)
    return store


@pytest.fixture
def access():
    return Access()


@pytest.fixture
def client(store, access):
    return Client(make_application(CampaignSource(store), access))


def sign_in(client, access):
    """Open the page as the printed address does; return the token for changes."""
    answer = client.get("/", token=access.token)
    assert answer.status == 200
    return re.search('name="change-token" content="([0-9a-f]+)"', answer.text)[1]


PATHS = ["/", "/dashboard.js", "/dashboard.css", "/events", "/log", "/nowhere"]


@pytest.mark.parametrize("path", PATHS)
def test_nothing_is_shown_without_the_token(client, path):
    answer = client.get(path)
    assert answer.status == 403
    assert "freetrain dashboard" in answer.text


@pytest.mark.parametrize("path", PATHS)
def test_a_page_that_was_rebound_to_this_host_sees_nothing(client, access, path):
    sign_in(client, access)
    assert client.get(path, headers={"host": "evil.example:8000"}).status == 403
    assert client.get(path, headers={"origin": "http://evil.example"}).status == 403


def test_the_cookie_stands_for_the_token_and_is_the_browsers_own(client, access):
    sign_in(client, access)
    for path in ("/", "/dashboard.js", "/dashboard.css"):
        answer = client.get(path)
        assert answer.status == 200
        assert access.token not in answer.text
    cookie = client.get("/", token=access.token).headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert access.token not in cookie


def test_the_page_may_load_and_run_nothing_but_its_own(client, access):
    answer = client.get("/", token=access.token)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "style=" not in answer.text
    assert answer.headers["referrer-policy"] == "no-referrer"
    sources = re.findall('(?:src|href)="([^"]+)"', answer.text)
    assert all(not source.startswith(("/", "http")) for source in sources), "relative: it works under a prefix"


@pytest.mark.parametrize("path", ["/stop", "/", "/log", "/events"])
@pytest.mark.parametrize("headers", [{}, {"x-freetrain-change": "0" * 64}, {"origin": "http://evil.example"}])
def test_a_post_without_the_token_of_the_page_changes_nothing(client, access, store, path, headers):
    change = sign_in(client, access)
    if "origin" in headers:
        headers = {**headers, "x-freetrain-change": change}
    assert client.post(path, headers=headers, token=access.token).status == 403
    assert not store.stop_requested()


def test_stop_is_a_post_of_the_page(client, access, store):
    change = sign_in(client, access)
    assert client.get("/stop").status == 405
    assert not store.stop_requested()
    answer = client.post(
        "/stop", headers={"x-freetrain-change": change, "origin": PAGE, "sec-fetch-site": "same-origin"}
    )
    assert answer.status == 200
    assert "asked to stop" in answer.json()["message"]
    assert store.stop_requested()


def test_stop_of_a_run_that_has_ended_says_so(client, access, store):
    store.end_driver(1, "finished")
    change = sign_in(client, access)
    answer = client.post("/stop", headers={"x-freetrain-change": change})
    assert answer.status == 400
    assert "nothing to stop" in answer.json()["message"]


def test_the_log_of_a_training_is_its_last_lines_without_colours(client, access, store):
    logs = store.directory / "logs"
    logs.mkdir()
    lines = [f"2026-01-01T00:00:0{number}.000Z 0 \x1b[31mepoch {number}\x1b[0m" for number in range(5)]
    (logs / "a.log").write_text("\n".join(lines) + "\n")
    sign_in(client, access)
    answer = client.get("/log", training="a").json()
    assert [line["text"] for line in answer["lines"]] == [f"epoch {number}" for number in range(5)]


@pytest.mark.parametrize("name", ["lr [/x] </title><script>", "a\nb\x1b[2J", "\ud800", "n" * 10**6])
def test_any_name_of_a_run_is_text_of_its_page(tmp_path, access, name):
    """A lone surrogate, which UTF-8 cannot encode, is in names of other programs' files."""
    store = RunStore.create(tmp_path, {**FACTS, "name": name}, ["a"])
    answer = Client(make_application(CampaignSource(store), access)).get("/", token=access.token)
    assert answer.status == 200
    assert "<script>" not in answer.text
    assert "\x1b" not in answer.text
    assert len(answer.text) < 10_000


def test_the_lines_of_a_log_are_any_texts_but_no_controls(client, access, store):
    logs = store.directory / "logs"
    logs.mkdir()
    (logs / "a.log").write_bytes(b"2026-01-01T00:00:00.000Z 0 a\x1b]52;c;bQ==\x07b\xc2\x9b2J \xe2\x80\xae \xff\n")
    sign_in(client, access)
    [line] = client.get("/log", training="a").json()["lines"]
    assert line["text"].startswith("ab ")
    assert line["text"].isprintable()


def test_requests_are_noted_when_they_are_served_and_not_before(store, access):
    """What is refused does not make a connection the user's."""
    served = []
    client = Client(make_application(CampaignSource(store), access, granted=served.append))
    client.get("/")
    client.get("/", token="wrong")
    client.get("/", token=access.token, headers={"host": "evil.example"})
    client.post("/stop")
    assert served == []
    client.get("/", token=access.token)
    assert served == [None]


def test_a_run_that_was_removed_is_named_and_what_was_read_stays(store, access, tmp_path):
    """Otherwise the task that follows the run would end, and pages would show old values as if they were new."""
    source = CampaignSource(store, iter(range(0, 10000, 100)).__next__)
    client = Client(make_application(source, access))
    token = sign_in(client, access)
    reader = RunReader(RunView("sweep"), source.journals)
    trainings = reader.refresh().since(0)["trainings"]
    store.directory.joinpath("campaign.sqlite").unlink()
    after = reader.refresh().since(0)
    assert "the state of the run cannot be read" in after["run"]["problem"]
    assert after["trainings"] == trainings
    assert sign_in(client, access) == token
    assert client.post("/stop", headers={"origin": PAGE, "x-freetrain-change": token}).status == 400


@pytest.mark.parametrize("name", ["nobody", "../../etc/passwd", "", "a\x00b"])
def test_the_log_of_no_training_is_refused_in_words(client, access, name):
    sign_in(client, access)
    answer = client.get("/log", training=name)
    assert answer.status == 400
    assert "has no training job" in answer.json()["message"]


def test_it_works_under_a_prefix(store, access):
    client = Client(make_application(CampaignSource(store), access, "/user/me/dash"))
    assert client.get("/user/me/dash/dashboard.js", token=access.token).status == 200
    assert "Path=/user/me/dash/" in client.get("/user/me/dash/", token=access.token).headers["set-cookie"]


# The stream of changes.


async def first_events(client, count, **headers):
    """Return the first events of the stream as (id, changes)."""
    events, done = [], asyncio.Event()

    async def receive():
        await done.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        if message["type"] == "http.response.body":
            match = re.fullmatch("id: (.+)\ndata: (.+)\n\n", message["body"].decode())
            if match:
                events.append((match[1], json.loads(match[2])))
            if len(events) >= count:
                done.set()

    given = {name.replace("_", "-"): value for name, value in headers.items()}
    await asyncio.wait_for(client.application(client.scope("/events", given), receive, send), 20)
    return events


def test_a_page_opened_late_gets_the_whole_history_and_one_that_returns_the_rest(client, store, access):
    sign_in(client, access)

    async def scene():
        (number, whole), *_ = await first_events(client, 1)
        assert whole["reset"]
        assert whole["trainings"]["name"] == ["a", "b"]
        journal = Journal(store.directory / "journal.sqlite")
        journal.write(*RUN[2])
        journal.write(200.0, RUN[-2][1])
        journal.close()
        (_, rest), *_ = await first_events(client, 1, last_event_id=number)
        assert not rest["reset"]
        (_, again), *_ = await first_events(client, 1, last_event_id="0000-7")
        assert again["reset"], "the server was restarted"

    asyncio.run(scene())


@pytest.mark.parametrize("event", ["", "-", "x-1", "-1", "a-b", "9" * 400, "\N{SNOWMAN}-\N{SUPERSCRIPT TWO}"])
def test_an_event_id_that_is_not_ours_means_everything(event):
    assert Feed(RunReader(RunView("demo"), list)).known(event) == 0


def test_viewers_are_bounded(client, access):
    sign_in(client, access)

    async def scene():
        statuses, all_answered = [], asyncio.Event()

        async def watch():
            async def receive():
                await asyncio.sleep(20)
                return {"type": "http.disconnect"}

            async def send(message):
                if message["type"] == "http.response.start":
                    statuses.append(message["status"])
                if len(statuses) == 25:
                    all_answered.set()

            await client.application(client.scope("/events"), receive, send)

        tasks = [asyncio.create_task(watch()) for _ in range(25)]
        await asyncio.wait_for(all_answered.wait(), 20)
        assert sorted(statuses) == [200] * 20 + [503] * 5
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(scene())


def test_a_slow_viewer_gets_one_large_change_instead_of_many(tmp_path):
    path = tmp_path / "journal.sqlite"
    Journal(path).close()
    reader = RunReader(RunView("demo"), lambda: [DriverJournal(path)], clock=lambda: 500.0)

    async def scene():
        feed = Feed(reader, period=0.01)
        async with feed.watched():
            version, _, _ = await feed.next(0, 5.0)
            for entry in RUN:  # while the viewer is busy
                journal = Journal(path)
                journal.write(*entry)
                journal.close()
                await asyncio.sleep(0.015)
            _, _, change = await feed.next(version, 5.0)
            assert json.loads(change)["fragments"]["row"] == [0, 1]
            assert json.loads(change)["windows"]["row"] == [0]

    asyncio.run(scene())


# Options.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"token_needed": False}, "--no-token needs --socket"),
        ({"path": Path("s"), "port": 8899}, "--port and --socket exclude each other"),
        ({"prefix": "user/me"}, "must begin with a slash"),
    ],
)
def test_options_that_are_not_safe_or_cannot_work_are_refused(options, words):
    with pytest.raises(InvalidInput, match=words):
        ServerOptions(**options)


def test_a_socket_path_that_is_too_long_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match="longer than 107 bytes"):
        ServerOptions(path=tmp_path / ("x" * 100))


def test_a_directory_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match="is not a run directory"):
        open_source(tmp_path)


def test_the_run_of_a_script_is_found_by_its_journal(tmp_path):
    (tmp_path / "freetrain").mkdir()
    Journal(tmp_path / "freetrain" / "journal.sqlite").close()
    source = open_source(tmp_path)
    (journal,) = source.journals()
    assert (journal.path.parent.name, journal.how) == ("freetrain", "ended")
    with pytest.raises(InvalidInput, match="end the script"):
        source.stop()


def test_jupyter_starts_it_on_a_private_socket():
    entry = server_proxy()
    assert entry["unix_socket"] is True
    assert entry["command"][:2] == ["freetrain", "dashboard"]
    assert "{unix_socket}" in entry["command"]
