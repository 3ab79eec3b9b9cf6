"""The verbs of the ``freetrain`` command, each from its own module."""

from __future__ import annotations

import typer

from freetrain_parsl import __version__
from freetrain_parsl.cli.allocate import allocate
from freetrain_parsl.cli.cancel import cancel
from freetrain_parsl.cli.checkpoints import checkpoints
from freetrain_parsl.cli.clean import clean
from freetrain_parsl.cli.demo import demo
from freetrain_parsl.cli.explain import explain
from freetrain_parsl.cli.logs import logs
from freetrain_parsl.cli.plan import plan
from freetrain_parsl.cli.replay import replay
from freetrain_parsl.cli.resume import resume
from freetrain_parsl.cli.run import run
from freetrain_parsl.cli.simulate import simulate
from freetrain_parsl.cli.status import status
from freetrain_parsl.cli.stop import stop
from freetrain_parsl.cli.windows import windows

__all__ = ["app"]

app = typer.Typer(
    name="freetrain",
    help="Train neural networks on the idle nodes of a cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command()(run)
app.command()(status)
app.command()(logs)
app.command()(stop)
app.command()(cancel)
app.command()(resume)
app.command()(clean)
app.command()(replay)
app.command()(simulate)
app.command()(windows)
app.command()(plan)
app.command()(explain)
app.command()(allocate)
app.add_typer(checkpoints, name="checkpoints")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"freetrain {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    pass
