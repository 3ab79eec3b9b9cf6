"""Short chaos episodes pass; `make chaos` runs any number of others."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("kind", "seeds", "episodes"),
    [
        pytest.param("bare", "1-2", 2, marks=pytest.mark.smoke),
        ("bare", "3-6", 4),
        ("shared", "1-2", 2),
    ],
)
def test_trainings_under_seeded_faults_lose_and_repeat_no_sample(kind, seeds, episodes, tmp_path):
    command = [sys.executable, "-m", "tests.support.chaos", kind, seeds, "--short"]
    done = subprocess.run([*command, "--directory", tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": ok") == episodes
