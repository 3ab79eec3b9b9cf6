"""All tests here need root, iproute2, and a kernel with network namespaces."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.conftest import REQUIRED
from tests.hosts.login import Login
from tests.support.hosts import Hosts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(scope="session", autouse=True)
def hosts_are_here() -> None:
    """Skip with the missing requirements if this machine cannot have hosts; fail if they are required."""
    missing = Hosts.missing()
    if missing is not None and "hosts" in os.environ.get(REQUIRED, "").split(","):
        pytest.fail(missing)
    if missing is not None:
        pytest.skip(missing)


@pytest.fixture(scope="module")
def start(tmp_path_factory, warm_start) -> Iterator[Callable[..., Login]]:
    """Start a driver on the host ``login`` of these hosts; it ends with the module's last test.

    The nodes of an embedded cluster are forked from the suite's warm start server, into the namespaces of their hosts.
    """
    started: list[Login] = []

    def on(hosts: Hosts, **settings) -> Login:
        environment = {**(settings.pop("environment", None) or os.environ), **warm_start.environment}
        started.append(Login(hosts, tmp_path_factory.mktemp("login"), environment=environment, **settings))
        return started[-1]

    yield on
    for login in started:
        login.close()
