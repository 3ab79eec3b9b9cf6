"""Several sites, one campaign: a coordinator that decides which training job is at which site.

`sites_file` reads the list of sites, `coordinator` is the pure state machine on `state`, which also checks what sites
say. `places` carries calls to them, and `run` is the loop that owns all I/O, with its run directory.
"""
