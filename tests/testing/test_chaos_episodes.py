"""Twenty short chaos episodes pass."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.cluster
@pytest.mark.parametrize("seeds", ["1-5", "6-10", "11-15", "16-20"])
def test_trainings_under_seeded_faults_lose_and_repeat_no_sample(seeds, tmp_path):
    command = [sys.executable, "-m", "tests.support.chaos", "bare", seeds, "--short"]
    done = subprocess.run([*command, "--directory", tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": ok") == 5
