"""Building blocks of FreeTrain's own tests, also for tests of user code.

``policy_suite`` has the contract of a policy as a pytest class, ``tracker_suite`` that of a tracker, ``instances``
random allocation problems, ``exact`` their optimum by dynamic programming.
"""
