"""One-time schedules of taskiq, which metaq keeps itself: no scheduler need run."""

from datetime import UTC

from taskiq import ScheduledTask, ScheduleSource
from taskiq.message import TaskiqMessage
from taskiq.utils import maybe_awaitable

from taskiq_metaq.broker import MetaqBroker


class MetaqScheduleSource(ScheduleSource):
    """A source for ``schedule_by_time``: the task is sent at once, and delivered when it is due.

    ::

        schedule = await task.schedule_by_time(MetaqScheduleSource(broker), tomorrow, "2003")
        await schedule.unschedule()

    The id of a schedule is the handle of its message, so any process can delete it.
    """

    def __init__(self, broker: MetaqBroker) -> None:
        """Create it for tasks of ``broker``, which must be started when it is used."""
        self._broker = broker

    async def get_schedules(self) -> list[ScheduledTask]:
        """Return nothing: what is scheduled is on its way already, so a scheduler has nothing to do."""
        return []

    async def add_schedule(self, schedule: ScheduledTask) -> None:
        """Send a task that is delivered at its time, and give the schedule the id by which it can be deleted.

        Args:
            schedule: what is to be done; a time without a zone is UTC, and one that has passed means now.

        Raises:
            ValueError: it has no time: what recurs needs another source, and a scheduler.
            metaq.MetaqError: no broker takes it.
        """
        if schedule.time is None:
            raise ValueError(f"{schedule.task_name} is scheduled by cron or interval; this source takes a time only")
        message = TaskiqMessage(
            task_id=schedule.task_id or self._broker.id_generator(),
            task_name=schedule.task_name,
            labels=schedule.labels,
            args=schedule.args,
            kwargs=schedule.kwargs,
        )
        for middleware in self._broker.middlewares:
            message = await maybe_awaitable(middleware.pre_send(message))
        at = schedule.time if schedule.time.tzinfo is not None else schedule.time.replace(tzinfo=UTC)
        sent = await self._broker.send(self._broker.formatter.dumps(message), deliver_at=at)
        for middleware in reversed(self._broker.middlewares):
            await maybe_awaitable(middleware.post_send(message))
        schedule.schedule_id = sent.handle or sent.id

    async def delete_schedule(self, schedule_id: str) -> None:
        """Cancel a task. When this returns, no worker will get it; to delete it again does no harm.

        Args:
            schedule_id: the id of its schedule.

        Raises:
            metaq.TooLate: it was delivered before.
            metaq.MetaqError: the id is not one of this source, or the broker cannot be reached.
        """
        await self._broker.client.cancel(schedule_id)
