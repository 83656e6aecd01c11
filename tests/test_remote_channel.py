"""The channel between the two processes: what is cut off says so, who sends never waits, and nothing is mixed up."""

from __future__ import annotations

import os
import pickle
import socket
import threading

import pytest

from slipstream.engine.remote.channel import CUT_OFF, Channel, Sender


class Late(Channel):
    """Ends when it may."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__(end)
        self.may_end = threading.Event()

    def finish(self) -> None:
        assert self.may_end.wait(60)
        super().finish()


def test_a_channel_that_is_cut_off_says_so() -> None:
    ours, theirs = socket.socketpair()
    one, other = Channel(ours), Channel(theirs)
    sender = Sender(one)
    for message in ("a", ["b" * 1_000_000]):
        sender.put(message)
        assert other.receive() == message
    other.send({"c": 1})
    assert one.receive() == {"c": 1}
    sender.finish()
    with pytest.raises(CUT_OFF):
        other.receive()
    theirs.sendall(pickle.dumps("half a message")[:-5])
    other.close()
    with pytest.raises(CUT_OFF):
        one.receive()
    one.close()


def test_who_sends_never_waits_and_nothing_is_mixed_up() -> None:
    """More than the channel takes at once, from two threads: all of it arrives, each thread's in its order."""
    ours, theirs = socket.socketpair()
    one, other = Channel(ours), Channel(theirs)
    sender = Sender(one)
    assert one.write_now(pickle.dumps("now")) == len(pickle.dumps("now"))
    assert other.receive() == "now"

    def talk(name: str) -> None:
        for i in range(200):
            sender.put((name, i, "x" * (5000 * (i % 7))))

    threads = [threading.Thread(target=talk, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)  # nobody reads yet
        assert not thread.is_alive()
    sender.finish()
    heard = [other.receive() for _ in range(400)]
    assert all(len(text) == 5000 * (i % 7) for _, i, text in heard)
    for name in "ab":
        assert [i for who, i, _ in heard if who == name] == list(range(200))
    with pytest.raises(CUT_OFF):
        other.receive()
    other.close()
    sender.put("to nobody")
    one.close()


def test_nothing_goes_out_behind_the_end() -> None:
    """Though the channel is still open, and has room: half a message might be all that the thread lets through."""
    ours, theirs = socket.socketpair()
    one, other = Late(ours), Channel(theirs)
    sender = Sender(one)
    sender.put("before")
    sender.finish()
    sender.put("behind")
    one.may_end.set()
    assert other.receive() == "before"
    with pytest.raises(EOFError):
        other.receive()
    one.close()
    other.close()


def test_the_channel_is_inherited_once() -> None:
    """Else a process that the engine's starts would keep it open, and nobody would hear that the engine has ended."""
    ours, theirs = socket.socketpair()
    theirs.set_inheritable(True)
    number = theirs.detach()
    other = Channel.of(number)
    assert not os.get_inheritable(number)
    other.close()
    ours.close()
