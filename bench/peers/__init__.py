"""Our engine beside others on the same scenario: each in a process of its own, one running at a time."""
