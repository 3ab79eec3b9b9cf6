"""A small real batch system on one machine, for where there is no other.

``scheduling`` is its pure core, ``daemon`` the process that turns it with real jobs, ``client`` how to reach
that process, ``provider`` how Parsl does, ``workload`` and ``swf`` the main queue that keeps it busy.
"""
