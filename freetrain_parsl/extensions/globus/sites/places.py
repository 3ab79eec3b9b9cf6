"""Where the calls of a coordinator go: to an endpoint of Globus Compute, or to this machine."""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING, Any, Protocol

from freetrain_parsl.campaign.launch import KEEP
from freetrain_parsl.errors import RemoteError
from freetrain_parsl.extensions.globus.remote.messages import checked_answer
from freetrain_parsl.extensions.globus.remote.verbs import DIRECTORY
from freetrain_parsl.extensions.globus.storage.login import CLIENT_SECRET
from freetrain_parsl.interpreters import script_command

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["LocalPlace", "SitePlace"]

_ANSWER = (
    "import json, sys\n"
    "from freetrain_parsl.extensions.globus.remote.verbs import answer\n"
    "json.dump(answer(json.load(sys.stdin)), sys.stdout)\n"
)


class SitePlace(Protocol):
    """Something that answers the verbs of `extensions.globus.remote.verbs`, such as a `ComputeEndpoint`."""

    def call(self, request: Mapping[str, Any], timeout: float = ...) -> dict[str, Any]:
        """Call a verb and wait for its answer.

        Raises
        ------
        InvalidInput
            The site refuses the request.
        RemoteError
            It did not answer in time, or failed.
        """


class LocalPlace:
    """A site on this machine, with runs in a directory: each call is a short process of its own, as at an endpoint."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def call(self, request: Mapping[str, Any], timeout: float = 120.0) -> dict[str, Any]:
        """Call a verb; see `SitePlace.call`."""
        # The mover of the driver logs in with them; it removes the secret before it starts jobs.
        kept = [CLIENT_SECRET, *(name for name in os.environ if name.startswith("GLOBUS_SDK_"))]
        environment = {
            **os.environ,
            DIRECTORY: str(self._directory),
            KEEP: ",".join(filter(None, [os.environ.get(KEEP), *kept])),
        }
        try:
            done = subprocess.run(
                script_command(_ANSWER),
                input=json.dumps(request),
                env=environment,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout,
                check=False,
                start_new_session=True,  # Ctrl-C is the coordinator's
            )
        except subprocess.TimeoutExpired:
            raise RemoteError(f"no answer within {timeout:.0f} s") from None
        try:
            document = json.loads(done.stdout)
        except ValueError:
            lines = done.stderr.strip().splitlines() or [f"it exited with code {done.returncode}"]
            raise RemoteError(f"the call failed on this machine: {lines[-1][:500]}") from None
        return checked_answer(document)
