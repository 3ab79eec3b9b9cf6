"""Chaos episodes: real training jobs under seeded faults, with exact accounting by the training jobs themselves.

``bare`` episodes run the real driver, job submitter, control channel and slots in forked processes, without HTEX, and
last seconds. ``campaign`` episodes run whole ``freetrain run`` campaigns on an embedded cluster and last minutes.
Training jobs share nodes in ``shared`` and ``shared-campaign`` episodes. All end with the same check: every sample
contributed to the final parameters exactly once per epoch, and deterministic training jobs are bitwise identical to an
undisturbed run.

Run them with ``python -m tests.support.chaos`` or ``make chaos``; see ``docs/howto/inject-faults.md``.
"""

from __future__ import annotations

from tests.support.chaos.episode import EpisodeReport, StruckFault

__all__ = ["EpisodeReport", "StruckFault"]
