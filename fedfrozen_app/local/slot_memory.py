"""How many clients a GPU's free memory holds at once, measured with real steps."""

from typing import TYPE_CHECKING

import torch

from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.local.layouts import Layouts, loaded_row
from fedfrozen_app.local.slots import lay_out
from fedfrozen_app.local.step import Step

if TYPE_CHECKING:
    from fedfrozen_app.local.worker import Worker

MEMORY_SHARE = 0.85  # share of the free device memory that the slots may fill


def fitting_clients(worker: "Worker", layouts: Layouts, client: str, request: TrainRequest) -> int:
    """How many clients fit: the free memory divided by what one more client needs in a real step."""
    peaks = []
    for size in (1, 2):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = try_step(worker, layouts, client, request, size)
        torch.cuda.synchronize()
        # Three results: of the block being aggregated, of the finished one and of the next.
        peaks.append(torch.cuda.max_memory_allocated() - before + 3 * size * result)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    if (share := torch.cuda.get_per_process_memory_fraction()) < 1:
        # Other processes share the GPU. This process's share must not depend on how fast they are.
        free = int(share * total) - torch.cuda.memory_reserved()
    fixed, each = 2 * peaks[0] - peaks[1], max(peaks[1] - peaks[0], 1)
    return max(1, int((MEMORY_SHARE * free - max(fixed, 0)) // each))


def try_step(worker: "Worker", layouts: Layouts, client: str, request: TrainRequest, size: int) -> int:
    """Take one step of this many clients and discard it; returns the bytes of one client's result."""
    step = Step(worker, layouts, size, request, mode="eager")
    schedule = lay_out(worker, [client] * size, request, size)
    received, parameters = layouts.from_server, worker.parameters
    step.begin(request, received.views(loaded_row(parameters, received)) if received.names else {})
    start = loaded_row(parameters, layouts.trained)
    step.admit(range(size), [start] * size)
    step.run(schedule.index[0], schedule.mask[0])
    return start.nbytes
