"""Parsl's own test suite, run on a `FreeTrainExecutor`: ordinary apps behave as on Parsl's executors."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import parsl
import pytest

pytestmark = pytest.mark.cluster

_PARTS = (
    "test_python_apps",
    "test_bash_apps",
    "test_error_handling",
    "test_staging",
    "test_callables.py",
    "test_checkpointing",
    "test_serialization",
)
# They download from the internet, or expect that a directory cannot be created, which root always can.
# In the last one, a timer of 5 ms may fire while it is being started, outside of what the test expects it in.
_ELSEWHERE = (
    "not https and not ftp and not docs and not bad_stdout_file and not bad_stderr_file"
    " and not test_timeout_after_exception"
)


def test_parsls_own_suite_passes(tmp_path: Path) -> None:
    suite = Path(parsl.__file__).parent / "tests"
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-c", "pytest.ini", "--rootdir", ".", "-p", "no:cacheprovider"]
    command += ["-W", "ignore"]  # Parsl's conftest uses what pytest 9 removes
    command += [str(suite / part) for part in _PARTS]
    command += ["--config", str(Path(__file__).with_name("parsl_suite_config.py")), "-k", _ELSEWHERE]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    summary = done.stdout.strip().splitlines()[-1]
    passed = re.search(r"(\d+) passed", summary)
    assert passed is not None, summary
    assert int(passed[1]) >= 100, summary
