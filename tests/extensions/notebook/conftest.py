"""What the tests with kernels share."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING

import pytest
from jupyter_core.utils import ensure_event_loop

from tests.processes import marked

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def event_loop_closed() -> Iterator[None]:
    """Close the event loop that Jupyter's blocking functions make in this thread, and leave open."""
    yield
    loop = ensure_event_loop()
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    asyncio.set_event_loop(None)


@pytest.fixture
def mark() -> Iterator[str]:
    """Mark the processes of a test, and end those that are left."""
    mark = uuid.uuid4().hex
    yield mark
    for process in marked(mark):
        process.kill()
