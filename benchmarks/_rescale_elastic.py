"""torchrun's side of `rescale`: agents of one worker each, which join and leave."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

from _rescale_net import Pause, pause_between, read_marks, wait_for_steps

SCRIPT = Path(__file__).with_name("_rescale_torchrun.py")
# torch 2.13: an agent that joins later waits for an address that the first one set only in an earlier round, and the
# training ends after a minute; this is torchrun's own workaround. By default a rendezvous waits 30 s for more agents to
# join, which would dominate the measurement.
SETTINGS = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
LAST_CALL_SECONDS = 1


def measure_torchrun(directory: Path, sizes: list[int], steps: int) -> list[Pause]:
    """Change the number of agents step by step through `sizes`, and measure each change."""
    pauses = []
    port = _free_port()
    with ExitStack() as agents_end:
        agents: list[subprocess.Popen[bytes]] = []

        def resize(size: int) -> None:
            while len(agents) < size:
                agents.append(agents_end.enter_context(_Agent(directory, port, max(sizes))))
            for agent in agents[size:]:
                agent.send_signal(signal.SIGTERM)
            for agent in agents[size:]:
                agent.wait(60)
            del agents[size:]

        since = time.monotonic()
        resize(sizes[0])
        wait_for_steps(directory, sizes[0], steps, since)
        for before, after in pairwise(sizes):
            ordered = time.monotonic()
            resize(after)
            wait_for_steps(directory, after, steps, ordered)
            pauses.append(pause_between(read_marks(directory, since), before, after))
            since = ordered
    return pauses


class _Agent(subprocess.Popen[bytes]):
    """One agent, which ends with the block; its own output is next to its workers' logs."""

    def __init__(self, directory: Path, port: int, most: int) -> None:
        with (directory / f"agent-{time.monotonic_ns()}").open("wb") as output:
            super().__init__(
                [
                    *(sys.executable, "-m", "torch.distributed.run"),
                    *(f"--nnodes=1:{most}", "--nproc-per-node=1", "--max-restarts=20"),
                    *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=rescale"),
                    *(f"--rdzv-conf=last_call_timeout={LAST_CALL_SECONDS}", "--local-addr=127.0.0.1"),
                    *(str(SCRIPT), str(directory)),
                ],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **SETTINGS},
            )

    def __exit__(self, *error: object) -> None:
        self.terminate()
        try:
            self.wait(60)
        finally:
            self.kill()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
