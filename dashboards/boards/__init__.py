"""The dashboards, each small and for one reader."""

from dashboards.boards import answers, delivery, engine, feeds, latency, overview, scheduler
from dashboards.panels import Board

BOARDS: tuple[Board, ...] = (
    Board("overview", "For a wall: is it up, fresh and complete?", overview.rows),
    Board("latency", "Where the time from a tick to its answer goes, and what clients wait.", latency.rows),
    Board("feeds", "What comes in, what is wrong with it, and what was lost.", feeds.rows),
    Board("answers", "What is published and kept back, and how far it can be trusted.", answers.rows),
    Board("engine", "Passes, memory, snapshots and restarts of the model's process.", engine.rows),
    Board("scheduler", "Who waits for what, who is preempted, and what each tenant takes.", scheduler.rows),
    Board(
        "delivery", "Commits, transactions, hand-overs, listeners and the daemons of a group.", delivery.rows
    ),
)
