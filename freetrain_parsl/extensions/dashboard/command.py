"""``freetrain dashboard``: serves the live page of a run."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Annotated

import typer

from freetrain_parsl.campaign.run_source import open_source
from freetrain_parsl.cli.runs.run_directory import RunDirectory
from freetrain_parsl.cli.sources import errors_in_one_line
from freetrain_parsl.extensions.dashboard.server import ServerOptions, serve
from freetrain_parsl.screen import say

__all__ = ["dashboard"]


def dashboard(
    run_dir: RunDirectory = None,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port on the loopback interface. Default: a free one.")
    ] = 0,
    socket: Annotated[
        Path | None, typer.Option("--socket", metavar="PATH", help="Serve on a Unix socket, private to you, instead.")
    ] = None,
    no_token: Annotated[
        bool, typer.Option("--no-token", help="Need no token; with --socket only, whose file protects the page.")
    ] = False,
    prefix: Annotated[
        str, typer.Option("--prefix", metavar="PATH", help="Path of a proxy that does not remove it from requests.")
    ] = "",
    allow_host: Annotated[
        list[str] | None,
        typer.Option("--allow-host", metavar="NAME", help="Name under which a proxy is reached; may be repeated."),
    ] = None,
) -> None:
    """Serve a page that shows a run, live or afterwards, to your browser only."""
    with errors_in_one_line("dashboard"):
        hosts = tuple(name.lower() for name in allow_host or ())
        options = ServerOptions(port=port, path=socket, prefix=prefix, hosts=hosts, token_needed=not no_token)
        source = open_source(_newest_run() if run_dir is None else run_dir)
        for line in source.notes:
            say(line, err=True)
        serve(source, options, lambda address: _print(source.directory, address))


def _newest_run() -> Path:
    from freetrain_parsl.campaign.directories import find_run

    return find_run(None)


def _print(directory: Path, address: str) -> None:
    say(f"serving the page of {directory}; press Ctrl-C to stop:", "", f"    {address}", "")
    port = address.removeprefix("http://127.0.0.1:").partition("/")[0]
    if port.isdecimal():
        say(f"From another machine: ssh -L {port}:127.0.0.1:{port} {platform.node()}, then open the same address.")
