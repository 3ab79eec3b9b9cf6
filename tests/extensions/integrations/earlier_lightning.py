"""The first version of Lightning that is supported, in a directory of its own, and tests that run with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

VERSION = "2.4.0"


def run_with_it(directory: Path, file: str, selection: str) -> None:
    """Install it, without what it needs, which is here, and run some tests of a file."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--no-deps", "--target", str(directory)]
    installed = subprocess.run([*pip, f"lightning=={VERSION}"], capture_output=True, text=True, timeout=120)
    if installed.returncode:
        pytest.skip(f"lightning {VERSION} cannot be installed: {installed.stderr.strip().splitlines()[-1]}")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file, "-k", selection],
        env={**os.environ, "PYTHONPATH": str(directory), "FREETRAIN_LIGHTNING": VERSION},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout[-3000:]


def check_version(version: str) -> None:
    """Check that this process has the version that it is to test."""
    assert version.startswith(os.environ.get("FREETRAIN_LIGHTNING", "2.6"))
