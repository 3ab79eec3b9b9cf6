"""Requests to Globus Transfer whose answers are not those of the service."""

from __future__ import annotations

import pytest

from freetrain_parsl.errors import CollectionUnavailable
from freetrain_parsl.extensions.globus.storage.collections import CopyItem
from tests.extensions.globus.storage.conftest import HOME, A
from tests.support.globus.loopback_service import Reply

pytestmark = pytest.mark.globus

_PAGE = b"<html>\n<h1>log in</h1>\n</html>"
_OPERATION = f"/v0.10/operation/endpoint/{HOME}"
_REQUESTS = {
    "names": (("GET", f"{_OPERATION}/ls"), lambda one: one.names(HOME, "/")),
    "make_directory": (("POST", f"{_OPERATION}/mkdir"), lambda one: one.make_directory(HOME, "/new")),
    "rename": (("POST", f"{_OPERATION}/rename"), lambda one: one.rename(HOME, "/old", "/new")),
    "submission_id": (("GET", "/v0.10/submission_id"), lambda one: one.submission_id()),
    "submit_transfer": (
        ("POST", "/v0.10/transfer"),
        lambda one: one.submit_transfer("1", A, HOME, [CopyItem("/a", "/b", recursive=False)]),
    ),
    "submit_delete": (("POST", "/v0.10/delete"), lambda one: one.submit_delete("1", HOME, ["/a"])),
    "task": (("GET", "/v0.10/task/{task}"), lambda one: one.task("1")),
}


@pytest.mark.parametrize("page", [_PAGE, b"", {}, [], "x", None], ids=repr)
@pytest.mark.parametrize("name", _REQUESTS)
def test_an_answer_that_is_no_document_of_the_service_is_tried_again_later(world, name, page):
    route, request = _REQUESTS[name]
    world.services["a"].mishap(*route, Reply(page), times=100)
    with pytest.raises(CollectionUnavailable, match="Globus sent an unexpected answer") as caught:
        request(world.collections("a"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("7", 7.0), ("inf", 0.0), ("nan", 0.0), ("-5", 0.0), ("1e9", 0.0), ("9999999", 3600.0), ("Mon, 23 Nov 2026", 0.0)],
)
def test_the_service_may_ask_to_wait_for_a_limited_time(world, header, seconds):
    world.services["a"].mishap("GET", "/v0.10/submission_id", Reply({}, 429, {"Retry-After": header}), times=100)
    with pytest.raises(CollectionUnavailable) as caught:
        world.collections("a").submission_id()
    assert caught.value.wait == seconds


@pytest.mark.parametrize("number", ["Infinity", "1e999", "1" + "0" * 400])
def test_a_number_of_bytes_that_cannot_be_is_an_unexpected_answer_or_limited(world, number):
    text = '{"status": "ACTIVE", "bytes_transferred": ' + number + "}"
    world.services["a"].mishap("GET", "/v0.10/task/{task}", Reply(text.encode()))
    one = world.collections("a")
    if number.isdigit():
        assert one.task("1").bytes_done == 2**63
        return
    with pytest.raises(CollectionUnavailable, match="unexpected answer"):
        one.task("1")


@pytest.mark.parametrize(("number", "rate"), [("Infinity", 0.0), ("NaN", 0.0), ("-5", -5.0)])
def test_a_rate_that_cannot_be_is_none(world, number, rate):
    text = '{"status": "ACTIVE", "effective_bytes_per_second": ' + number + "}"
    world.services["a"].mishap("GET", "/v0.10/task/{task}", Reply(text.encode()))
    assert world.collections("a").task("1").rate == rate


def test_texts_of_a_collection_are_one_line_without_escapes(world):
    evil = "a\x1b]0;owned\x07b\n\x1b[2Jc\u202e" * 200
    fault = {"status": "FAILED", "fatal_error": {"code": evil, "description": evil}}
    world.services["a"].mishap("GET", "/v0.10/task/{task}", Reply(fault))
    reason = world.collections("a").task("1").reason
    assert reason.isprintable()
    assert len(reason) <= 300
    world.services["a"].mishap("GET", f"{_OPERATION}/ls", Reply({"code": evil, "message": evil}, 500), times=100)
    with pytest.raises(CollectionUnavailable) as caught:
        world.collections("a").names(HOME, "/")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


def test_a_file_where_a_directory_is_expected_is_nothing_and_endless_listings_are_refused(world, monkeypatch):
    entries = [{"name": "gen-0000000001", "type": "file", "size": 3}, {"name": "gen-0000000002", "type": "dir"}]
    world.services["a"].mishap("GET", f"{_OPERATION}/ls", Reply({"DATA": entries}), times=3)
    one = world.collections("a")
    assert one.names(HOME, "/", directories=True) == ["gen-0000000002"]
    assert one.names(HOME, "/") == ["gen-0000000001", "gen-0000000002"]
    assert one.sizes(HOME, "/") == {"gen-0000000001": 3}
    world.services["a"].mishap("GET", f"{_OPERATION}/ls", Reply({"code": "ClientError.NotDirectory"}, 400))
    assert one.names(HOME, "/x", directories=True) is None
    monkeypatch.setattr("freetrain_parsl.extensions.globus.storage.collections._MOST_ENTRIES", 1)
    world.services["a"].mishap("GET", f"{_OPERATION}/ls", Reply({"DATA": entries}))
    with pytest.raises(CollectionUnavailable, match="more than 1 entries"):
        one.names(HOME, "/")
