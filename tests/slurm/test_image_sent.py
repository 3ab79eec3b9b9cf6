"""The image of the environment is sent to the nodes of a block by a real Slurm."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from freetrain_parsl.extensions.staging.start import ImageStart
from tests.extensions.staging.test_driver_side import made_in

if TYPE_CHECKING:
    from tests.support.slurm.loopback import LoopbackSlurm

pytestmark = pytest.mark.slurm


def test_sbcast_leaves_the_image_where_the_node_looks_for_it(cluster: LoopbackSlurm, monkeypatch) -> None:
    """Whole, and private to the user; here, all nodes are one host, so that the last one has written it."""
    data = os.urandom(3 << 20)
    digest = hashlib.sha256(data).hexdigest()
    image = cluster.work / f"image-{digest}.tar.gz"
    image.write_bytes(data)
    image.chmod(0o600)
    (cluster.work / "env/lib").mkdir(parents=True, exist_ok=True)
    (cluster.work / "env/lib/a.py").touch()
    start = ImageStart("always", "/usr/bin/python3")
    start._made = replace(made_in(cluster.work), path=image)
    there = Path(f"/tmp/freetrain-{os.getuid()}-{image.name}")
    told = cluster.work / "told"
    job = cluster.submit(
        "--nodes=3", command=f"{start.preparation(3, 'slurm')}; srun -N3 stat -c '%u %a %s' {there} > {told}"
    )
    try:
        cluster.wait_for_state(job, "COMPLETED")
        assert told.read_text().split("\n") == [f"{os.getuid()} 600 {len(data)}"] * 3 + [""]
        assert hashlib.sha256(there.read_bytes()).hexdigest() == digest
    finally:
        there.unlink(missing_ok=True)
