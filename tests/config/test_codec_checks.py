"""What a codec goes with: everything else ends with one sentence and exit code 2."""

import pytest

from fedfrozen_app.config import compose_run
from fedfrozen_app.core.errors import UserError

AUDITED = ("privacy=dp_sgd", "privacy.epsilon=8", "privacy.audited=0")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("codec=int8", "strategy=feddyn"), "that agree only if updates arrive exactly: use codec=none, or"),
        (("codec=topk", "strategy=scaffold", "client=sgd"), "use codec=float16, bfloat16, int8 or int4."),
        (("codec=randomk", "strategy=fednova", "client=sgd"), "weights each round's updates by numbers of"),
        (("codec=topk", "codec.name=keep"), "codec=keep is the codec of strategy.keep: set that"),
        (("codec=int8", "strategy=safl", "strategy.keep=0.5"), "strategy.keep=0.5 already codes uploads"),
        (("codec=int8", *AUDITED), "and codec=int8 rounds it on the way: use codec=none for the audit"),
        (("codec=topk", "adapter=lora", "adapter.rule=fedex"), "use adapter.rule=average or ffa"),
        (("codec=int8", "adapter=lora", "+adapter.ranks.0=2"), "codec=int8 codes all of one"),
        (("codec=lowrank", "adapter=lora"), "adapter=lora trains such factors already: use codec=int8, or"),
        (("codec.down=lowrank", "adapter=lora"), "use codec.down=int8, or adapter=none."),
        (("codec=lowrank", "strategy=scaffold", "client=sgd"), "use codec=float16, bfloat16, int8 or int4."),
        (("codec=int8", "codec.rank=4"), "codec=int8 ignores codec.rank: add codec=lowrank"),
        (("codec.down=int8", "strategy=feddyn"), "agree only without that: leave codec.down=int8 out."),
        (("codec.down=keep",), "codec.down=keep codes uploads alone: use codec.down=int8, or"),
        (("codec.down=int9",), "Unknown codec 'int9': did you mean int"),
        (("codec.down=int8", "adapter=lora", "adapter.rule=stack"), "use adapter.rule=average or ffa"),
        (("codec.down=int8", "adapter=lora", "+adapter.ranks.0=2"), "adapter.ranks sends every client"),
        (
            ("codec.down=topk", "codec.block=64"),
            "codec.down=topk ignores codec.block: add codec=int8 or int4",
        ),
        (("codec.block=64",), "codec=none ignores codec.block: add codec=int8 or another codec"),
        (("codec=topk", "codec.block=64"), "codec=topk ignores codec.block: add codec=int8 or int4"),
        (("codec=int8", "codec.share=0.5"), "codec=int8 ignores codec.share: add codec=topk or randomk"),
        (("codec=float16", "codec.rotate=true"), "codec=float16 ignores codec.rotate"),
        (("codec=topk", "codec.share=0"), "codec.share=0.0 is out of range"),
        (("codec=int8", "codec.name=int9"), "Unknown codec 'int9': did you mean int"),
    ],
)
def test_what_cannot_work_is_refused(words, sentence):
    with pytest.raises(UserError) as error:
        _ = compose_run(list(words)).config
    assert sentence in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "words",
    [
        ("codec=int8", "strategy=scaffold", "client=sgd"),
        ("codec=float16", "strategy=fednova", "client=sgd"),
        ("codec=topk", "adapter=lora"),
        ("codec=int4", "privacy=dp_sgd"),
        ("codec=int8", "adapter=lora", "adapter.rule=stack"),
        ("codec=none", "codec.down=int8", "codec.block=64", "secure_aggregation=on"),
        ("codec=topk", "codec.down=int4", "codec.block=64", "codec.share=0.01"),
    ],
)
def test_what_can_work_is_not(words):
    assert compose_run(list(words)).config.codec.name == words[0].partition("=")[2]
