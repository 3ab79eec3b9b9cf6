"""Short chaos episodes pass; `make chaos` runs any number of others."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("seeds", "episodes"), [pytest.param("1-2", 2, marks=pytest.mark.smoke), ("3-6", 4), ("7-10", 4), ("11-14", 4)]
)
def test_trainings_under_seeded_faults_lose_and_repeat_no_sample(seeds, episodes, tmp_path):
    command = [sys.executable, "-m", "tests.support.chaos", "bare", seeds, "--short"]
    done = subprocess.run([*command, "--directory", tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": ok") == episodes
