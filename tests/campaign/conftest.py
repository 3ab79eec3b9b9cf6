"""The shell of the tests of whole campaigns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from freetrain_parsl.cluster.client import EmbeddedCluster
from tests.campaign.cluster_shell import ClusterShell

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[ClusterShell]:
    """Make a shell and its cluster of two nodes."""
    with EmbeddedCluster(tmp_path / "cluster", nodes=2) as cluster:
        shell = ClusterShell(cluster, tmp_path)
        yield shell
        shell.close()
