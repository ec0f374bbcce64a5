"""What the server knows of one node between two hellos."""

from dataclasses import dataclass

from fedfrozen_app.exchange.hello_messages import Hello


@dataclass
class NodeState:
    """What the server knows of one node."""

    hello: Hello | None = None  # of a node that takes part
    name: str | None = None  # the name that it gave, whether it takes part or not
    open_hello: tuple[str, float] | None = None  # a hello without an answer: message id, end of its lifetime
    retry: tuple[float, float] | None = None  # when it refused or waits; seconds until it is asked again
    refusal: str | None = None  # why it does not take part
    waiting: bool = False  # a person at the site has yet to approve the run

    def may_ask(self, now: float) -> bool:
        """Whether no hello is on its way. Sites count requests: do not ask again at once after a refusal."""
        if self.open_hello is not None and now <= self.open_hello[1]:
            return False
        when, pause = self.retry or (now, 0.0)
        return now - when >= pause
