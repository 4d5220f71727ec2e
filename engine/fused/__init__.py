"""Plain decoders on a GPU: joined products, and one kernel for all that lies between two of them."""
