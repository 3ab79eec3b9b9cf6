"""Campaigns: many trainings defined in one file, run at a site defined in another."""
