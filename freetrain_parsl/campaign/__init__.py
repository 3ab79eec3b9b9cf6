"""Campaigns: many training jobs defined in one file, run at a site defined in another."""
