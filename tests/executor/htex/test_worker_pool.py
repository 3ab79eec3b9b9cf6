"""The worker pool: workers are forked from one server, which has imported everything and uses no accelerator."""

from __future__ import annotations

import subprocess
import sys

import pytest

from freetrain_parsl import training_app
from freetrain_parsl.executor.htex.worker_pool import WARM_IMPORTS


@pytest.mark.cluster
@pytest.mark.cold
def test_workers_are_forked_warm_and_see_the_wall_clock(start):
    start(nodes=1)

    @training_app
    def report(session):
        import multiprocessing
        import time

        return {"process": type(multiprocessing.current_process()).__name__, "clock": type(time.time).__name__}

    assert report().result(timeout=120) == {"process": "ForkServerProcess", "clock": "builtin_function_or_method"}


_IMPORT_ALL = """
import gc, importlib, sys, threading
for name in sys.argv[1:]:
    importlib.import_module(name)
import torch
before = set(sys.modules)
torch.optim.SGD([torch.zeros(1)], lr=1.0)
print(threading.active_count(), torch.cuda.is_initialized(), gc.isenabled(), *set(sys.modules) - before)
"""


@pytest.mark.slow
def test_what_is_imported_starts_no_threads_and_suffices_for_the_first_step():
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT_ALL, WARM_IMPORTS], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == ["1", "False", "True"], done.stderr


_IMPORT_HTEX = """
import sys
from freetrain_parsl.executor.htex import interchange, worker_pool
from freetrain_parsl.executor.slot import pilot
worker_pool.import_lean_parsl()
import parsl.executors.high_throughput.interchange, parsl.executors.high_throughput.process_worker_pool
print(*{"torch", "numpy"} & set(sys.modules))
"""


def test_pilot_pool_and_interchange_import_no_torch():
    """A node's pool connects while the server of its slots imports it."""
    done = subprocess.run([sys.executable, "-c", _IMPORT_HTEX], capture_output=True, text=True, timeout=120)
    assert (done.stdout.strip(), done.stderr) == ("", "")


@pytest.mark.gpu
def test_a_process_that_is_forked_from_the_server_can_use_the_accelerator():
    import torch

    if not torch.cuda.is_available():
        pytest.skip("there is no GPU (or no -m gpu)")
    script = (
        "import multiprocessing, sys, torch\n"
        "context = multiprocessing.get_context('forkserver')\n"
        "context.set_forkserver_preload(sys.argv[1:])\n"
        "with context.Pool(1) as pool:\n"
        "    print(pool.apply(torch.ones, (1,), {'device': 'cuda'}).item())"
    )
    done = subprocess.run([sys.executable, "-c", script, WARM_IMPORTS], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "1.0", done.stderr


_SCRIPT = """
import sys
from freetrain_parsl.executor.htex.worker_pool import import_lean_parsl
import_lean_parsl()
import freetrain_parsl.executor.executor
print(*{"parsl", "globus_compute_sdk", "sqlalchemy"} & set(sys.modules))
import globus_compute_sdk, sqlalchemy
print(sqlalchemy.create_engine("sqlite://").name)
"""


def test_optional_packages_are_imported_only_by_user_code():
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["parsl", "sqlite"]
