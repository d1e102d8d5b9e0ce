"""The return codes of X/Open XA, and the errors that report them (specs: text protocol, section 5.6)."""

import enum

from metaq.errors import MetaqError


class XaCode(enum.IntEnum):
    """Return codes of X/Open XA, under the specification's names without ``XA_`` and ``XAER_``."""

    OK = 0
    RDONLY = 3
    HEURRB = 6
    HEURCOM = 7
    HEURHAZ = 8
    RBOTHER = 104
    RBTIMEOUT = 106
    RMERR = -3
    NOTA = -4
    INVAL = -5
    PROTO = -6
    RMFAIL = -7
    DUPID = -8


class XaError(MetaqError):
    """A refused transaction command: the reply has the status 500 and the body ``wire``."""

    def __init__(self, code: XaCode, text: str, *, bare: bool = False) -> None:
        """Make a refusal; ``bare`` when clients expect the text without the code, as for local transactions and for puts."""
        super().__init__(text)
        self.code = code
        self.bare = bare

    @property
    def wire(self) -> str:
        """``XAException:code=<n>,msg=<text>``, or the text alone; on one line, because clients match only the first."""
        text = " ".join(str(self).splitlines())
        return text if self.bare else f"XAException:code={int(self.code)},msg={text}"
