"""Images of small environments, made and used by real interpreters."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from freetrain_parsl.extensions.staging import trace
from freetrain_parsl.location import PACKAGE
from tests.pythons import interpreters

MAKE = (
    "import json, sys; from pathlib import Path; from freetrain_parsl.extensions.staging.make import make; "
    "json.dump(make(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[4:], int(sys.argv[3])), sys.stdout)"
)


@dataclass
class World:
    """An environment with a few packages, the place of its images, and a project that is not installed."""

    directory: Path
    python: Path
    project: Path

    @property
    def packages(self) -> Path:
        """Its site-packages."""
        (found,) = self.python.parent.parent.glob("lib/python3.*/site-packages")
        return found

    def path(self, *more: Path) -> dict[str, str]:
        """Return variables with which this checkout and the project are found."""
        return {"PATH": "/usr/bin:/bin", "PYTHONPATH": os.pathsep.join(map(str, (self.project, *more)))}

    def make(self, *modules: str, large: int = 1 << 20) -> dict[str, Any]:
        """Make an image of what these modules open."""
        (self.directory / "out").mkdir(exist_ok=True)
        command = [self.python, "-c", MAKE, self.directory / "cache", self.directory / "out", str(large), *modules]
        done = subprocess.run(
            command, capture_output=True, text=True, env=self.path(PACKAGE.parent), timeout=100, check=False
        )
        assert done.returncode == 0, done.stderr
        made: dict[str, Any] = json.loads(done.stdout)
        return made

    def unpack(self, made: dict[str, Any]) -> Path:
        """Unpack an image, as a node does."""
        target = self.directory / "unpacked" / made["image"].removesuffix(".tar.gz")
        target.mkdir(parents=True, exist_ok=True)
        image = self.directory / "out" / made["image"]
        subprocess.run(["tar", "-xzPf", image, "-C", target, "--no-same-owner"], check=True)
        return target

    def run(self, image: Path, script: str, **variables: str) -> str:
        """Run a script with the image's Python; return what it prints."""
        done = subprocess.run(
            [image / "bin" / "python", "-c", script],
            capture_output=True,
            text=True,
            env={**self.path(), **variables},
            cwd="/",
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


def world_of(python: str, directory: Path) -> World:
    """Make an environment."""
    subprocess.run([python, "-m", "venv", "--without-pip", directory / "venv"], check=True, timeout=100)
    world = World(directory, directory / "venv" / "bin" / "python", directory / "project")
    site = world.packages
    for name, text in {
        "tool/__init__.py": "from tool import used\nfrom pathlib import Path\nHERE = Path(__file__).parent\n",
        "tool/used.py": "VALUE = 1\n",
        "tool/later.py": "VALUE = 2\n",
        "tool/data.txt": "beside the module",
        "tool/sub/__init__.py": "",
        "tool/sub/deep.py": "VALUE = 3\n",
        "space/part_a/__init__.py": "",
        "tool-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tool\nVersion: 1.0\n",
        "tool-1.0.dist-info/RECORD": "",
    }.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text, encoding="utf-8")
    for name, text in {
        "mine.py": "from pathlib import Path\nVALUE = 'old'\nHERE = Path(__file__).parent\n",
        "own/__init__.py": "",
        "own/part.py": "VALUE = 'part'\n",
        "space/part_b/__init__.py": "",
    }.items():
        (world.project / name).parent.mkdir(parents=True, exist_ok=True)
        (world.project / name).write_text(text, encoding="utf-8")
    return world


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Return an environment of this Python."""
    return world_of(os.path.realpath(sys.executable), tmp_path)


def test_what_was_opened_is_copied_and_the_rest_is_linked(world: World) -> None:
    image = world.unpack(world.make("tool"))
    site = image / world.packages.relative_to(world.python.parent.parent)
    assert (site / "tool/used.py").is_file()
    assert not (site / "tool/used.py").is_symlink()
    assert (site / "tool/later.py").readlink() == world.packages / "tool/later.py"
    assert (site / "tool/data.txt").readlink() == world.packages / "tool/data.txt"
    assert (site / "tool/sub").readlink() == world.packages / "tool/sub"
    assert not (site / "tool-1.0.dist-info/METADATA").is_symlink()
    assert (
        world.run(image, "import tool, sys; print(tool.__file__.startswith(sys.prefix), sys.prefix)") == f"True {image}"
    )
    assert world.run(image, "import tool.later, tool.sub.deep; print(tool.later.VALUE, tool.sub.deep.VALUE)") == "2 3"
    assert world.run(image, "import tool; print((tool.HERE / 'data.txt').read_text())") == "beside the module"
    version = "import importlib.metadata as m; print(m.version('tool'))"
    assert world.run(image, version) == "1.0"


def test_an_interpreter_of_the_image_reads_its_library_there(world: World) -> None:
    image = world.unpack(world.make("tool", "json"))
    script = "import json, os, sys; print(json.__file__, os.__file__, sys.executable, sys.base_prefix)"
    files = world.run(image, script).split()
    assert all(file.startswith(str(image)) for file in files)
    assert world.run(image, "import inspect, importlib; print(bool(inspect.getsource(importlib)))") == "True"
    assert world.run(image, "import wave; print(wave.__name__)") == "wave", "by its link"
    assert world.run(image, "import subprocess, sys; print(subprocess.check_output([sys.executable, '-c', "
                     "'import sys; print(sys.prefix)'], text=True))") == str(image)  # fmt: skip


def test_no_module_of_the_base_is_added_that_the_environment_hides(world: World) -> None:
    """An environment without the system's packages stays one."""
    base = Path(sysconfig.get_path("purelib", vars={"base": sys.base_prefix}))
    hidden = next((path.name for path in sorted(base.glob("*/__init__.py")) for path in [path.parent]), "pip")
    image = world.unpack(world.make("tool"))
    found = world.run(image, f"import importlib.util as u; print(u.find_spec({hidden!r}))")
    assert found == "None"
    assert world.run(image, "import site; print(site.ENABLE_USER_SITE)", PYTHONNOUSERSITE="1") == "False"
    assert (image / "no-user-site").exists()


