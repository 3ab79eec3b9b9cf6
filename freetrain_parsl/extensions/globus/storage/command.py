"""``freetrain globus``: the Globus login, with which checkpoints are copied and sites are called."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from freetrain_parsl.cli.sources import errors_in_one_line
from freetrain_parsl.screen import say

__all__ = ["globus"]

globus = typer.Typer(
    help="Log in to Globus, which copies checkpoints between sites and calls sites.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@globus.command()
def login(
    config: Annotated[
        str | None,
        typer.Option(metavar="SITE", help="Site file: also consent to the use of its collections, if they need it."),
    ] = None,
) -> None:
    """Log in by a URL that is printed. Tokens are kept in your home directory, readable by you only."""
    from freetrain_parsl.campaign.site.site import Site
    from freetrain_parsl.extensions.globus.remote.compute import compute_app
    from freetrain_parsl.extensions.globus.storage.collections import Collections
    from freetrain_parsl.extensions.globus.storage.home import GlobusHome
    from freetrain_parsl.extensions.globus.storage.login import CLIENT_ID, log_in, make_app, whoami

    if config is None and not os.environ.get(CLIENT_ID):
        with errors_in_one_line("globus login"), compute_app() as app:
            log_in(app)
            say(f"logged in to Globus Compute; checkpoints on Globus need {CLIENT_ID}, and a login with it")
        return
    with errors_in_one_line("globus login"), make_app(compute=True) as app:
        home = None if config is None else Site.load(config).home
        log_in(app)
        for place in (home.settings.local, home.settings.home) if isinstance(home, GlobusHome) else ():
            scopes = Collections(app).required_scopes(place.collection, place.path)
            if scopes:
                say(f"collection {place.collection} needs a consent of its own")
                log_in(app, scopes)
        say(f"logged in as {whoami(app)}")


@globus.command()
def logout() -> None:
    """Revoke the tokens and remove them."""
    from freetrain_parsl.extensions.globus.remote.compute import compute_app
    from freetrain_parsl.extensions.globus.storage.login import CLIENT_ID, make_app

    with (
        errors_in_one_line("globus logout"),
        make_app(compute=True) if os.environ.get(CLIENT_ID) else compute_app() as app,
    ):
        app.logout(sweep=True)
        say("logged out")


@globus.command("whoami")
def whoami_() -> None:
    """Show which identity is logged in."""
    from freetrain_parsl.extensions.globus.storage.login import logged_in, make_app, whoami

    with errors_in_one_line("globus whoami"), logged_in(make_app()) as app:
        say(whoami(app))
