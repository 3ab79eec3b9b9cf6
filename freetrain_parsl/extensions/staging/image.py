"""What an image contains, and its file.

It mirrors the environment's prefix, with the library of the interpreter that the environment was made from. A file that
a start opens is copied; **every other entry of a directory with a copied file is a symbolic link** to the shared tree.
So nothing is missing: what was not foreseen is read from the shared file system, by its link, and what does not exist
is not looked for there.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import json
import marshal
import os
import py_compile
import re
import sys
import sysconfig
import tarfile
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from freetrain_parsl.extensions.staging.node import SETTLED
from freetrain_parsl.location import PACKAGE

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["LARGE", "Environment", "Image", "write_image"]

LARGE: Final = 16 << 20
"""Bytes from which a file is not copied but linked: it is read in part, by page, and few are."""

_OWN: Final = ("/usr/", "/lib/", "/lib64/", "/bin/", "/etc/")  # in a node's own system
_PROC: Final = ("/proc/", "/sys/", "/dev/")
_PACKAGES: Final = f"lib/python{sysconfig.get_python_version()}/site-packages"  # in the image
_TIME_LIMIT: Final = 0xFFFFFFFF
_MOST_NAMES: Final = 10_000  # of a listing; a larger directory is listed on the node


@dataclass(frozen=True)
class Environment:
    """The Python environment of this interpreter, as far as nodes read it from a shared file system.

    Parameters
    ----------
    trees
        (shared directory, its name in the image), the longest directory first: the prefix, the one that it was made
        from, directories of installed packages elsewhere, and this package.
    own_base
        Whether the interpreter and its library are in each node's own system.
    """

    trees: tuple[tuple[str, str], ...]
    own_base: bool

    @classmethod
    def find(cls) -> Environment:
        """Describe this interpreter's."""
        prefix, base = os.path.abspath(sys.prefix), os.path.abspath(sys.base_prefix)
        own_base = f"{base}/".startswith(_OWN)
        trees: dict[str, str] = {}
        if not f"{prefix}/".startswith(_OWN):
            trees[prefix] = ""
        if not own_base:
            trees.setdefault(base, "")
        for entry in map(os.path.abspath, filter(None, sys.path)):
            if _inside(entry, trees) or entry.startswith(_OWN) or not os.path.isdir(entry):
                continue
            if os.path.basename(entry) in ("site-packages", "dist-packages") or any(Path(entry).glob("*.dist-info")):
                trees[entry] = f"packages/{len(trees)}"
        if not _inside(str(PACKAGE), trees) and not str(PACKAGE).startswith(_OWN):  # a checkout
            trees[str(PACKAGE)] = f"{_PACKAGES}/{PACKAGE.name}"
        return cls(tuple(sorted(trees.items(), key=lambda item: -len(item[0]))), own_base)

    def locate(self, path: str) -> tuple[str, str, str] | None:
        """Return the tree of a file, that tree's name and the file's name in the image; ``None`` if it is elsewhere."""
        for tree, name in self.trees:
            if path.startswith(f"{tree}/"):
                return tree, name, os.path.join(name, path[len(tree) + 1 :])
        return None


def _inside(path: str, trees: Iterable[str]) -> bool:
    return any(path == tree or path.startswith(f"{tree}/") for tree in trees)


