"""The embedded cluster: a small batch system with real jobs on one machine.

``scheduling`` is its pure core, ``daemon`` the process that runs it with real jobs, ``client`` the interface to that
process, ``provider`` Parsl's provider, and ``workload`` and ``swf`` the main queue that keeps it busy.
"""
