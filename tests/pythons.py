"""Try the supported versions of Python: ``python -m tests.pythons``, which is ``make test-pythons``.

The source distribution is built once, and the wheel from it. Then, for each version that is found on PATH or among
pyenv's: a new environment with the wheel, in which the demo runs from an empty directory; and, with the checkout
installed in place of the wheel, ``pip check`` and the quick part of the test suite, of each test with parameters the
first and the last instance: what is tried is Python. The last environment has the lowest versions of all dependencies,
on the oldest Python, and runs all instances: the demo with the oldest Parsl of pyproject.toml, which some sites
require; the tools of the tests need a newer one.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.__main__ import arguments_of

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
LOWEST = "lowest"
QUICK = ("--quiet", "--hypothesis-profile=ci")  # fixed examples
FEW = "--few"

# A name on PATH may be a shim that does not run, and an interpreter may lack what `venv` needs.
PROBE = "import ensurepip, ssl, sys, venv; print('.'.join(map(str, sys.version_info[:2])))"


@dataclass
class Trial:
    """One environment: its name, the Python that it is made with, and the seconds of each step until one failed.

    `parsl` is a version for the demo that `constraints` do not allow.
    """

    name: str
    python: str
    constraints: str = "constraints.txt"
    parsl: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    failed: str = ""

    def run(self, environment: Path, directory: Path, wheel: Path) -> None:
        """Create the environment and carry out all steps; the demo leaves its run in `directory`."""
        python = str(environment / "bin" / "python")
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", self.constraints]
        cores = len(os.sched_getaffinity(0))
        make = ["make", f"PYTHON={self.python}", f"VENV={environment}", f"CONSTRAINTS={self.constraints}"]
        steps = {
            "environment": ([self.python, "-m", "venv", str(environment)], ROOT),
            "torch": ([*install, "torch"], ROOT),  # first, as in the Makefile
            "wheel": ([*install, f"{wheel}[examples,report]"], ROOT),
            "Parsl": ([python, "-m", "pip", "install", "--quiet", "--no-deps", f"parsl=={self.parsl}"], ROOT),
            "demo": ([str(environment / "bin" / "freetrain"), "demo"], directory),
            "install": ([*make, "install"], ROOT),
            "pip check": ([python, "-m", "pip", "check"], ROOT),
            "quick tests": ([python, "-m", "pytest", *QUICK, *arguments_of("quick", cores)], ROOT),
        }
        if self.name != LOWEST:
            steps["quick tests"][0].append(FEW)
        if not self.parsl:
            del steps["Parsl"]
        for step, (command, where) in steps.items():
            print(f"== Python {self.name}: {step}", flush=True)
            begin = time.monotonic()
            code = subprocess.run(command, cwd=where, check=False).returncode
            self.seconds[step] = time.monotonic() - begin
            if code:
                self.failed = f"{step} failed (exit code {code})"
                return

    def __str__(self) -> str:
        """Return a row of the table at the end."""
        times = ", ".join(f"{step} {seconds:.0f} s" for step, seconds in self.seconds.items())
        return f"{self.name:<8} {self.failed or 'passed'}: {times}"


def build(directory: Path) -> Path:
    """Build the source distribution, and from it the wheel, into a directory; return the wheel."""
    uv = Path(sys.executable).with_name("uv")
    subprocess.run([uv, "build", "--quiet", "--out-dir", directory, ROOT], check=True)
    (wheel,) = directory.glob("*.whl")
    return wheel


def oldest_parsl() -> str:
    """Return the lowest version of Parsl that pyproject.toml allows."""
    found = re.search(r'"parsl>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert found is not None
    return found[1]


def interpreters() -> dict[str, str]:
    """Find an interpreter of each supported version; return the version -> the path."""
    names = {f"python{version}": version for version in VERSIONS}
    candidates: list[str | Path] = [path for name in (*names, "python3") if (path := shutil.which(name))]
    if pyenv := shutil.which("pyenv"):
        root = subprocess.run([pyenv, "root"], capture_output=True, text=True, check=False).stdout.strip()
        for version in VERSIONS:
            candidates += sorted(Path(root).glob(f"versions/{version}.*/bin/python"), reverse=True)
    found: dict[str, str] = {}
    for path in map(str, candidates):
        answer = subprocess.run([path, "-c", PROBE], capture_output=True, text=True, check=False, cwd="/")
        if answer.returncode == 0 and (version := answer.stdout.strip()) in VERSIONS:
            found.setdefault(version, path)
    return {version: found[version] for version in VERSIONS if version in found}


def main(arguments: list[str]) -> int:
    """Try the versions and print a table; return 1 if one of them failed, 2 if none was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.pythons", description=__doc__.partition("\n")[0])
    parser.add_argument("versions", nargs="*", help=f"of {', '.join((*VERSIONS, LOWEST))}; default: all that are found")
    parser.add_argument("--ends", action="store_true", help="only the oldest and the newest version that are found")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the environments in this directory")
    options = parser.parse_args(arguments)
    found = interpreters()
    if unknown := set(options.versions) - {*VERSIONS, LOWEST}:
        parser.error(f"unknown versions: {', '.join(sorted(unknown))}")
    trials = [Trial(version, path) for version, path in found.items()]
    if options.ends:
        trials = trials[:1] + trials[1:][-1:]
    elif found:
        trials.append(Trial(LOWEST, next(iter(found.values())), "constraints-lowest.txt", oldest_parsl()))
    trials = [trial for trial in trials if trial.name in options.versions or not options.versions]
    with tempfile.TemporaryDirectory(prefix="freetrain-wheel-") as distribution:
        try_all(trials, options.keep, build(Path(distribution)))
    print(*trials, sep="\n")
    missing = [version for version in options.versions or VERSIONS if version not in found and version != LOWEST]
    if missing:
        print(f"not tried, because no interpreter was found: {', '.join(missing)}")
    return 2 if not trials else int(any(trial.failed for trial in trials))


def try_all(trials: list[Trial], keep: Path | None, wheel: Path) -> None:
    """Carry out the trials, each in an environment of its own."""
    for trial in trials:
        with tempfile.TemporaryDirectory(prefix="freetrain-python-") as directory:
            # An environment with CUDA has 7 GB: it is removed before the next one is made.
            environment = (keep or Path(directory)).resolve() / f"venv-{trial.name}"
            trial.run(environment, Path(directory), wheel)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
