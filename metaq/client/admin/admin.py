"""Administration: all that a program may do, as one object."""

from metaq.client.admin.groups import GroupAdmin
from metaq.client.admin.leases import LeaseAdmin
from metaq.client.admin.messages import MessageAdmin
from metaq.client.admin.offsetexport import OffsetExport
from metaq.client.admin.replicas import ReplicaAdmin
from metaq.client.admin.timers import TimerAdmin
from metaq.client.admin.transactions import TransactionAdmin


class Admin(GroupAdmin, MessageAdmin):
    """The administration of a cluster; made by ``Client.admin``. Threads may share it.

    All methods raise ``Refused`` when a broker refuses, and ``RouteNotFound`` or ``ConnectionFailed`` when a registry or a
    broker cannot be reached.
    """

    def transactions(self) -> TransactionAdmin:
        """Return the administration of undecided XA branches and transactional messages."""
        return TransactionAdmin(self._core)

    def timers(self) -> TimerAdmin:
        """Return the administration of delayed and recurring messages."""
        return TimerAdmin(self._core)

    def leases(self) -> LeaseAdmin:
        """Return the administration of leased messages."""
        return LeaseAdmin(self._core)

    def replicas(self) -> ReplicaAdmin:
        """Return the administration of replicas and their roles."""
        return ReplicaAdmin(self._core)

    def offset_export(self) -> OffsetExport:
        """Return the export of all groups' offsets, now and in the past."""
        return OffsetExport(self._core, self.query_by_time)
