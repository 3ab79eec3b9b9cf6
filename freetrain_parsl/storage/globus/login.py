"""The Globus login of this user: an app and token storage of the Globus SDK."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from freetrain_parsl.errors import GlobusRefused

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from globus_sdk import GlobusApp

__all__ = ["CLIENT_ID", "CLIENT_SECRET", "LOGIN", "forget_secret", "log_in", "logged_in", "make_app", "whoami"]

CLIENT_ID = "FREETRAIN_GLOBUS_CLIENT_ID"
CLIENT_SECRET = "FREETRAIN_GLOBUS_CLIENT_SECRET"  # noqa: S105 - the name of an environment variable
LOGIN = "freetrain globus login"

_APP_NAME = "freetrain"
_WHERE = "https://app.globus.org/settings/developers"


def make_app(environment: Mapping[str, str] = os.environ) -> GlobusApp:
    """Return the app of this user, or of a service account if there is a client secret. No login flow is started.

    Parameters
    ----------
    environment
        Has the client's id, and its secret if it is a service account.

    Raises
    ------
    GlobusRefused
        The extra is not installed, or there is no valid client id.
    """
    try:
        import globus_sdk
    except ImportError:
        raise GlobusRefused("the Globus SDK is not installed; run: pip install 'freetrain-parsl[globus]'") from None
    client, secret = environment.get(CLIENT_ID, ""), environment.get(CLIENT_SECRET, "")
    if not client:
        raise GlobusRefused(
            f"{CLIENT_ID} is not set; register a native app once at {_WHERE}, and export {CLIENT_ID}=<its client id>"
        )
    scopes: dict[str, Any] = {
        globus_sdk.AuthClient.scopes.resource_server: [
            globus_sdk.AuthClient.scopes.openid,
            globus_sdk.AuthClient.scopes.profile,
        ],
        globus_sdk.TransferClient.scopes.resource_server: [globus_sdk.TransferClient.scopes.all],
    }
    # A driver must never wait for a login in a terminal.
    config = globus_sdk.GlobusAppConfig(
        token_storage="json",  # noqa: S106 - the SDK's file in the home directory, mode 0600
        request_refresh_tokens=not secret,
        token_validation_error_handler=None,
    )
    if secret:
        return globus_sdk.ClientApp(
            _APP_NAME, client_id=client, client_secret=secret, scope_requirements=scopes, config=config
        )
    return globus_sdk.UserApp(_APP_NAME, client_id=client, scope_requirements=scopes, config=config)


def forget_secret() -> None:
    """Remove the client secret from this process's environment, so that jobs and workers do not inherit it."""
    os.environ.pop(CLIENT_SECRET, None)


def log_in(app: GlobusApp, scopes: Sequence[str] = ()) -> None:
    """Get tokens; a user is shown a URL, and asked for the code that the page shows.

    Parameters
    ----------
    app
        From `make_app`.
    scopes
        Consents that are missing. Default: log in if necessary.

    Raises
    ------
    GlobusRefused
        Globus Auth refuses.
    """
    import globus_sdk
    from globus_sdk.gare import GlobusAuthorizationParameters

    try:
        app.login(auth_params=GlobusAuthorizationParameters(required_scopes=list(scopes)) if scopes else None)
    except globus_sdk.AuthAPIError as error:
        raise GlobusRefused(f"Globus Auth refuses the login: {error.message}") from None
    except globus_sdk.NetworkError as error:
        raise GlobusRefused(f"Globus Auth cannot be reached: {error}") from None
    except EOFError:
        raise GlobusRefused("the login needs a terminal, to read the code that the page shows") from None


@contextmanager
def logged_in(app: GlobusApp) -> Iterator[GlobusApp]:
    """Use an app that has tokens; a service account gets them at once, a user must have logged in.

    Raises
    ------
    GlobusRefused
        The user must log in.
    """
    import globus_sdk

    with app:
        try:
            if isinstance(app, globus_sdk.ClientApp):
                app.login()
            if app.login_required():
                raise GlobusRefused(f"you are not logged in to Globus, or the login has expired; run: {LOGIN}")
        except globus_sdk.AuthAPIError as error:
            raise GlobusRefused(f"Globus Auth refuses the login ({error.message}); run: {LOGIN}") from None
        except globus_sdk.NetworkError as error:
            raise GlobusRefused(f"Globus Auth cannot be reached: {error}") from None
        yield app


def whoami(app: GlobusApp) -> str:
    """Return the name of the identity that is logged in.

    Raises
    ------
    GlobusRefused
        The login has expired.
    """
    import globus_sdk

    try:
        scopes = globus_sdk.AuthClient.scopes
        info = globus_sdk.AuthClient(app=app, app_scopes=[scopes.openid, scopes.profile]).userinfo()
    except globus_sdk.AuthAPIError as error:
        raise GlobusRefused(f"Globus Auth refuses the login ({error.message}); run: {LOGIN}") from None
    except globus_sdk.token_storage.TokenValidationError:
        raise GlobusRefused(f"the login has expired, or lacks a consent; run: {LOGIN}") from None
    except globus_sdk.NetworkError as error:
        raise GlobusRefused(f"Globus Auth cannot be reached: {error}") from None
    return str(info.get("preferred_username") or info["sub"])