@dataclass
class Image:
    """The entries of an image.

    Attributes
    ----------
    entries : dict
        Name -> what it is (``file`` or ``link``, with its source; ``data``, with its content).
    directories : dict
        Name of a directory -> the shared directories that it stands for.
    traced : set
        Names of entries that nodes are known to open: copied, or linked because they are large; and `sources`.
    sources : dict
        Source outside the environment's trees, whose code is in the image -> whether its code is used without a look
        at the source: it is imported when the node starts, and the driver has looked.
    """

    environment: Environment
    large: int = LARGE
    entries: dict[str, tuple[str, str | bytes]] = field(default_factory=dict)
    directories: dict[str, set[str]] = field(default_factory=dict)
    traced: set[str] = field(default_factory=set)
    sources: dict[str, bool] = field(default_factory=dict)

    def add(self, path: str, *, at_start: bool = True) -> None:
        """Add a file that a node opens: nothing if it is in the node's own system, or does not exist any more."""
        path = os.path.normpath(path)
        if path.startswith(_PROC) or not os.path.isfile(path):
            return
        # By its directory's real name (lib64 is a link to lib), but by the file's own: it may be a link to a cache.
        path = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        located = self.environment.locate(path)
        if located is None:
            real = os.path.realpath(path)
            located = self.environment.locate(real)
            if located is None:
                if path.endswith(".py") and not path.startswith(_OWN) and real == path:
                    self.sources[path] = self.sources.get(path, False) or at_start
                    self.traced.add(path)
                return
            path = real
        tree, tree_name, name = located
        if name in self.entries:
            return
        needed = name.startswith(("bin/", "lib/libpython"))
        large = os.path.getsize(path) > self.large and not needed
        self.traced.add(name)
        self.entries[name] = ("link" if large else "file", path)
        self._enter(os.path.dirname(path), os.path.dirname(name), tree, tree_name)
        if name.endswith(".pyc") and "__pycache__" in name:
            try:
                self.add(importlib.util.source_from_cache(path))
            except ValueError:  # not the name of a compiled file
                return

    def _enter(self, shared: str, name: str, tree: str, tree_name: str) -> None:
        """Let directories of the image stand for a shared directory and those above it."""
        while True:
            self.directories.setdefault(name, set()).add(shared)
            if shared == tree:
                break
            shared, name = os.path.dirname(shared), os.path.dirname(name)
        while tree_name:
            tree_name = os.path.dirname(tree_name)
            self.directories.setdefault(tree_name, set())

    def finish(self) -> None:
        """Add what the trace does not show: interpreter, metadata, compiled files, links, and `node`'s part."""
        self._add_metadata()
        self._add_interpreter()
        self._compile()
        self._link()
        self._add_elsewhere()

    def _add_metadata(self) -> None:
        """Add what `importlib.metadata` and `site` read of each installed package."""
        for directory in filter(os.path.isdir, sys.path):
            for file in sorted(Path(directory).glob("*.dist-info/*")) + sorted(Path(directory).glob("*.pth")):
                if file.suffix == ".pth" or file.name in ("METADATA", "entry_points.txt"):
                    self.add(str(file))

    def _add_interpreter(self) -> None:
        executable, version = os.path.realpath(sys.executable), sysconfig.get_python_version()
        self.directories.setdefault("", set())
        self.directories.setdefault("bin", set()).add(os.path.dirname(os.path.abspath(sys.executable)))
        if self.environment.own_base:
            every = sys.prefix == sys.base_prefix or _configured("include-system-site-packages") == "true"
            text = f"home = {os.path.dirname(executable)}\ninclude-system-site-packages = {str(every).lower()}\n"
            self.entries["bin/python"] = ("link", executable)
            self.entries["pyvenv.cfg"] = ("data", text.encode())
            self.directories.setdefault(_PACKAGES, set())
        else:
            self.entries[f"bin/python{version}"] = ("file", executable)
            self.entries["bin/python"] = ("link", f"python{version}")
            # Landmarks of the prefix, and the sources of frozen modules, which `inspect` looks for.
            library = Path(sysconfig.get_path("stdlib"))
            for name in _FROZEN.split():
                self.add(str(library / f"{name}.py"))
            for source in sorted(library.glob("importlib/*.py")):
                self.add(str(source))
        self.entries["bin/python3"] = ("link", "python")
        if _user_site_is_off():
            self.entries["no-user-site"] = ("data", b"")

    def _compile(self) -> None:
        """Give each copied source its compiled file; where that is not valid, one that is never checked."""
        for name, (kind, source) in list(self.entries.items()):
            if kind != "file" or not name.endswith(".py") or not isinstance(source, str):
                continue
            cached = importlib.util.cache_from_source(source, optimization="")
            if compiled_in_place(source) is not None:
                self.add(cached)
                continue
            data = compile_source(source)
            if data is None:
                continue
            directory = os.path.join(os.path.dirname(name), "__pycache__")
            self.entries[os.path.join(directory, os.path.basename(cached))] = ("data", data)
            self.traced.add(os.path.join(directory, os.path.basename(cached)))
            shared = os.path.dirname(cached)
            self.directories.setdefault(directory, set()).update({shared} if os.path.isdir(shared) else set())

    def _link(self) -> None:
        """Add a link for every other entry of the directories; last, since a directory may first seem to be a link."""
        skipped = {"pyvenv.cfg"}
        base_packages = None
        if sys.prefix != sys.base_prefix and _configured("include-system-site-packages") != "true":
            base_packages = os.path.join(
                os.path.abspath(sys.base_prefix), "lib", f"python{sysconfig.get_python_version()}", "site-packages"
            )
        packages = {os.path.basename(name) for name in self.directories}
        prefix = os.path.abspath(sys.prefix)
        left = sorted(self.directories)
        while left:
            directory = left.pop(0)
            for shared in sorted(self.directories[directory], key=lambda path: (not path.startswith(prefix), path)):
                children = sorted(os.listdir(shared))
                extensions = {child.split(".")[0] for child in children if child.endswith(".so")}
                for child in children:
                    name, path = os.path.join(directory, child), os.path.join(shared, child)
                    if name in self.entries or name in self.directories or name in skipped or path == base_packages:
                        continue
                    # A directory is looked into before a module of its name: stubs, or what was left there.
                    if child in extensions | packages and os.path.isdir(path) and not os.path.islink(path):
                        self.directories[name] = {path}
                        left.append(name)
                    else:
                        self.entries[name] = ("link", self._target(name, path))

    def _target(self, name: str, path: str) -> str:
        """Return where a link leads: into the image where the shared entry is a link to something that is in it."""
        if os.path.islink(path) and (located := self.environment.locate(os.path.realpath(path))) is not None:
            inside = located[2]
            if inside in self.directories or inside in self.entries:
                return os.path.relpath(inside, os.path.dirname(name) or ".")
        return path

    def to_be_checked(self) -> set[str]:
        """Return what must not have changed when a node starts.

        Directories of packages change with each installation; sources that are edited are looked at one by one.
        """
        places = {entry for entry in map(os.path.abspath, sys.path) if self.environment.locate(f"{entry}/x")}
        checkout = f"{PACKAGE}/" if str(PACKAGE) in dict(self.environment.trees) else None
        edited = {s for _, s in self.entries.values() if checkout and isinstance(s, str) and s.startswith(checkout)}
        return {place for place in places if os.path.isdir(place)} | edited | set(self.sources)

    def _add_elsewhere(self) -> None:
        """Add the code of modules outside the trees, and what finds it."""
        code, index = b"", {}
        for source, at_start in sorted(self.sources.items()):
            data = compiled_in_place(source) or compile_source(source)
            if data is not None:
                status = os.stat(source)
                valid = (0, 0) if at_start else (status.st_mtime_ns, status.st_size)
                index[source] = (len(code), len(data), *valid)
                code += data
        packages = {tree: name for tree, name in self.environment.trees if name}
        self.directories["elsewhere"] = set()
        self.entries["elsewhere/code"] = ("data", code)
        self.entries["elsewhere/index"] = ("data", marshal.dumps((packages, _OWN, index, self._listings()), 2))
        for directory in ("", "lib", os.path.dirname(_PACKAGES), _PACKAGES):
            self.directories.setdefault(directory, set())
        start = f"{_PACKAGES}/_freetrain_image"
        self.entries[f"{start}.py"] = ("data", Path(__file__).with_name("node.py").read_bytes())
        self.entries[f"{start}.pth"] = ("data", b"import _freetrain_image\n")

    def _listings(self) -> dict[str, tuple[int, tuple[str, ...]]]:
        """Return what is in the directories outside the trees that are searched for modules, see `node`."""
        searched = {entry for entry in map(os.path.abspath, filter(None, sys.path)) if not self._is_local(entry)}
        listings = {}
        for directory in sorted({*map(os.path.dirname, self.sources), *searched}):
            try:
                changed = os.stat(directory).st_mtime_ns
                if (age := time.time_ns() - changed) < SETTLED:  # it could change again without another time
                    time.sleep((SETTLED - max(0, age)) / 1e9)
                names = os.listdir(directory)
            except OSError:  # an entry of sys.path that is none, or a zip
                continue
            if len(names) <= _MOST_NAMES:
                listings[directory] = (changed, tuple(sorted({name.partition(".")[0] for name in names})))
        return listings

    def _is_local(self, entry: str) -> bool:
        return entry.startswith(_OWN) or self.environment.locate(f"{entry}/x") is not None


