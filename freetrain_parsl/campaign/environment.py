"""Pure: the environment of a driver at the site, without what belongs to the endpoint that starts it.

An endpoint has credentials in its environment, such as the secret of a client identity, and functions inherit them. A
driver passes its environment on to its jobs, and so to user code; none of these variables is needed there.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["KEEP", "scrubbed"]

KEEP = "FREETRAIN_REMOTE_KEEP"
"""Variable of the endpoint: names, separated by commas, of variables that are passed on although they look secret."""

_ENDPOINTS = re.compile(r"(GLOBUS_|FUNCX_|GC_|PARSL_).*", re.IGNORECASE)
_SDK = "GLOBUS_SDK_"
_SECRET = re.compile(
    r".*(SECRET|TOKEN|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|AUTHORIZATION).*"
    r"|.*_(PWD|PAT)",  # MYSQL_PWD, GITHUB_PAT
    re.IGNORECASE,
)
_URL_WITH_PASSWORD = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s:@]*:[^/\s@]+@", re.IGNORECASE)
_SHORTEST = 8  # characters of a value that is looked for inside other values


def scrubbed(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without credentials and without the variables of Globus Compute and its workers.

    Variables are removed by their names, by a password in an address, and if their value contains that of a secret one.
    Those named by `KEEP` stay, except Globus' own; of these only settings of its SDK, which are no secrets.
    """
    kept = {name.strip() for name in environment.get(KEEP, "").split(",")}
    own = {
        name
        for name in environment
        if _ENDPOINTS.fullmatch(name) and not (name in kept and name.startswith(_SDK) and not _SECRET.fullmatch(name))
    }
    secret = own | {name for name in environment if _SECRET.fullmatch(name) and name not in kept}
    values = [environment[name] for name in secret if _SECRET.fullmatch(name) and len(environment[name]) >= _SHORTEST]
    return {
        name: value
        for name, value in environment.items()
        if name not in secret
        and (name in kept or not _URL_WITH_PASSWORD.search(value))
        and (name in kept or not any(item in value for item in values))
    }
