"""The gallery's pictures are those that its commands make."""

from __future__ import annotations

import re

import matplotlib.image
import numpy as np
import pytest

from tests import gallery

pytestmark = pytest.mark.browser


def difference(made, shown):
    """Return the share of pixels that differ visibly; other fonts make the picture a little larger or smaller."""
    one, other = (matplotlib.image.imread(path)[..., :3] for path in (made, shown))
    assert one.shape == pytest.approx(other.shape, rel=0.1), "another size"
    height, width = np.minimum(one.shape, other.shape)[:2]
    return (np.abs(one[:height, :width] - other[:height, :width]).max(axis=2) > 0.2).mean()


def test_the_page_shows_every_picture():
    shown = re.findall(r"\(images/gallery/(.*)\.png\)", gallery.PAGE.read_text(encoding="utf-8"))
    assert sorted(shown) == sorted([*gallery.PARTS, "live-page"])
    assert sorted(path.stem for path in gallery.PICTURES.iterdir()) == sorted(shown)


@pytest.mark.slow
def test_the_pictures_of_reports_are_up_to_date(chromium, tmp_path):
    gallery.make_reports(chromium, tmp_path, tmp_path)
    for name in gallery.PARTS:
        assert difference(tmp_path / f"{name}.png", gallery.PICTURES / f"{name}.png") < 0.05, name


@pytest.mark.cluster
def test_the_live_page_of_a_real_run(chromium, tmp_path):
    """It takes other times on each machine, so only its parts are compared."""
    gallery.make_live_page(chromium, tmp_path, tmp_path)
    shown = chromium.evaluate("document.body.innerText")
    assert all(word in shown for word in ("digits-sweep", "6 of 6", "Nodes over time", "digits-lr0.1-width32"))
    made = matplotlib.image.imread(tmp_path / "live-page.png")
    shown = matplotlib.image.imread(gallery.PICTURES / "live-page.png")
    assert made.shape == pytest.approx(shown.shape, rel=0.1)
