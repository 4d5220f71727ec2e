"""The dashboards, each small and for one reader."""

from dashboards.boards import (
    answers_board,
    delivery_board,
    engine_board,
    feeds_board,
    latency_board,
    overview_board,
    scheduler_board,
)
from dashboards.panels import Board

BOARDS: tuple[Board, ...] = (
    Board("overview", "For a wall: is it up, fresh and complete?", overview_board.rows),
    Board(
        "latency", "Where the time from a tick to its answer goes, and what clients wait.", latency_board.rows
    ),
    Board("feeds", "What comes in, what is wrong with it, and what was lost.", feeds_board.rows),
    Board("answers", "What is published and kept back, and how far it can be trusted.", answers_board.rows),
    Board("engine", "Passes, memory, snapshots and restarts of the model's process.", engine_board.rows),
    Board(
        "scheduler", "Who waits for what, who is preempted, and what each tenant takes.", scheduler_board.rows
    ),
    Board(
        "delivery",
        "Commits, transactions, hand-overs, listeners and the daemons of a group.",
        delivery_board.rows,
    ),
)
