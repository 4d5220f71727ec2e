"""An engine process without a model: ready at once, sends heartbeats, and stops on command."""

import pickle
import sys

import zmq

from daemon import protocol
from daemon.api.generation import ModelEntry
from daemon.engine.spec import EngineSpec


def main() -> None:
    spec = pickle.load(sys.stdin.buffer)
    try:
        while not isinstance(spec, EngineSpec):  # a spare
            spec = pickle.load(sys.stdin.buffer)
    except EOFError:
        return
    context = zmq.Context()
    commands, events = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    commands.connect(spec.commands)
    events.connect(spec.events)
    events.send(protocol.encode(protocol.EngineReady((ModelEntry("idle", ""),))))
    while True:
        if commands.poll(500) and isinstance(protocol.decode_command(commands.recv()), protocol.StopEngine):
            break
        events.send(protocol.encode(protocol.EngineHeartbeat(0, True)))
    events.send(protocol.encode(protocol.EngineStopped(True)))
    events.close()
    commands.close()
    context.term()


if __name__ == "__main__":
    main()
