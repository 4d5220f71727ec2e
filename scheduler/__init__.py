"""Requests, priority classes, two-phase planning, budgets, preemption, and the device's one worker."""
