"""The test bed: batch systems, hosts, services and chaos for the tests. It is not in the wheel."""

from __future__ import annotations

from pathlib import Path

from freetrain_parsl.interpreters import script_command

__all__ = ["bed_command"]

_ROOT = Path(__file__).parents[2]


def bed_command(module: str) -> list[str]:
    """Return the words that run a module of the test bed, wherever they are run; its arguments follow."""
    run = f'import runpy; runpy.run_module("{module}", run_name="__main__", alter_sys=True)'
    return script_command(f'sys.path.insert(0, "{_ROOT}"); {run}')
