"""Clients of a Foretick daemon, over ZeroMQ or HTTP: `QueryClient` blocks, `AsyncQueryClient` awaits.

`history` makes a frame of answers of the past. The other modules are made from the daemon's own when the
distribution is built; see its setup.py.
"""

from foretick_client.answer_history import history
from foretick_client.blocking import EventStream
from foretick_client.client import AsyncQueryClient, QueryClient
from foretick_client.dealer import ClientKeys
from foretick_client.messages import AskReply, LostMessage, QueryError
from foretick_client.records import Answer, DataUpdated, FlashReady, Signal
from foretick_client.subscriptions import AsyncEventStream, SubscriptionUpdate

__all__ = [
    "Answer",
    "AskReply",
    "AsyncEventStream",
    "AsyncQueryClient",
    "ClientKeys",
    "DataUpdated",
    "EventStream",
    "FlashReady",
    "LostMessage",
    "QueryClient",
    "QueryError",
    "Signal",
    "SubscriptionUpdate",
    "history",
]
