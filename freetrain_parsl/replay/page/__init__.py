"""The report of a replay as one HTML page."""

from freetrain_parsl.replay.page.frame import write_page

__all__ = ["write_page"]
