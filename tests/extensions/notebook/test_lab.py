"""A campaign in JupyterLab, as a person sees it in a browser."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from freetrain_parsl.campaign.store import RunStore
from tests.extensions.notebook.lab import Lab
from tests.extensions.notebook.test_kernel import CAMPAIGN, SITE, START

if TYPE_CHECKING:
    from pathlib import Path

    from tests import browser

pytestmark = [pytest.mark.cluster, pytest.mark.browser]

OTHER = """
import time
while not open_file("go").exists():
    time.sleep(0.1)
print("the other cell is done")
""".replace("open_file", "__import__('pathlib').Path")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    directory = tmp_path / "work"
    directory.mkdir()
    (directory / "site.yaml").write_text(SITE)
    (directory / "campaign.yaml").write_text(CAMPAIGN.replace("SLOW", str(directory / "slow")))
    cells = [new_code_cell(START), new_code_cell(OTHER), new_code_cell("run.wait()"), new_code_cell("run.results()")]
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    nbformat.write(new_notebook(cells=cells, metadata=metadata), directory / "sweep.ipynb")
    return directory


def shown(lab: Lab, text: str, cell: int = 0, seconds: float = 60.0) -> None:
    """Wait until the output of a cell contains a text."""
    lab.until(f"document.querySelectorAll('.jp-Cell')[{cell}].innerText.includes({text!r})", seconds)


def test_a_campaign_is_seen_live_and_saved(
    directory: Path, chromium: browser.Browser, mark: str, tmp_path: Path
) -> None:
    """The view moves while another cell runs; at the end a table and a picture are saved, which need no kernel."""
    (directory / "slow").touch()
    lab = Lab(directory, chromium, mark)
    try:
        lab.open("sweep.ipynb", width=1400, height=1500)
        lab.command("notebook:run-all-cells")
        lab.until("document.querySelector('.jp-OutputArea .ft-run')")
        shown(lab, "2 running, 0 waiting")
        shown(lab, "t0.02")
        before = chromium.evaluate("document.querySelector('.ft-run').innerText")
        lab.until(f"document.querySelector('.ft-run').innerText !== {before!r}", seconds=20)
        assert "the other cell is done" not in lab.text(1), "the other cell runs all the time"
        assert chromium.evaluate("document.querySelector('.ft-run canvas').getBoundingClientRect().width") > 300
        assert chromium.evaluate("document.querySelector('.ft-run').getBoundingClientRect().right") <= 1400
        chromium.screenshot(tmp_path / "live.png")
        tab = "[...document.querySelectorAll('.ft-run [role=tab]')].find(e => e.innerText.startsWith('Loss and'))"
        chromium.evaluate(f"{tab}.click()")
        lab.until(f"{tab}.ariaSelected === 'true'")
        time.sleep(1.0)
        chromium.screenshot(tmp_path / "curves.png")

        (directory / "slow").unlink()
        (directory / "go").touch()
        shown(lab, "two: finished, 2 of 2 training jobs finished")
        shown(lab, "'finished'", cell=2)
        lab.until("document.querySelectorAll('.jp-Cell')[0].querySelector('img').naturalWidth > 300")
        assert chromium.evaluate("document.querySelector('.ft-run')") is None, "the picture takes the place of the view"
        shown(lab, "1200", cell=3)
        chromium.screenshot(tmp_path / "end.png")
        lab.save()
        saved = directory / "sweep.ipynb"
        end = time.monotonic() + 30
        while "training jobs finished" not in saved.read_text():
            assert time.monotonic() < end
            time.sleep(0.2)
    finally:
        lab.close()

    text = saved.read_text()
    assert "widget-view" not in text
    assert "data:image/png;base64" in text
    assert RunStore(directory / "run").last_driver() is not None

    lab = Lab(directory, chromium, mark, theme="Dark")  # another server, without the kernel
    try:
        lab.open("sweep.ipynb", width=1400, height=1500)
        shown(lab, "two: finished, 2 of 2 training jobs finished")
        assert "Error displaying widget" not in lab.text(0)
        lab.until("document.querySelectorAll('.jp-Cell')[0].querySelector('img').naturalWidth > 300")
        chromium.screenshot(tmp_path / "saved.png")
    finally:
        lab.close()