# Modules whose code is in the interpreter itself.
_FROZEN: Final = (
    "_collections_abc _sitebuiltins abc codecs genericpath io ntpath os posixpath runpy site stat zipimport"
)


def compiled_in_place(source: str) -> bytes | None:
    """Return the compiled file that is beside a source, ``None`` if there is none or it is not valid."""
    path = importlib.util.cache_from_source(source, optimization="")
    try:
        data = Path(path).read_bytes()
        status = os.stat(source)
    except OSError:
        return None
    if len(data) < 16 or data[:4] != importlib.util.MAGIC_NUMBER:
        return None
    if data[4:8] == b"\0\0\0\0":
        facts = (int(status.st_mtime) & _TIME_LIMIT, status.st_size & _TIME_LIMIT)
        return data if data[8:16] == b"".join(fact.to_bytes(4, "little") for fact in facts) else None
    return data if data[4] == 1 else None  # valid whatever the source is; 3: to be compared with it


def compile_source(source: str) -> bytes | None:
    """Return a compiled file that is never compared with its source, ``None`` if there is an error in the source."""
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "code.pyc")
        never = py_compile.PycInvalidationMode.UNCHECKED_HASH
        try:
            py_compile.compile(source, path, source, doraise=True, invalidation_mode=never)
        except (py_compile.PyCompileError, OSError, ValueError):
            return None
        return Path(path).read_bytes()


