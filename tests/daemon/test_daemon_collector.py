"""What start-up made is not looked at by later collections."""

import gc

from daemon.collector import freeze_startup


class Node:
    """Refers to itself."""

    def __init__(self) -> None:
        self.me = self


def test_what_lives_at_startup_is_left_out_and_its_garbage_is_freed() -> None:
    kept = Node()

    Node()  # garbage that only a collection finds
    assert any(each is kept for each in gc.get_objects())
    frozen = gc.get_freeze_count()
    freeze_startup()
    assert gc.get_freeze_count() > frozen
    assert not any(isinstance(each, Node) for each in gc.get_objects())
    later = Node()
    assert [each for each in gc.get_objects() if isinstance(each, Node)] == [later]
