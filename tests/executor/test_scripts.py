"""Scripts as people write them, run as people run them."""

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
