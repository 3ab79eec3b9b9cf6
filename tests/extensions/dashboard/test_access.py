"""Who may see the page, and change something: nobody but the user, from the page."""

from __future__ import annotations

import pytest

from freetrain_parsl.extensions.dashboard.access import Access, AccessVerdict

HOST = {"host": "127.0.0.1:8000"}


@pytest.fixture
def access():
    return Access()


def cookies_of(access):
    return {access.cookie_name: access.cookie}


def changing(access, **others):
    return {**HOST, "x-freetrain-change": access.change_token, **others}


def test_the_token_or_the_cookie_is_needed(access):
    assert access.to_see(HOST, access.token, {}) is AccessVerdict.GRANTED
    assert access.to_see(HOST, None, cookies_of(access)) is AccessVerdict.GRANTED
    assert access.to_see(HOST, None, {}) is AccessVerdict.NOT_SIGNED_IN


@pytest.mark.parametrize("token", ["", "x", "\udce4\N{SNOWMAN}", "a" * 100_000])
def test_a_wrong_token_is_refused_even_with_the_cookie(access, token):
    assert access.to_see(HOST, token, cookies_of(access)) is AccessVerdict.NOT_THE_USER
    assert access.to_see(HOST, None, {access.cookie_name: token}) is AccessVerdict.NOT_THE_USER


def test_the_cookie_of_another_server_is_refused(access):
    other = Access()
    assert access.cookie_name != other.cookie_name
    assert access.to_see(HOST, None, {access.cookie_name: other.cookie}) is AccessVerdict.NOT_THE_USER


def test_the_token_is_no_cookie_and_no_secret_is_another(access):
    assert len({access.token, access.cookie, access.change_token}) == 3
    assert access.to_see(HOST, None, {access.cookie_name: access.token}) is AccessVerdict.NOT_THE_USER
    assert access.to_see(HOST, access.change_token, {}) is AccessVerdict.NOT_THE_USER
    assert access.token not in repr(access)


@pytest.mark.parametrize("host", ["localhost:8000", "LOCALHOST", "127.0.0.1", "[::1]:8000", "localhost.:80"])
def test_it_answers_under_the_names_of_the_loopback(access, host):
    assert access.to_see({"host": host}, access.token, {}) is AccessVerdict.GRANTED


@pytest.mark.parametrize(
    "host", ["", "evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "10.0.0.1", "[::2]"]
)
def test_it_does_not_answer_under_other_names(access, host):
    assert access.to_see({"host": host}, access.token, {}) is AccessVerdict.WRONG_HOST


def test_other_names_can_be_allowed():
    access = Access(hosts=("hub.example.edu",))
    assert access.to_see({"host": "hub.example.edu:443"}, access.token, {}) is AccessVerdict.GRANTED
    assert access.to_see({"host": "evil.example"}, access.token, {}) is AccessVerdict.WRONG_HOST


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "http://127.0.0.1:9000",
        "null",
        "",
        "http://127.0.0.1:8000.evil.example",
        "http://[",
        "http://[x]",
    ],
)
def test_other_origins_are_refused(access, origin):
    assert access.to_see({**HOST, "origin": origin}, None, cookies_of(access)) is AccessVerdict.WRONG_ORIGIN
    assert access.to_change(changing(access, origin=origin), cookies_of(access)) is AccessVerdict.WRONG_ORIGIN


def test_a_change_needs_the_cookie_and_the_token_of_the_page(access):
    own = {"origin": "http://127.0.0.1:8000"}
    assert access.to_change(changing(access, **own), cookies_of(access)) is AccessVerdict.GRANTED
    assert access.to_change(changing(access, **own), {}) is AccessVerdict.NOT_SIGNED_IN
    assert access.to_change({**HOST, **own}, cookies_of(access)) is AccessVerdict.NOT_FROM_THE_PAGE
    wrong = {**HOST, **own, "x-freetrain-change": access.token}
    assert access.to_change(wrong, cookies_of(access)) is AccessVerdict.NOT_FROM_THE_PAGE
    cross = changing(access, **{"sec-fetch-site": "same-site"})
    assert access.to_change(cross, cookies_of(access)) is AccessVerdict.WRONG_ORIGIN


def test_on_a_socket_the_proxy_has_let_the_user_in_but_other_origins_change_nothing():
    access = Access(any_host=True, token_needed=False)
    behind = {"host": "localhost", "x-forwarded-host": "hub.example.edu"}
    assert access.to_see(behind, None, {}) is AccessVerdict.GRANTED
    header = {"x-freetrain-change": access.change_token}
    assert access.to_change({**behind, **header, "origin": "https://hub.example.edu"}, {}) is AccessVerdict.GRANTED
    assert access.to_change({**behind, **header, "origin": "https://evil.example"}, {}) is AccessVerdict.WRONG_ORIGIN
    assert access.to_change(behind, {}) is AccessVerdict.NOT_FROM_THE_PAGE
