"""Campaigns at a site from anywhere, through Globus Compute.

Here, at the user's machine: `collection` chooses what travels, `archive` packs it, `compute` calls functions at an
endpoint, `campaign` is the Python interface, which remembers what was started. There, at the site: `verbs` answers
the calls, `launch` starts a driver that outlives the endpoint. `messages` has what both say to each other.
"""
