"""Several sites, one campaign: a coordinator that decides which training is at which site.

`sites_file` reads the list of sites, `coordinator` is the pure state machine on `state`, `answers` checks what sites
say, `places` carries calls to them, `run` is the loop that owns all I/O, with `coordinator_file` in the run directory.
"""
