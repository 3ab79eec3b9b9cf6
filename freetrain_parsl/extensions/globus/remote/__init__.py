"""Campaigns at a site from anywhere, through Globus Compute.

Here, at the user's machine: `collection` chooses what travels, `archive` packs it, `compute` calls functions at an
endpoint, `records` remembers what was started, `campaign` is the Python interface. There, at the site: `verbs` answers
the calls, `launch` starts a driver that outlives the endpoint. `messages` has what both say to each other.
"""
