"""The nodes' Python: from a second environment, from a container, with the wrong version."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from typing import TYPE_CHECKING

import parsl
import pytest
from parsl.config import Config

from freetrain_parsl import FreeTrainExecutor, training_app
from freetrain_parsl.errors import BatchSystemError
from freetrain_parsl.executor.htex.launch import Container
from tests.batch_systems.backends import WORKER_INIT, Slurm
from tests.batch_systems.driving import PLANNER

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slurm

FAKE_APPTAINER = """#!/bin/sh
# Runs the command without an image; the environment is marked as Apptainer's.
[ "$1" = exec ] || exit 2
shift
echo "$@" > "$FAKE_APPTAINER_CALLED"
while [ "${1#-}" != "$1" ]; do shift; done
export APPTAINER_CONTAINER="$1"
shift
exec "$@"
"""


@training_app(max_nodes=1)
def where(session) -> dict[str, str]:
    """Train for one batch, and return the Python."""
    import os
    import sys

    import torch

    model, _ = session.prepare(torch.nn.Linear(1, 1), torch.optim.SGD, lr=0.1)
    loader = session.loader(torch.utils.data.TensorDataset(torch.ones(4, 1)), batch_size=4)
    for _ in session.epochs(1):
        for (x,) in loader:
            session.step(model(x).mean())
    return {"prefix": sys.prefix, "container": os.environ.get("APPTAINER_CONTAINER", "")}


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Path:
    """Make a second virtual environment with the packages of the tests' environment, but its own interpreter."""
    directory = tmp_path_factory.mktemp("second") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True)
    packages = next(directory.glob("lib/python*/site-packages"))
    (packages / "first.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    return directory


@pytest.fixture
def load(cluster, tmp_path):
    """Load Parsl with an environment activated on the nodes; Parsl is cleaned up at the end."""

    def load(worker_init: str, **settings) -> None:
        provider = Slurm(cluster).provider()
        provider.worker_init = f"{WORKER_INIT}\n{worker_init}"
        executor = FreeTrainExecutor(provider=provider, address="127.0.0.1", planner=PLANNER, **settings)
        parsl.load(Config(executors=[executor], run_dir=str(tmp_path / "runinfo"), initialize_logging=False))

    yield load
    parsl.dfk().cleanup()
    parsl.clear()


def test_a_name_is_the_python_that_worker_init_activates(load, environment) -> None:
    load(f"source {environment}/bin/activate", node_python="python")
    assert where().result(timeout=240)["prefix"] == str(environment)


def test_without_a_name_the_nodes_run_the_drivers_interpreter_whatever_is_activated(load, environment) -> None:
    load(f"source {environment}/bin/activate")
    assert where().result(timeout=240)["prefix"] == sys.prefix


def test_a_container_runs_the_worker_pool_and_sees_run_directory_and_checkpoints(load, environment, tmp_path) -> None:
    """With a fake Apptainer: the real one cannot be installed here."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "apptainer").write_text(FAKE_APPTAINER)
    (programs / "apptainer").chmod(0o755)
    image = tmp_path / "torch.sif"
    load(
        f"export PATH={programs}:$PATH FAKE_APPTAINER_CALLED={tmp_path}/called",
        node_python=f"{environment}/bin/python",
        container=Container(str(image), options=("--nv",)),
        checkpoint_dir=tmp_path / "checkpoints",
    )
    told = where().result(timeout=240)
    assert told == {"prefix": str(environment), "container": str(image)}
    called = (tmp_path / "called").read_text()
    for word in ("--nv", f"--bind={tmp_path}/checkpoints", f"--bind={tmp_path}/runinfo/000"):
        assert f"{word} " in called


def test_a_node_with_other_versions_ends_the_run_with_one_line_before_anything_trains(load, environment) -> None:
    """Its environment has metadata of another Parsl before the real one."""
    (packages,) = environment.glob("lib/python*/site-packages")
    fake = packages / "parsl-2020.1.1.dist-info"
    fake.mkdir()
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: parsl\nVersion: 2020.1.1\n")
    load(f"source {environment}/bin/activate", node_python="python")
    future = where()
    with pytest.raises(BatchSystemError) as caught:
        future.result(timeout=240)
    message = str(caught.value)
    assert "\n" not in message
    for part in ("node node0", "parsl 2020.1.1 (driver: ", str(environment), "set `node.python`"):
        assert part in message
