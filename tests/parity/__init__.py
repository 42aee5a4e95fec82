"""The parity suite: every case runs on torch's DataLoader and on ours, from the same seed, and must look the same.

``compare`` runs and judges; ``samples`` holds the datasets; ``cases_*`` hold the declarative cases; ``test_*`` run
them, and hold what does not fit a declaration. ``PARITY_SELF=1`` puts torch's class in both roles: that proves that the
suite itself is deterministic and asks for nothing that torch does not do.
"""
