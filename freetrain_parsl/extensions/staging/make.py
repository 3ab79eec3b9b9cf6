"""Make the image of this interpreter's environment, or find it: ``python -m … make CACHE OUT LARGE``.

It runs in a process of its own, at a low priority, and prints what the driver has to know of the image, as JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from freetrain_parsl.extensions.staging.image import LARGE, Environment, Image, write_image
from freetrain_parsl.storage.owned_files import require_own_directory

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["facts_of", "learned_path", "main", "make", "read_learned", "write_learned"]

_MAKERS: Final = ("image.py", "node.py", "trace.py")  # whose change makes all images anew
_UNUSED: Final = 30 * 86400.0  # seconds after which an image is removed from the cache
_TRACE_LIMIT: Final = 300.0  # seconds


def make(cache: Path, out: Path, modules: Sequence[str] = (), large: int = LARGE) -> dict[str, Any]:
    """Put the image of this environment into a directory, from the cache if nothing has changed since.

    Parameters
    ----------
    cache
        Directory of the images of this user.
    out
        Where the nodes read it.
    modules
        What a node imports. Default: see `trace`.
    large
        Bytes from which files are linked.

    Returns
    -------
    dict
        See `write_image`; also ``trees`` (see `Environment`), ``prefix``, ``checks`` (path, time in ns and size: what
        must not have changed when a node starts), and ``seconds``, 0 from the cache.

    Raises
    ------
    InvalidInput
        The cache is in a directory that others may write.
    """
    begin = time.monotonic()
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    require_own_directory(cache, "set XDG_CACHE_HOME to another one")
    environment = Environment.find()
    learned = read_learned(learned_path(cache, environment.trees))
    key = _identity(environment, learned, [*modules, large])
    record = cache / f"{key}.json"
    with suppress(OSError, ValueError):  # there is none, or it is damaged
        known: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
        if all(facts_of(path) == [path, *facts] for path, *facts in known["checks"]):
            _copy(cache / known["image"], out)
            os.utime(record)
            return {**known, "seconds": 0.0}
    image = Image(environment, large)
    for path in _trace(modules):
        image.add(path)
    for path in learned:
        image.add(path, at_start=False)
    image.finish()
    made = write_image(image, cache)
    made |= {"trees": environment.trees, "prefix": os.path.abspath(sys.prefix)}
    made["checks"] = [facts_of(path) for path in sorted(image.to_be_checked())]
    record.write_text(json.dumps(made), encoding="utf-8")
    _copy(cache / made["image"], out)
    _forget(cache)
    return {**made, "seconds": time.monotonic() - begin}


def _trace(modules: Sequence[str]) -> list[str]:
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory, "opened")
        trace = Path(__file__).with_name("trace.py")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, str(trace), str(out), *modules]
        subprocess.run(command, env=environment, cwd="/", stdout=sys.stderr, check=True, timeout=_TRACE_LIMIT)
        return out.read_text(encoding="utf-8", errors="surrogateescape").splitlines()


def _identity(environment: Environment, learned: list[str], how: list[Any]) -> str:
    """Return what identifies an environment: interpreter, packages with their versions, and what else is known."""
    installed = [
        [str(path), path.stat().st_mtime_ns]
        for directory in filter(os.path.isdir, sys.path)
        for path in sorted(Path(directory).glob("*.dist-info"))
    ]
    makers = [Path(__file__).with_name(name).read_text(encoding="utf-8") for name in _MAKERS]
    described = [makers, sys.version, sys.executable, sys.path, environment.trees, installed, learned, how]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:32]


def facts_of(path: str) -> list[Any]:
    """Return a path with its time of change in ns and its size: zeros if there is nothing."""
    try:
        status = os.stat(path)
    except OSError:
        return [path, 0, 0]
    return [path, status.st_mtime_ns, 0 if os.path.isdir(path) else status.st_size]


def learned_path(cache: Path, trees: Any) -> Path:
    """Return the file with what the nodes of an environment have read besides what a start reads."""
    digest = hashlib.sha256(json.dumps(trees).encode()).hexdigest()[:16]
    return cache / f"learned-{digest}.json"


def read_learned(path: Path) -> list[str]:
    """Return the content of the file of `learned_path`."""
    with suppress(OSError, ValueError):  # nothing is known yet
        known = json.loads(path.read_text(encoding="utf-8"))
        return sorted(str(name) for name in known)
    return []


def write_learned(path: Path, files: set[str]) -> None:
    """Write the file of `learned_path`."""
    aside = path.with_suffix(f".{os.getpid()}")
    aside.write_text(json.dumps(sorted(files)), encoding="utf-8")
    aside.replace(path)


def _copy(image: Path, out: Path) -> None:
    """Put an image where the nodes read it."""
    aside = out / f".{image.name}.{os.getpid()}"
    shutil.copyfile(image, aside)
    aside.chmod(0o600)
    os.utime(image)
    aside.replace(out / image.name)


def _forget(cache: Path) -> None:
    """Remove the images that were not used for a long time, and what a killed process has left."""
    for path in cache.iterdir():
        with suppress(OSError):  # removed by another process
            if time.time() - path.stat().st_mtime > _UNUSED:
                path.unlink()


def main(cache: str, out: str, large: str) -> None:
    """Make the image and print what is known of it."""
    os.nice(10)
    os.umask(0o077)
    json.dump(make(Path(cache), Path(out), large=int(large)), sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
