"""All tests here need root, iproute2, and a kernel with network namespaces."""

from __future__ import annotations

import os

import pytest

from freetrain_parsl.testing.hosts import Hosts
from tests.conftest import REQUIRED


@pytest.fixture(scope="session", autouse=True)
def hosts_are_here() -> None:
    """Skip where this machine cannot have hosts, and say what is missing; fail instead where they are required."""
    missing = Hosts.missing()
    if missing is not None and "hosts" in os.environ.get(REQUIRED, "").split(","):
        pytest.fail(missing)
    if missing is not None:
        pytest.skip(missing)
