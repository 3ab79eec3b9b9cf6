"""The report of a replay as one HTML page."""

from freetrain_parsl.extensions.replay.page.frame import write_page

__all__ = ["write_page"]
