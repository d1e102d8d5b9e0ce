"""metaq in transactions of the ``transaction`` package, beside a database; needs ``pip install 'metaq-broker[transaction]'``.

::

    with transaction.manager:
        xid = metaq.client.transactions.datamanager.join(session)
        database.add(Order(number=2003))
        database.add(Sent(gtrid=xid.gtrid))
        session.send("orders", b"paid 2003")

The row ``Sent`` is the *marker*: whether the database has it is whether the transaction was committed, whatever died when. So a
branch that is prepared is never rolled back here: only the marker can tell, and ``metaq.client.transactions.xa.resolve`` asks
for it.
"""

import logging
import secrets
from typing import Final

import transaction
from transaction.interfaces import IDataManager
from zope.interface import implementer

from metaq.client.transactions.xa import OutcomeUnknown, XaFailed, XaSession
from metaq.errors import ClientError
from metaq.tx.branches import XaCode
from metaq.tx.xid import Xid

logger = logging.getLogger(__name__)

FORMAT_ID: Final = 0x4D51
"""Of the branches made here."""
_GTRID_BYTES: Final = 16


def join(session: XaSession, manager: transaction.TransactionManager = transaction.manager) -> Xid:
    """Begin a branch that ends with the manager's current transaction; its id, whose ``gtrid`` belongs into the marker row."""
    xid = session.xid(FORMAT_ID, secrets.token_bytes(_GTRID_BYTES), "")
    current = manager.get()
    session.tpc_begin(xid)
    try:
        current.join(_DataManager(session, xid, manager))
    except BaseException:  # the transaction has failed before, and takes nobody in
        session.tpc_rollback()
        raise
    return xid


@implementer(IDataManager)
class _DataManager:
    """One branch in one transaction."""

    def __init__(self, session: XaSession, xid: Xid, manager: transaction.TransactionManager) -> None:
        self.transaction_manager = manager
        self._session = session
        self._xid = xid
        self._prepared = False

    def __repr__(self) -> str:
        return f"<branch {self._xid}>"

    def sortKey(self) -> str:
        """Behind every database, "~sqlalchemy:" included, so that the marker is committed before the branch is."""
        return f"~~metaq:{self._xid}"

    def abort(self, txn: object) -> None:
        """The transaction is given up before it was committed."""
        self._give_up()

    def tpc_begin(self, txn: object) -> None:
        """Everything was begun by ``join``."""

    def commit(self, txn: object) -> None:
        """Prepare here and not in ``tpc_vote``: there a database that is not in two-phase mode commits already."""
        self._session.tpc_prepare()
        self._prepared = True

    def tpc_vote(self, txn: object) -> None:
        """The vote was cast in ``commit``."""

    def tpc_finish(self, txn: object) -> None:
        """The database has committed, so the outcome is certain, and no answer from the broker only puts it off."""
        try:
            self._session.tpc_commit()
        except OutcomeUnknown:
            self._commit_again()

    def tpc_abort(self, txn: object) -> None:
        """Another one could not be prepared or committed."""
        self._give_up()

    def _commit_again(self) -> None:
        """Once: a connection may break where the broker is well."""
        try:
            self._session.tpc_commit(self._xid)
        except OutcomeUnknown as error:
            logger.error("branch not committed yet, resolve() will do it xid=%s reason=%s", self._xid, error)
        except XaFailed as error:
            if error.code != XaCode.NOTA:  # the first commit has arrived
                raise

    def _give_up(self) -> None:
        if self._session.branch != self._xid:
            return
        if self._prepared:
            # the database may have committed without its answer arriving
            self._session.leave()
            logger.warning("branch left prepared, resolve() will decide xid=%s", self._xid)
            return
        try:
            self._session.tpc_rollback()
        except ClientError as error:
            logger.warning("branch not rolled back, the broker or resolve() will do it xid=%s reason=%s", self._xid, error)
