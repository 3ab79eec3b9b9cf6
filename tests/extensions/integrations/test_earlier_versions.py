"""The tests of the trainers, with the first versions of these that are supported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("packages", "files", "selection"),
    [
        (["accelerate==1.10.1"], ["test_accelerate.py"], "one_process or restart or leave_and_join or dies"),
        (
            ["transformers==4.57.6", "huggingface_hub==0.36.2", "tokenizers==0.22.2"],
            ["test_huggingface.py"],
            "(one_process or restart or leave_and_join or dies) and (classifier or accumulated)",
        ),
        (
            ["lightning==2.4.0"],
            ["test_lightning.py", "test_fabric.py"],
            "(one_process or restart or leave_and_join or killed) and accumulated or signals",
        ),
    ],
    ids=["accelerate", "transformers", "lightning"],
)
def test_an_earlier_version_trains_alike(tmp_path, packages, files, selection):
    """Its tests pass with it, in other processes; what it needs is that of the installed version."""
    directory = tmp_path / "packages"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--no-deps", "--ignore-installed"]
    installed = subprocess.run(
        [*pip, "--prefix", directory, *packages], capture_output=True, text=True, timeout=120, check=False
    )
    if installed.returncode:
        pytest.skip(f"{packages[0]} cannot be installed: {installed.stderr.strip().splitlines()[-1]}")
    name, _, version = packages[0].partition("==")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        *(HERE / file for file in files),
        "-k",
        selection,
    ]
    # Its processes keep what the first of them compiles.
    environment = {**os.environ, "FREETRAIN_TESTS_PACKAGES": str(directory), "PYTHONDONTWRITEBYTECODE": ""}
    result = subprocess.run(
        command, env=environment, cwd=HERE.parents[1], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stdout[-3000:]
    assert f"{name} {version}" in result.stdout
