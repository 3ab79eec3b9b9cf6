"""The start of a node, from its job script to a job's first step, on a shared file system that is more or less slow.

Use ``--latencies MS…`` for the times that each metadata operation takes, ``--image off auto``, ``--unpacks yes no``,
``--json FILE`` to save the rows. As root: the environment, the interpreter that it was made from and this checkout are
covered by a FUSE passthrough under their own names, in a mount namespace of this process only. It counts lookups,
opens, links and listings (``shared_tree_calls``) from the job script to the first step. The kernel keeps names for
30 s and attributes for 3 s, as with NFS; with ``--keep SECONDS``, both for one time, so that the number of calls does
not depend on how long a start takes. All names are forgotten before each start. The file system is slow for the nodes
only, and only their calls are counted: those of the driver's session meanwhile (``driver_calls``) may have spared as
many. Rows: nodes without an image, with one that they unpack first, and with one that another block has unpacked
(``unpacks`` false). The app imports scikit-learn. Seconds, of one run unless ``--repeat`` says otherwise: then medians.

The phases of a start, one after the other: ``scheduler`` (from the request of the block to its script), ``pilot``
(until it starts the pool; unpacking is part of it), ``pool`` (until it starts the server of its slots), ``imports`` (of
the server, until it forks a slot), ``hello`` (until the driver knows the slot), ``assigned`` (until the function is
called), ``own_imports`` (of the function), ``group`` (until its loop begins) and ``step``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import parsl
from _report import report
from parsl.config import Config

from freetrain_parsl import EmbeddedClusterProvider, FreeTrainExecutor, PlannerSettings, RateLimits, training_app
from freetrain_parsl.executor.journal import read_kinds
from freetrain_parsl.executor.payloads.payloads import pack_training
from freetrain_parsl.location import PACKAGE
from freetrain_parsl.protocol.journal import BlockRequested, SlotJoined

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' slow file system
from tests.support.slowfs import LIKE_NFS, SlowTrees, missing_for_slowfs

if TYPE_CHECKING:
    from collections.abc import Callable

INSIDE = "--inside"
READY = 300.0  # seconds for an image
PLANNER = PlannerSettings(settle=timedelta(0), idle_timeout=timedelta(seconds=1), replan_interval=timedelta(seconds=1))


@training_app(max_nodes=1)
def first_step(session: Any, run: int) -> dict[str, float]:  # noqa: ARG001 - each call is a job of its own
    """Make a step; return when the function was called, had its imports and has made the step."""
    import os
    import time
    from pathlib import Path

    called = time.time()
    import psutil
    import torch
    from sklearn.datasets import load_digits
    from torch.utils.data import TensorDataset

    x, y = load_digits(return_X_y=True)
    imported = time.time()
    model, _ = session.prepare(torch.nn.Linear(64, 10), torch.optim.SGD, lr=0.1)
    data = session.loader(TensorDataset(torch.tensor(x[:100], dtype=torch.float32), torch.tensor(y[:100])), 50)
    first = 0.0
    slot, server, pool, *_ = psutil.Process().parents()  # this process is forked from the slot's place
    booted = time.time() - float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    shift = booted - psutil.boot_time()  # which the kernel tells in whole seconds
    for _ in session.epochs(1):
        begun = time.time()
        for images, labels in data:
            session.step(torch.nn.functional.cross_entropy(model(images), labels))
            first = first or time.time()
    return {
        "called": called,
        "imported": imported,
        "begun": begun,
        "first": first,
        "pool": pool.create_time() + shift,
        "server": server.create_time() + shift,
        "slot": slot.create_time() + shift,
        "image": float("FREETRAIN_IMAGE" in os.environ),
    }


def one_start(
    work: Path, trees: SlowTrees, image: str, latency: float, *, unpacks: bool, learns: bool = False
) -> dict[str, Any]:
    """Start one node and one job; return a row. The run that learns what the next image has is not to be counted."""
    script = work / "script"
    script.unlink(missing_ok=True)
    provider = EmbeddedClusterProvider(
        nodes=1, cluster_dir=str(work / "cluster"), worker_init=f"date +%s.%N > {script}"
    )
    executor = FreeTrainExecutor(
        provider=provider,
        planner=PLANNER,
        rate_limits=RateLimits(poll_interval=timedelta(seconds=0.5)),
        checkpoint_dir=work / "checkpoints",
        node_image=image,
    )
    config = Config(executors=[executor], run_dir=str(work / "run"), strategy="none", initialize_logging=False)
    with parsl.load(config), ExitStack() as stack:
        words = _words(executor) if image != "off" else ()
        if executor.node_start is not None and not learns:
            # A run that learns may make its next image at once: by a process of its own session, which would count.
            executor.node_start.learn = lambda _: None  # type: ignore[method-assign]
        if words and not unpacks:
            holder = [*words, "/bin/sh", "-c", "echo holds; read line"]
            pipe = subprocess.PIPE
            process = stack.enter_context(subprocess.Popen(holder, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL))
            assert process.stdout is not None
            process.stdout.readline()
        _ask_where_modules_are(executor)
        trees.set_latency(latency)
        trees.reset()
        future = first_step(time.time_ns())
        done = future.result(timeout=600)
        calls, of_driver = trees.operations(), trees.exempt_operations()
        trees.set_latency(0)
        begin = float(script.read_text(encoding="utf-8"))
        joined = next(entry.time for entry in read_kinds(executor.journal_path, [SlotJoined]))
        requested = next(entry.time for entry in read_kinds(executor.journal_path, [BlockRequested]))
        assert bool(done["image"]) is bool(words), "the node has started otherwise"
        if learns:
            cache = work / "cache"
            _wait_for("the driver has not noted what the image lacks", lambda: any(cache.rglob("learned-*.json")))
    return {
        "image": image,
        "latency_ms": latency,
        "unpacks": bool(words) and unpacks,
        "shared_tree_calls": calls,
        "driver_calls": of_driver,
        "first_step_s": done["first"] - begin,
        "scheduler_s": begin - requested,
        "pilot_s": done["pool"] - begin,
        "pool_s": done["server"] - done["pool"],
        "imports_s": done["slot"] - done["server"],
        "hello_s": joined - done["slot"],
        "assigned_s": done["called"] - joined,
        "own_imports_s": done["imported"] - done["called"],
        "group_s": done["begun"] - done["imported"],
        "step_s": done["first"] - done["begun"],
    }


def _ask_where_modules_are(executor: FreeTrainExecutor) -> None:
    """Let the driver ask a new interpreter, as it does once for a function, before calls are counted."""
    imported: set[str] = set()
    pack_training(first_step.func, (0,), {}, imported)
    executor._node_modules.check(first_step.func, imported)  # noqa: SLF001 - no other way


def _words(executor: FreeTrainExecutor) -> tuple[str, ...]:
    assert executor.node_start is not None
    end = time.monotonic() + READY
    while time.monotonic() < end:
        if words := executor.node_start.words(1):
            return tuple(words)
        time.sleep(0.1)
    raise TimeoutError("there is no image of the Python environment")


def _wait_for(what: str, is_there: Callable[[], bool]) -> None:
    end = time.monotonic() + READY
    while not is_there():
        if time.monotonic() > end:
            raise TimeoutError(what)
        time.sleep(0.1)


def measure(options: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    """Measure all rows."""
    os.environ["XDG_CACHE_HOME"] = str(work / "cache")
    trees = {Path(prefix).absolute() for prefix in (sys.prefix, sys.base_prefix)}
    if Path(sysconfig.get_path("purelib")) not in PACKAGE.parents:
        trees.add(PACKAGE.parent)
    outermost = sorted(tree for tree in trees if trees.isdisjoint(tree.parents))  # each call is counted once
    rows = []
    keep = LIKE_NFS if options.keep is None else (options.keep, options.keep)
    with SlowTrees(outermost, work, os.getsid(0), keep) as slow:
        if set(options.image) - {"off"}:  # the next image has what the function has imported
            one_start(work, slow, "auto", 0.0, unpacks=True, learns=True)
        for latency in options.latencies:
            for image in options.image:
                for unpacks in (True,) if image == "off" else [choice == "yes" for choice in options.unpacks]:
                    some = [one_start(work, slow, image, latency, unpacks=unpacks) for _ in range(options.repeat)]
                    rows.append({key: _middle([row[key] for row in some]) for key in some[0]})
                    print(rows[-1], file=sys.stderr)
    return rows


def _middle(values: list[Any]) -> Any:
    return statistics.median(values) if isinstance(values[0], float) else values[len(values) // 2]


def main() -> None:
    """Parse options, go to a mount namespace, print and save the rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--latencies", type=float, nargs="+", default=[0.0, 1.0, 5.0], metavar="MS")
    parser.add_argument("--image", nargs="+", choices=("off", "auto"), default=["off", "auto"])
    parser.add_argument("--unpacks", nargs="+", choices=("yes", "no"), default=["yes", "no"])
    parser.add_argument("--keep", type=float, metavar="SECONDS")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument(INSIDE, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if missing := missing_for_slowfs():
        sys.exit(f"starts.py cannot measure here: {missing}")
    if not options.inside:
        command = [sys.executable, __file__, *sys.argv[1:], INSIDE]
        sys.exit(subprocess.run(["unshare", "--mount", "--propagation", "private", *command], check=False).returncode)
    with tempfile.TemporaryDirectory(prefix="freetrain-starts-") as work:
        rows = measure(options, Path(work))
    report("The start of a node on a shared file system", rows, ("torch", "parsl", "freetrain-parsl"), options.json)


if __name__ == "__main__":
    main()
