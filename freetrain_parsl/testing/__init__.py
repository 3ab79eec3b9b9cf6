"""What FreeTrain's own tests are made of, shipped for the tests of yours.

``policy_suite`` has the contract of a policy as a pytest class, ``instances`` random allocation problems,
``exact`` their optimum by dynamic programming.
"""
