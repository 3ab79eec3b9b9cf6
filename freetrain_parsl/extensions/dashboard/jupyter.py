"""The page in Jupyter's launcher, through jupyter-server-proxy."""

from __future__ import annotations

from typing import Any

__all__ = ["server_proxy"]


def server_proxy() -> dict[str, Any]:
    """Return the entry for jupyter-server-proxy: the newest run in the directory where the Jupyter server was started.

    The proxy makes a Unix socket in a private directory, and lets only the Jupyter server's user in.
    """
    return {
        "command": ["freetrain", "dashboard", "--socket", "{unix_socket}", "--no-token"],
        "unix_socket": True,
        "timeout": 30,
        "launcher_entry": {"title": "FreeTrain", "enabled": True},
    }
