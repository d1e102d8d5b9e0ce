"""The errors of XA branches."""

from typing import Final

from metaq.errors import ClientError
from metaq.tx.xacodes import XaCode
from metaq.tx.xid import Xid

_NAMES: Final = {int(code): code.name for code in XaCode}


class XaFailed(ClientError):
    """The broker answered a transaction command with one of XA's codes."""

    def __init__(self, code: int, text: str, xid: Xid | None) -> None:
        named = _NAMES.get(code, "a code of its own")
        super().__init__(f"the broker answered {named} ({code}): {text}")
        self.code = code
        """One of ``metaq.tx.xacodes.XaCode``, or another number if the broker knows further codes."""
        self.text = text
        self.xid = xid


class OutcomeUnknown(ClientError):
    """A step of a branch got no answer, or the answer RMFAIL; it may or may not have been carried out."""

    def __init__(self, xid: Xid, step: str, advice: str, reason: ClientError) -> None:
        super().__init__(f"{step} of {xid} may or may not have been carried out ({reason}); {advice}")
        self.xid = xid
