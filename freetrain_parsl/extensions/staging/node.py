"""Part of each image: runs when an interpreter of the image starts, and uses Python's standard library only.

The image mirrors the environment's prefix. Modules elsewhere, such as those of a project that is being edited, keep
their names, so that files beside them are read and written where they are: only their code comes from the image. What
is looked for in their directories, but is not there, costs one call every few seconds instead of one for each module:
the image has listings of these directories, which are used as long as their time of change is the same.
"""

from __future__ import annotations

import marshal
import os
import sys
import time
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    SourceFileLoader,
    SourcelessFileLoader,
)
from importlib.util import spec_from_file_location

TYPE_CHECKING = False  # `typing` is not needed otherwise
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import CodeType, ModuleType

_FRESH = 5.0  # seconds for which a directory is taken not to have changed; network file systems do so up to a minute
SETTLED = 2_000_000_000  # ns after which another change of a directory has another time
_DETAILS = (
    (ExtensionFileLoader, EXTENSION_SUFFIXES),
    (SourceFileLoader, SOURCE_SUFFIXES),
    (SourcelessFileLoader, BYTECODE_SUFFIXES),
)
_HEADER = 16  # bytes before the code in a .pyc


class Elsewhere:
    """The modules outside the prefix whose code is in the image.

    Parameters
    ----------
    root
        Directory of the image.
    """

    def __init__(self, root: str) -> None:
        with open(f"{root}/elsewhere/index", "rb") as file:
            packages, own, index, listings = marshal.load(file)  # noqa: S302 - of an image whose hash was checked
        self.packages: dict[str, str] = {shared: f"{root}/{name}" for shared, name in packages.items()}
        """Directory of installed packages, or one package in a directory with others -> its copy."""
        self.local: tuple[str, ...] = (f"{root}/", *own)
        self.code: dict[str, tuple[int, int, int, int]] = index
        """Source -> offset and length of its code, and time and size at which it is valid; time 0: always."""
        self.listings: dict[str, tuple[int, tuple[str, ...]]] = listings
        """Directory -> its time of change in ns, and the names of modules that may be there."""
        self.directories = {os.path.dirname(source) for source in index}
        self._path = f"{root}/elsewhere/code"

    def finder(self, path: str) -> Finder:
        """Return the finder of a shared directory; a hook of `sys.path_hooks`."""
        if not path.startswith("/") or path.startswith(self.local):
            raise ImportError("it is on this node", path=path)
        if path not in self.directories and not os.path.isdir(path):
            raise ImportError("it is not a directory", path=path)
        return Finder(path, self)

    def read(self, source: str) -> bytes:
        """Return the code of a source."""
        offset, length, _, _ = self.code[source]
        with open(self._path, "rb") as file:
            file.seek(offset)
            return file.read(length)

    def has(self, source: str) -> bool:
        """Return whether the code of a source is there and still valid."""
        if source not in self.code:
            return False
        _, _, changed, size = self.code[source]
        if not changed:
            return True
        try:
            status = os.stat(source)
        except OSError:
            return False
        return (status.st_mtime_ns, status.st_size) == (changed, size)


class Finder(FileFinder):
    """Finds the modules in a shared directory."""

    def __init__(self, path: str, elsewhere: Elsewhere) -> None:
        super().__init__(path, *_DETAILS)
        self._elsewhere = elsewhere
        self._changed, self._names = elsewhere.listings.get(path, (0, ()))
        self._looked_at: float | None = None

    def find_spec(self, fullname: str, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the specification of a module here, ``None`` if there is none."""
        name = fullname.rpartition(".")[2]
        if (copy := self._elsewhere.packages.get(f"{self.path}/{name}")) is not None:
            return spec_from_file_location(fullname, f"{copy}/__init__.py", submodule_search_locations=[copy])
        for source, package in ((f"{self.path}/{name}/__init__.py", True), (f"{self.path}/{name}.py", False)):
            if self._elsewhere.has(source):
                return spec_from_file_location(
                    fullname,
                    source,
                    loader=Loader(fullname, source, self._elsewhere),
                    submodule_search_locations=[os.path.dirname(source)] if package else None,
                )
        now = time.monotonic()
        if self._looked_at is None or now - self._looked_at > _FRESH:
            self._looked_at = now
            try:
                changed = os.stat(self.path).st_mtime_ns
                if changed != self._changed:
                    self._names = tuple({entry.partition(".")[0] for entry in os.listdir(self.path)})
                    self._changed = changed if time.time_ns() - changed > SETTLED else 0
            except OSError:
                self._changed, self._names = 0, ()
        return super().find_spec(fullname, target) if name in self._names else None

    def invalidate_caches(self) -> None:
        """Look at the directory at the next search."""
        super().invalidate_caches()
        self._looked_at = None


class Loader(SourceFileLoader):
    """Loads a module whose code is in the image, under the name of its source."""

    def __init__(self, fullname: str, path: str, elsewhere: Elsewhere) -> None:
        super().__init__(fullname, path)
        self._elsewhere = elsewhere

    def get_code(self, fullname: str) -> CodeType | None:  # noqa: ARG002 - of the base class
        """Return the code of the module."""
        code: CodeType = marshal.loads(self._elsewhere.read(self.path)[_HEADER:])  # noqa: S302 - as above
        return code


def _install() -> None:
    root = __file__
    for _ in range(4):  # lib/pythonX.Y/site-packages/_freetrain_image.py
        root = os.path.dirname(root)
    elsewhere = Elsewhere(root)
    sys.path[:] = [elsewhere.packages.get(entry, entry) for entry in sys.path]
    sys.path_hooks.insert(0, elsewhere.finder)
    for path in list(sys.path_importer_cache):
        if not path.startswith(elsewhere.local):
            del sys.path_importer_cache[path]


if __name__ == "_freetrain_image":
    _install()
