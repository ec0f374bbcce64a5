"""Apply an algorithm's `finish` to a block of trained clients."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedfrozen_app.exchange.block import Block, Layout
from fedfrozen_app.exchange.names import by_namespace, flattened
from fedfrozen_app.local.algorithm import ByNamespace, Finished
from fedfrozen_app.local.client_optimizer import learning_rate
from fedfrozen_app.local.layouts import Layouts
from fedfrozen_app.local.round_work import RoundWork
from fedfrozen_app.local.slots import SlotAssignment
from fedfrozen_app.local.stacked_calls import finish_rows


def finish_block(
    block: Block, work: RoundWork, held: Tensor, assignments: Sequence[SlotAssignment]
) -> Finished | None:
    """The algorithm's `finish` for the block's clients; None where it adds nothing."""
    request, config = work.request, work.worker.config
    if request.method.adds_nothing():
        return None
    steps = torch.tensor([one.end - one.begin for one in assignments]).to(block.values)
    rate = learning_rate(config.client, request.round, config.num_rounds)
    common = (work.layouts, work.worker.parameters, work.from_server, request)
    return finish_rows(*common, block.values, held, steps, rate)


def own_arrays(
    layouts: Layouts, block: Block, held: Tensor, done: Finished | None, number: int
) -> ByNamespace:
    """The client state of one client of a block after training."""
    own = by_namespace(layouts.held.views(held[number])) | by_namespace(block.slice(number))
    renewed = {} if done is None else done.client_state
    return own | {space: {n: value[number] for n, value in a.items()} for space, a in renewed.items()}


def with_finished(block: Block, done: Finished) -> Block:
    """The block with the arrays that the algorithm returned, to keep or to send."""
    reply, own = flattened(done.to_server), flattened(done.client_state)
    layout, values, base = block.layout, block.values, block.base
    if done.model:
        views = layout.views(values)
        values = torch.stack(
            [layout.flatten({n: done.model.get(n, views[n])[i] for n in views}) for i in range(len(values))]
        )
    if reply:
        reply_layout = Layout.of({name: value[0] for name, value in reply.items()})
        sent = [reply_layout.flatten({n: value[i] for n, value in reply.items()}) for i in range(len(values))]
        values = torch.cat([values, torch.stack(sent)], dim=1)
        base = torch.cat([base, base.new_zeros(reply_layout.width)])
        layout = layout.followed_by(reply_layout)
    kept = [
        {**(block.kept[i] if block.kept else {}), **{name: value[i].clone() for name, value in own.items()}}
        for i in range(len(values))
    ]
    return replace(
        block,
        layout=layout,
        values=values,
        base=base,
        kept=kept if any(kept) else (),
        metrics={**block.metrics, **done.metrics},
    )
