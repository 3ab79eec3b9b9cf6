"""Runs in a notebook: started in the background, shown while other cells run, found again after a restart.

`Campaign` starts a campaign or attaches to its run; `watch` shows training jobs that were submitted in this notebook,
or any run directory.
"""

from freetrain_parsl.extensions.notebook.campaign import NotebookCampaign as Campaign
from freetrain_parsl.extensions.notebook.watching import watch

__all__ = ["Campaign", "watch"]