def test_a_project_keeps_its_names_and_its_code_is_in_the_image(world: World) -> None:
    made = world.make("mine", "own.part")
    image = world.unpack(made)
    script = "import mine, own.part; print(mine.__file__, own.part.VALUE, type(mine.__loader__).__module__)"
    assert world.run(image, script) == f"{world.project}/mine.py part _freetrain_image"
    assert world.run(image, "import mine; (mine.HERE / 'written').write_text('x')") == ""
    assert (world.project / "written").read_text(encoding="utf-8") == "x", "beside the source, where it is expected"
    (world.project / "new.py").write_text("VALUE = 'new'\n", encoding="utf-8")
    assert world.run(image, "import new; print(new.VALUE)") == "new"
    script = (
        "import importlib, pathlib\ntry:\n    import late\nexcept ImportError:\n    print('absent')\n"
        f"pathlib.Path({str(world.project)!r}, 'late.py').write_text('VALUE = 5')\n"
        "importlib.invalidate_caches()\nimport late\nprint(late.VALUE)"
    )
    assert world.run(image, script).split() == ["absent", "5"]
    assert world.run(image, "import inspect, mine; print('VALUE' in inspect.getsource(mine))") == "True"
    assert (
        world.run(image, "import pkgutil, own; print([m.name for m in pkgutil.iter_modules(own.__path__)])")
        == "['part']"
    )


def test_a_namespace_package_of_two_places(world: World) -> None:
    image = world.unpack(world.make("space.part_a"))
    assert world.run(image, "import space.part_a, space.part_b; print(len(list(space.__path__)))") == "2"


def test_a_learned_module_that_was_edited_is_read_anew(world: World) -> None:
    from freetrain_parsl.extensions.staging.make import learned_path, write_learned

    made = world.make("tool")
    learned = learned_path(world.directory / "cache", made["trees"])
    write_learned(learned, {str(world.project / "mine.py"), str(world.packages / "tool/later.py")})
    again = world.make("tool")
    assert again["image"] != made["image"]
    assert {
        str(world.project / "mine.py"),
        f"{world.packages.relative_to(world.python.parent.parent)}/tool/later.py",
    } <= {*again["traced"]}
    image = world.unpack(again)
    script = "import mine; print(mine.VALUE, type(mine.__loader__).__module__)"
    assert world.run(image, script) == "old _freetrain_image"
    source = world.project / "mine.py"
    source.write_text(source.read_text(encoding="utf-8").replace("'old'", "'newer'"), encoding="utf-8")
    assert world.run(image, script).split()[0] == "newer"


def test_the_same_environment_makes_the_same_image(world: World) -> None:
    first = world.make("tool", "mine")
    (world.directory / "cache").rename(world.directory / "old")
    second = world.make("tool", "mine")
    assert second["image"] == first["image"]
    assert second["seconds"] > 0
    assert world.make("tool", "mine")["seconds"] == 0, "from the cache"


