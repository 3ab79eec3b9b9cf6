"""A cluster, and a crew of processes for the trainers' tests, which may run with other versions of the trainers.

``FREETRAIN_TESTS_PACKAGES`` names a directory with these, as ``pip install --prefix DIR`` makes it::

    pip install --no-deps --ignore-installed --prefix /tmp/older accelerate==1.10.1
    FREETRAIN_TESTS_PACKAGES=/tmp/older python -m pytest tests/extensions/integrations
"""

from __future__ import annotations

import os
import site
import sys
from pathlib import Path

# The processes of the crew import the helper modules of these folders by name; they inherit sys.path.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "training")]
if packages := os.environ.get("FREETRAIN_TESTS_PACKAGES"):
    site.PREFIXES.append(packages)  # what is installed is no code of the user's training
    sys.path[:0] = site.getsitepackages([packages])
    # For the process that the crew is forked from.
    os.environ["PYTHONPATH"] = os.pathsep.join([*site.getsitepackages([packages]), os.environ.get("PYTHONPATH", "")])

from importlib.metadata import version  # noqa: E402 - after the path
from typing import TYPE_CHECKING  # noqa: E402 - after the path

import pytest  # noqa: E402 - the same
import torch  # noqa: E402 - the same
from crew import Crew  # noqa: E402 - the same
from warm_processes import forked_warm  # noqa: E402 - the same

from tests.executor.conftest import start  # noqa: E402 - the same

__all__ = ["_one_thread", "crew", "start"]

if TYPE_CHECKING:
    from collections.abc import Iterator


def pytest_report_header() -> str:
    """Show the versions that are tested."""
    return ", ".join(f"{name} {version(name)}" for name in ("transformers", "accelerate", "lightning", "optuna"))


@pytest.fixture(scope="session")
def crew() -> Iterator[Crew]:
    trainers = ("accelerate", "lightning.pytorch", "transformers.trainer")
    crew = Crew(forked_warm(*(name for name in trainers if name in sys.modules)))  # those of the collected tests
    yield crew
    crew.close()


@pytest.fixture(autouse=True)
def _own_precision() -> Iterator[None]:
    """Remove what TrainingArguments before version 5 leaves in the environment."""
    yield
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Fix the order of sums, whatever the machine's number of cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
