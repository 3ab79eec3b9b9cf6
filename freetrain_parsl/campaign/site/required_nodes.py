"""Whether a site has the nodes that the trainings of a campaign require."""

from __future__ import annotations

from typing import TYPE_CHECKING

from freetrain_parsl.campaign.site.providers import make_window_source
from freetrain_parsl.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Mapping

    from freetrain_parsl.campaign.files.campaign import Campaign, CampaignTraining
    from freetrain_parsl.campaign.site.site import Site

__all__ = ["refuse_impossible", "refuse_too_large"]


def refuse_impossible(campaign: Campaign, site: Site) -> None:
    """Reject trainings that require kinds of nodes, or more nodes, than the site file states.

    Raises
    ------
    InvalidInput
        There is such a training; the message has its place in the campaign file.
    """
    known = {kind.name for kind in site.kinds}
    for training in campaign.trainings:
        for kind in training.app.node_kinds:
            if kind not in known:
                choices = (
                    f"the kinds of {site.file} are {', '.join(sorted(known))}" if known else f"{site.file} has none"
                )
                raise InvalidInput(
                    f"{training.kinds_at}: training {training.name!r} needs nodes of kind {kind!r}; {choices}"
                )
    _refuse_larger(campaign, site.node_counts, site.file)


def refuse_too_large(campaign: Campaign, site: Site) -> None:
    """Reject trainings that require more nodes than the batch system has for the site's blocks; query it if needed.

    Raises
    ------
    InvalidInput
        There is such a training; the message has its place in the campaign file.
    BatchSystemError
        The batch system did not answer.
    """
    if all(_min_nodes(training) == 1 for training in campaign.trainings):
        return
    survey = make_window_source(site).survey()
    counts = survey.nodes_by_kind or ({} if survey.nodes is None else {"": survey.nodes})
    _refuse_larger(campaign, counts, "the batch system")


def _refuse_larger(campaign: Campaign, counts: Mapping[str, int], owner: str) -> None:
    """Reject trainings that require more nodes than there are of each kind that they may use, as far as known."""
    for training in campaign.trainings:
        kinds = training.app.node_kinds or tuple(counts)
        needed = _min_nodes(training)
        if not counts or any(kind not in counts or needed <= counts[kind] for kind in kinds):
            continue
        sizes = " and ".join(f"{counts[kind]} of kind {kind!r}" if kind else str(counts[kind]) for kind in kinds)
        raise InvalidInput(
            f"{training.min_nodes_at}: training {training.name!r} needs min_nodes={needed} nodes at the same time"
            f"{', all of one kind' if any(kinds) else ''}, but {owner} has only {sizes}; lower min_nodes"
        )


def _min_nodes(training: CampaignTraining) -> int:
    return training.app.request(training.name).min_nodes
