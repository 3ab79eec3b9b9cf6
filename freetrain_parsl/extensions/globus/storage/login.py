"""The Globus login of this user: an app and token storage of the Globus SDK."""

from __future__ import annotations

import os
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from freetrain_parsl.errors import GlobusRefused

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from globus_sdk import GlobusApp

__all__ = ["CLIENT_ID", "CLIENT_SECRET", "LOGIN", "log_in", "logged_in", "make_app", "whoami"]

CLIENT_ID = "FREETRAIN_GLOBUS_CLIENT_ID"
CLIENT_SECRET = "FREETRAIN_GLOBUS_CLIENT_SECRET"  # noqa: S105 - the name of an environment variable
LOGIN = "freetrain globus login"

_APP_NAME = "freetrain"
_WHERE = "https://app.globus.org/settings/developers"


def make_app(*, compute: bool = False) -> GlobusApp:
    """Return the app of this user, or of a service account if there is a client secret. No login flow is started.

    Parameters
    ----------
    compute
        Whether the login must be one for Globus Compute, too: of ``freetrain remote``. A driver needs none.

    Raises
    ------
    GlobusRefused
        The extra is not installed, there is no valid client id, or the stored tokens cannot be read.
    """
    try:
        import globus_sdk
    except ImportError:
        raise GlobusRefused("the Globus SDK is not installed; run: pip install 'freetrain-parsl[globus]'") from None
    client, secret = os.environ.get(CLIENT_ID, ""), os.environ.get(CLIENT_SECRET, "")
    if not client:
        raise GlobusRefused(
            f"{CLIENT_ID} is not set; register a native app once at {_WHERE}, and export {CLIENT_ID}=<its client id>"
        )
    try:
        client = str(uuid.UUID(client))  # it is a part of the path of the tokens
    except ValueError:
        raise GlobusRefused(f"{CLIENT_ID}={client[:80]!r} is not the UUID of a client; {_WHERE} shows it") from None
    scopes: dict[str, Any] = {
        globus_sdk.AuthClient.scopes.resource_server: [
            globus_sdk.AuthClient.scopes.openid,
            globus_sdk.AuthClient.scopes.profile,
        ],
        globus_sdk.TransferClient.scopes.resource_server: [globus_sdk.TransferClient.scopes.all],
    }
    if compute:
        scopes[globus_sdk.ComputeClientV2.resource_server] = [globus_sdk.ComputeClientV2.scopes.all]
    # A driver must never wait for a login in a terminal.
    config = globus_sdk.GlobusAppConfig(
        token_storage="json",  # noqa: S106 - the SDK's file in the home directory, mode 0600
        request_refresh_tokens=not secret,
        token_validation_error_handler=None,
    )
    try:
        app: GlobusApp
        if secret:
            app = globus_sdk.ClientApp(
                _APP_NAME, client_id=client, client_secret=secret, scope_requirements=scopes, config=config
            )
        else:
            app = globus_sdk.UserApp(_APP_NAME, client_id=client, scope_requirements=scopes, config=config)
        app.login_required()  # reads the tokens
    except (AttributeError, LookupError, OSError, TypeError, ValueError) as error:  # the SDK does not check the file
        raise GlobusRefused(
            f"the tokens in ~/.globus/app/{client} cannot be read or written ({' '.join(str(error).split())[:200]}); "
            f"remove this directory, then run: {LOGIN}"
        ) from None
    return app


def log_in(app: GlobusApp, scopes: Sequence[str] = ()) -> None:
    """Get tokens, and missing consents; a user is shown a URL, and asked for the code that the page shows.

    Raises
    ------
    GlobusRefused
        Globus Auth refuses.
    """
    from globus_sdk.gare import GlobusAuthorizationParameters

    with _auth_errors():
        app.login(auth_params=GlobusAuthorizationParameters(required_scopes=list(scopes)) if scopes else None)


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
        with _auth_errors():
            if isinstance(app, globus_sdk.ClientApp):
                app.login()
            login_required = app.login_required()
        if login_required:
            raise GlobusRefused(f"you are not logged in to Globus, or the login has expired; run: {LOGIN}")
        yield app


def whoami(app: GlobusApp) -> str:
    """Return the name of the identity that is logged in.

    Raises
    ------
    GlobusRefused
        The login has expired.
    """
    import globus_sdk

    with _auth_errors():
        scopes = globus_sdk.AuthClient.scopes
        info = globus_sdk.AuthClient(app=app, app_scopes=[scopes.openid, scopes.profile]).userinfo()
        return str(info.get("preferred_username") or info["sub"])


@contextmanager
def _auth_errors() -> Iterator[None]:
    """Translate what goes wrong while Globus Auth is asked."""
    import globus_sdk

    try:
        yield
    except globus_sdk.AuthAPIError as error:
        reason = " ".join((error.message or f"status {error.http_status}").split())[:200]
        raise GlobusRefused(f"Globus Auth refuses the login ({reason}); run: {LOGIN}") from None
    except globus_sdk.NetworkError as error:
        raise GlobusRefused(f"Globus Auth cannot be reached: {' '.join(str(error).split())[:200]}") from None
    except globus_sdk.token_storage.TokenValidationError:
        raise GlobusRefused(f"the login has expired, or lacks a consent; run: {LOGIN}") from None
    except EOFError:
        raise GlobusRefused("the login needs a terminal, to read the code that the page shows") from None
    except OSError as error:
        raise GlobusRefused(f"the tokens cannot be stored: {error}") from None
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        # The SDK takes for granted that an answer is JSON and complete; the page of a proxy is neither.
        raise GlobusRefused("Globus Auth sent an unexpected answer; is there a proxy or a login page?") from error
