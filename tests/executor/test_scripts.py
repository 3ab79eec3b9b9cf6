"""Typical user scripts, run from the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster


def test_a_script_may_define_network_and_data_beside_the_function_and_nodes_may_have_several_slots(tmp_path) -> None:
    script = Path(__file__).with_name("plain_script.py")
    done = subprocess.run(
        [sys.executable, str(script), "runs"], cwd=tmp_path, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr[-3000:]
    loss, samples, slots = done.stdout.split()
    assert float(loss) < 0.1
    assert (int(samples), int(slots)) == (6 * 256, 4)


def test_an_edited_script_never_returns_the_result_of_the_old_one(tmp_path) -> None:
    """A call without a name starts over, one with a name is refused; unchanged code returns its old result."""
    script = tmp_path / "edited_script.py"
    text = Path(__file__).with_name("edited_script.py").read_text(encoding="utf-8")

    def run(rate: str) -> tuple[list[str], str]:
        script.write_text(text.replace("RATE = 0.1", f"# edited\nRATE = {rate}"), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True
        )
        return done.stdout.splitlines(), done.stderr

    assert run("0.1")[0] == ["0.1", "0.1"]
    (first, second), said = run("0.2")
    assert first == "0.2"
    assert "training job 'named': checkpoint " in second
    assert "was written by other code (changed: __main__.RATE)" in second
    assert "starting over: its code has changed since train-" in said
    results, said = run("0.1")
    assert results == ["0.1", "0.1"]
    assert said.count("its result is that of an earlier run") == 2
