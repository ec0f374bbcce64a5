"""Give a run's process time to start.

Flower's SuperLink takes a run's task back after 30 s without a heartbeat and has another process started. On
a busy machine none of them gets as far as its first heartbeat, and the run never begins.
"""

from fedfrozen_app.core.flower_internals import in_memory_corestate as memory
from fedfrozen_app.core.flower_internals import sql_corestate as sql


def allow_slow_starts(seconds: float) -> None:
    """For the SuperLink of this process, whether it keeps its state in a database or in memory."""
    claim_row, claim_record = sql.SqlCoreState.claim_task, memory.InMemoryCoreState.claim_task

    def claimed_row(self: sql.SqlCoreState, task_id: int) -> str | None:
        token: str | None = claim_row(self, task_id)
        if token is not None:
            until = sql.now() + sql.timedelta(seconds=seconds)
            with self.session() as session:
                task = sql.update(sql.TaskModel).where(sql.TaskModel.token == token)
                session.execute(task.values(active_until=until))
        return token

    def claimed_record(self: memory.InMemoryCoreState, task_id: int) -> str | None:
        token: str | None = claim_record(self, task_id)
        if token is not None:
            with self.lock_task_store:
                until = memory.now() + memory.timedelta(seconds=seconds)
                self.task_token_store[task_id].active_until = until
        return token

    sql.SqlCoreState.claim_task = claimed_row  # type: ignore[method-assign]
    memory.InMemoryCoreState.claim_task = claimed_record  # type: ignore[method-assign]
