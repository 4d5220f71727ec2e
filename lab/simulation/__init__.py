"""The scheduler in simulated time: workloads, a device without tensors, the run, and its results."""
