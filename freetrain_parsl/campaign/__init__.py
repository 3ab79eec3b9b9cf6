"""Campaigns: many trainings described in a file, run at a site described in another."""
