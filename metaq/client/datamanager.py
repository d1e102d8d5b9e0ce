"""XA branches in transactions of the ``transaction`` package, together with a database.

It needs ``pip install 'metaq-broker[transaction]'``.

::

    with transaction.manager:
        xid = metaq.client.datamanager.join(session)
        database.add(Order(number=2003))
        database.add(Sent(gtrid=xid.gtrid))
        session.send("orders", b"paid 2003")

The row ``Sent`` is the *marker*: the transaction was committed if and only if the database has it, whichever process failed. So
a prepared branch is never rolled back here. Only the marker can decide, and ``metaq.client.xa.resolve`` asks for
it.
"""

import logging
import secrets
from typing import Final

import transaction
from transaction.interfaces import IDataManager
from zope.interface import implementer

from metaq.client.xa import OutcomeUnknown, XaFailed, XaSession
from metaq.errors import ClientError
from metaq.tx.xacodes import XaCode
from metaq.tx.xid import Xid

logger = logging.getLogger(__name__)

FORMAT_ID: Final = 0x4D51
"""The XA format id of the branches made here."""
_GTRID_BYTES: Final = 16


def join(session: XaSession, manager: transaction.TransactionManager = transaction.manager) -> Xid:
    """Begin a branch that ends with the manager's current transaction, and return its id; store ``gtrid`` in the marker row."""
    xid = session.xid(FORMAT_ID, secrets.token_bytes(_GTRID_BYTES), "")
    current = manager.get()
    session.tpc_begin(xid)
    try:
        current.join(_DataManager(session, xid, manager))
    except BaseException:  # a transaction that has already failed accepts no data manager
        session.tpc_rollback()
        raise
    return xid


@implementer(IDataManager)
class _DataManager:
    """The data manager of one branch in one transaction."""

    def __init__(self, session: XaSession, xid: Xid, manager: transaction.TransactionManager) -> None:
        self.transaction_manager = manager
        self._session = session
        self._xid = xid
        self._prepared = False

    def __repr__(self) -> str:
        return f"<branch {self._xid}>"

    def sortKey(self) -> str:
        """Sort after every database, including "~sqlalchemy:", so that the marker is committed before the branch."""
        return f"~~metaq:{self._xid}"

    def abort(self, txn: object) -> None:
        """Give up the branch, because the transaction is aborted before its commit."""
        self._give_up()

    def tpc_begin(self, txn: object) -> None:
        """Do nothing: ``join`` has begun the branch."""

    def commit(self, txn: object) -> None:
        """Prepare the branch here and not in ``tpc_vote``, where a database that is not in two-phase mode already commits."""
        self._session.tpc_prepare()
        self._prepared = True

    def tpc_vote(self, txn: object) -> None:
        """Do nothing: ``commit`` has prepared the branch."""

    def tpc_finish(self, txn: object) -> None:
        """Commit the branch. The database has committed, so the outcome is certain; without an answer it is only delayed."""
        try:
            self._session.tpc_commit()
        except OutcomeUnknown:
            self._commit_again()
        except XaFailed as error:
            if error.code == XaCode.NOTA:  # the marker is there, so whoever else finished the branch has committed it
                logger.warning("branch was over before its commit xid=%s", self._xid)
            elif error.code != XaCode.HEURCOM:  # HEURCOM: an operator has committed it meanwhile
                raise

    def tpc_abort(self, txn: object) -> None:
        """Give up the branch, because another data manager could not prepare or commit."""
        self._give_up()

    def _commit_again(self) -> None:
        """Try the commit once more, because the connection may have broken although the broker is well."""
        try:
            self._session.tpc_commit(self._xid)
        except OutcomeUnknown as error:
            logger.error("branch not committed yet, resolve() will do it xid=%s reason=%s", self._xid, error)
        except XaFailed as error:
            if error.code not in (XaCode.NOTA, XaCode.HEURCOM):  # NOTA: the first commit was carried out
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
