"""The live page of a run, served on this host: see ``freetrain dashboard``."""
