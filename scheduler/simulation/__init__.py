"""The scheduler in simulated time: workloads, a device that only counts, the loop, and its results."""
