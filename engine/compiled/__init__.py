"""Plain decoders as a few compiled calls a layer."""
