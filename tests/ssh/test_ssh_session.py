"""Output of one ssh connection: what is shown, and when."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

from holdfast.launchers.ssh.session import Feed

MARK = b"\x01mark "


def test_what_comes_before_the_first_message_is_not_shown_however_fast_the_answer_is() -> None:
    """A greeting without an end of line stands on the same line as the message."""
    shown: list[bytes] = []
    messages: list[bytes] = []
    stream: Any = SimpleNamespace(free=True, put=shown.append)
    screen: Any = SimpleNamespace(mark=MARK, drops=False, edit=lambda lines, *_: lines)
    read, write = os.pipe()

    def on_message(words: bytes) -> None:
        messages.append(words)
        feed.show()  # as the event loop does, which may be faster than the thread that reads

    feed = Feed(read, stream, screen, "node1", on_message, lambda: None)
    os.write(write, b"Welcome\nno line" + MARK + b"facts\n")
    feed.pump(0.0)
    os.write(write, b"of the agent\n")
    os.close(write)
    feed.pump(0.0)
    assert (messages, shown) == ([b"facts\n"], [b"of the agent\n"])