@pytest.mark.parametrize("change", ["source", "package", "image"])
def test_a_change_makes_another_image(world: World, change: str) -> None:
    first = world.make("tool", "mine")
    if change == "source":
        (world.project / "mine.py").write_text("VALUE = 'changed'\n", encoding="utf-8")
    elif change == "package":
        (world.packages / "other-2.0.dist-info").mkdir()
        (world.packages / "other-2.0.dist-info" / "METADATA").write_text("Name: other\nVersion: 2.0\n", "utf-8")
    else:
        (world.directory / "cache" / first["image"]).unlink()
    second = world.make("tool", "mine")
    assert second["seconds"] > 0
    assert (second["image"] == first["image"]) is (change == "image")


def test_large_files_are_linked(world: World) -> None:
    (world.packages / "tool" / "used.py").write_text("VALUE = 1\n" + "#" * 5000, encoding="utf-8")
    made = world.make("tool", large=4096)
    image = world.unpack(made)
    name = f"{world.packages.relative_to(world.python.parent.parent)}/tool/used.py"
    assert (image / name).is_symlink()
    assert name in made["traced"], "it is known, so it is not reported as missing"


def test_the_content_is_private_and_has_no_owner(world: World) -> None:
    made = world.make("tool")
    image = world.directory / "out" / made["image"]
    assert image.stat().st_mode & 0o777 == 0o600
    with tarfile.open(image) as tar:
        assert all(member.mode & 0o077 == 0 for member in tar if not member.issym())
        assert {member.uid for member in tar} == {0}


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.10", "3.12", "3.13", "system", "editable"])
def test_other_pythons(tmp_path: Path, version: str) -> None:
    """Oldest and newest Python, one of the node's own system, and setuptools' finder of an editable project."""
    if version == "system":
        python: str | None = "/usr/bin/python3"
    else:
        python = interpreters().get(version, os.path.realpath(sys.executable) if version == "editable" else None)
    if python is None or not Path(python).exists():
        pytest.skip(f"there is no Python {version}")
    if version == "system" and subprocess.run([python, "-c", "import ensurepip, venv"], check=False).returncode:
        pytest.skip("the system's Python makes no environments")
    world = world_of(os.path.realpath(python), tmp_path)
    if version == "editable":
        (world.project / "own").rename(world.directory / "own")
        (world.packages / "__editable___own_finder.py").write_text(FINDER.format(world.directory / "own"), "utf-8")
        (world.packages / "__editable__.own.pth").write_text("import __editable___own_finder\n", encoding="utf-8")
    image = world.unpack(world.make("tool", "mine", "own.part"))
    script = "import sys, tool.later, mine, own.part; print(sys.prefix, tool.later.VALUE, mine.VALUE, own.part.VALUE)"
    assert world.run(image, script) == f"{image} 2 old part"
    assert world.run(image, "import own.part; print(type(own.part.__loader__).__module__)") == "_freetrain_image"


FINDER = """
import sys
from importlib.machinery import PathFinder
from importlib.util import spec_from_file_location

class Finder:
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname == "own":
            return spec_from_file_location(fullname, "{0}/__init__.py", submodule_search_locations=["{0}"])

sys.meta_path.append(Finder)
"""


def test_a_directory_that_has_not_changed_is_not_listed_on_a_node(world: World) -> None:
    image = world.unpack(world.make("mine"))
    script = (
        "import importlib.util, sys; seen = []; "
        "sys.addaudithook(lambda event, args: event == 'os.listdir' and seen.append(args[0])); "
        f"print(importlib.util.find_spec('absent'), seen.count({str(world.project)!r}))"
    )
    assert world.run(image, script) == "None 0"
    (world.project / "absent.py").touch()
    assert world.run(image, script).startswith("ModuleSpec(name='absent'")


def test_a_package_that_is_only_looked_for_is_in_the_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look for it would cost a call for each of its possible names."""
    (tmp_path / "optional_one").mkdir()
    (tmp_path / "optional_one/__init__.py").write_text("raise ImportError", encoding="utf-8")
    searched = trace.Searched()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "meta_path", [searched, *sys.meta_path])
    for name in ("optional_one", "absent_one", "json"):
        importlib.util.find_spec(name)
    assert searched.files() == {str(tmp_path / "optional_one/__init__.py")}
