"""What can go wrong with XA branches."""

from typing import Final

from metaq.errors import ClientError
from metaq.tx.branches import XaCode
from metaq.tx.xid import Xid

_NAMES: Final = {int(code): code.name for code in XaCode}


class XaFailed(ClientError):
    """The broker answered a transaction command with one of XA's codes."""

    def __init__(self, code: int, text: str, xid: Xid | None) -> None:
        named = _NAMES.get(code, "a code of its own")
        super().__init__(f"the broker answered {named} ({code}): {text}")
        self.code = code
        """One of ``metaq.tx.branches.XaCode``, or another number from a broker that knows others."""
        self.text = text
        self.xid = xid


class OutcomeUnknown(ClientError):
    """No answer to a step in the life of a branch, or RMFAIL, that it is not certain yet: it may or may not be carried out."""

    def __init__(self, xid: Xid, step: str, advice: str, reason: ClientError) -> None:
        super().__init__(f"{step} of {xid} may or may not have been carried out ({reason}); {advice}")
        self.xid = xid
