"""The engine process: the model, the scheduler and the data plane behind one object."""
