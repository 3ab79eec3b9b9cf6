"""Parsl is imported without packages that are not used, and user code can still import them."""

from __future__ import annotations

import subprocess
import sys

_SCRIPT = """
import sys
import freetrain_parsl.executor.htex.lean_parsl
import freetrain_parsl.executor.executor
print(*{"parsl", "globus_compute_sdk", "sqlalchemy"} & set(sys.modules))
import globus_compute_sdk, sqlalchemy
print(sqlalchemy.create_engine("sqlite://").name)
"""


def test_optional_packages_are_imported_only_by_user_code():
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["parsl", "sqlite"]
