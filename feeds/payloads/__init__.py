"""What messages hold, as records: in our own wire form, or in a declared format."""
