"""What a newcomer can leave alone: everything here uses the core, which does not know it."""

ENTRY_POINTS = {"freetrain.windows": {"pbs": "freetrain_parsl.extensions.pbs.system:PbsSystem"}}
"""Group of entry points -> name -> ``module:attribute`` in these extensions."""
