"""The server's state of one node between two hellos."""

from dataclasses import dataclass

from fedfrozen_app.exchange.hello_messages import Hello


@dataclass
class NodeState:
    """The server's state of one node."""

    hello: Hello | None = None  # of a node that takes part
    name: str | None = None  # its reported name, whether it takes part or not
    open_hello: tuple[str, float] | None = None  # a hello without an answer: message id, end of its lifetime
    retry: tuple[float, float] | None = None  # time of refusal or waiting; seconds until the next hello
    refusal: str | None = None  # why it does not take part
    waiting: bool = False  # a person at the site has yet to approve the run

    def may_ask(self, now: float) -> bool:
        """Whether a hello may be sent: none is open, and none too soon after a refusal (sites count them)."""
        if self.open_hello is not None and now <= self.open_hello[1]:
            return False
        when, pause = self.retry or (now, 0.0)
        return now - when >= pause
