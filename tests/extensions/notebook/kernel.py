"""Notebooks in a real kernel, cell by cell, as a person runs them."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

from tests.processes import MARK

if TYPE_CHECKING:
    from pathlib import Path

    from nbformat import NotebookNode


class Notebook:
    """A notebook with a kernel of its own.

    Parameters
    ----------
    directory
        Working directory of the kernel.
    mark
        Marks the kernel's processes and all that they start.
    """

    def __init__(self, directory: Path, mark: str) -> None:
        self.book = new_notebook()
        self._client = NotebookClient(
            self.book, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(directory)}}
        )
        self._client.create_kernel_manager()
        self._client.start_new_kernel(env={**os.environ, MARK: mark, "JUPYTER_TOKEN": "a-secret-of-the-server"})
        self._client.start_new_kernel_client()

    def run(self, source: str) -> NotebookNode:
        """Run a cell that succeeds and return it, with its outputs, which continue changing."""
        cell = new_code_cell(source)
        self.book.cells.append(cell)
        self._client.execute_cell(cell, len(self.book.cells) - 1)
        return cell

    def fail(self, source: str) -> str:
        """Run a cell that ends with an error and return what the notebook shows of it."""
        cell = new_code_cell(source, metadata={"tags": ["raises-exception"]})
        self.book.cells.append(cell)
        self._client.execute_cell(cell, len(self.book.cells) - 1)
        return "\n".join(line for output in cell.outputs if output.output_type == "error" for line in output.traceback)

    def interrupted(self, source: str, after: float) -> str:
        """Run a cell, interrupt the kernel meanwhile, as by the button, and return the error that is shown."""
        interrupter = threading.Thread(target=self._interrupt, args=(after,))
        interrupter.start()
        try:
            return self.fail(source)
        finally:
            interrupter.join()

    def _interrupt(self, after: float) -> None:
        time.sleep(after)
        os.killpg(os.getpgid(self._client.km.provisioner.pid), signal.SIGINT)  # as jupyter_client does, without a loop

    def restart(self) -> None:
        """Restart the kernel, as by the button: it is killed, with its process group."""
        self._client._cleanup_kernel()
        self._client.create_kernel_manager()
        self._client.start_new_kernel()
        self._client.start_new_kernel_client()

    def close(self) -> None:
        """Shut the kernel down."""
        self._client._cleanup_kernel()


def text_of(cell: NotebookNode) -> str:
    """Return all plain text of a cell's outputs."""
    return "\n".join(_text(output) for output in cell.outputs)


def _text(output: Any) -> str:
    return output.text if output.output_type == "stream" else output.get("data", {}).get("text/plain", "")