def _configured(key: str) -> str:
    """Return a value in ``pyvenv.cfg``, empty if there is none."""
    try:
        text = Path(sys.prefix, "pyvenv.cfg").read_text(encoding="utf-8")
    except OSError:
        return ""
    found = re.search(rf"^{key}\s*=\s*(.*)$", text, re.MULTILINE)
    return found[1].strip().lower() if found else ""


def _user_site_is_off() -> bool:
    import site

    return not site.ENABLE_USER_SITE


def _near(name: str, data: bytes) -> bytes:
    """Let a program or library look for libraries in the image first, where it names the interpreter's directory."""
    if data.startswith(b"\x7fELF"):
        shared = os.fsencode(os.path.join(sys.base_prefix, "lib")) + b"\0"
        near = os.fsencode(os.path.join("$ORIGIN", os.path.relpath("lib", os.path.dirname(name)))) + b"\0"
        if len(near) <= len(shared):
            data = data.replace(b"\0" + shared, b"\0" + near.ljust(len(shared), b"\0"))
    return data


def write_image(image: Image, directory: Path) -> dict[str, Any]:
    """Write an image to a directory, owner-only; return its name, size and content.

    The name has the hash of the file. Equal entries make equal files.

    Returns
    -------
    dict
        ``image``: the file's name; ``bytes``: its size once unpacked, in bytes; ``packed``: its own; ``files``,
        ``links``: their numbers; ``traced``: see `Image`.
    """
    files = links = total = 0
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".image-", delete=False) as out:
        try:
            with (
                gzip.GzipFile(filename="", fileobj=out, mode="wb", compresslevel=6, mtime=0) as packed,
                tarfile.open(fileobj=packed, mode="w|", format=tarfile.GNU_FORMAT) as tar,
            ):
                for name in sorted(filter(None, image.directories)):
                    info = tarfile.TarInfo(name)
                    info.type, info.mode = tarfile.DIRTYPE, 0o700
                    tar.addfile(info)
                for name, (kind, source) in sorted([*image.entries.items(), _description(image)]):
                    info = tarfile.TarInfo(name)
                    if kind == "link":
                        info.type, info.linkname = tarfile.SYMTYPE, os.fsdecode(source)
                        links += 1
                        tar.addfile(info)
                        continue
                    data, info.mode = (source, 0o600) if isinstance(source, bytes) else (b"", 0o600)
                    if isinstance(source, str):
                        with open(source, "rb") as file:
                            data, status = _near(name, file.read()), os.fstat(file.fileno())
                        info.mtime, info.mode = int(status.st_mtime), 0o700 if status.st_mode & 0o100 else 0o600
                    info.size = len(data)
                    files, total = files + 1, total + len(data)
                    tar.addfile(info, io.BytesIO(data))
            out.flush()
            with open(out.name, "rb") as file:
                name = f"image-{_sha256(file)}.tar.gz"
            os.replace(out.name, directory / name)
        except BaseException:  # also an interruption leaves no half file
            os.unlink(out.name)
            raise
    traced = sorted(image.traced)
    size = (directory / name).stat().st_size
    return {"image": name, "bytes": total, "packed": size, "files": files, "links": links, "traced": traced}


def _sha256(file: Any) -> str:
    digest = hashlib.sha256()
    while part := file.read(1 << 20):
        digest.update(part)
    return digest.hexdigest()


def _description(image: Image) -> tuple[str, tuple[str, bytes]]:
    described = {"python": sys.version, "trees": image.environment.trees, "sources": len(image.sources)}
    return "image.json", ("data", json.dumps(described, indent=1).encode())
