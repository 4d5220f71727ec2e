"""llama.cpp's server, as the package xllamacpp has it: prints its port, and serves until standard input ends.

A program for that package's environment: it imports only that and the standard library.
"""

import sys
from urllib.parse import urlsplit


def main(weights: str, threads: int, context: int) -> None:
    """One slot: each prompt of a request finds the beginning that it shares with the one before."""
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path = weights
    settings.n_ctx, settings.n_parallel = context, 1
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = threads
    settings.hostnames, settings.port = ["127.0.0.1"], 0
    server = xllamacpp.Server(settings)
    print("port", urlsplit(server.listening_address).port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
