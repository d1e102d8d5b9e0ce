"""The fence of a store: it keeps a replica from writing while another one is master, or may be."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from metaq.errors import Fenced, MetaqError, NotMaster


def _alone() -> None:
    """Do nothing: no other replica can become master."""


def _released() -> None:
    raise Fenced("the data folder is closed; try again")


class Fence:
    """Open at first, as for a broker without replicas."""

    def __init__(self) -> None:
        self.refusal: NotMaster | None = None
        """Why this replica accepts only the messages of its master; ``None`` when it accepts puts."""
        self._check = _alone

    def close(self, reason: str) -> NotMaster:
        """Refuse puts from now on; return the error that refuses them."""
        self.refusal = NotMaster(reason)
        return self.refusal

    @contextmanager
    def closing(self, reason: str) -> Iterator[None]:
        """Refuse puts from now on, or only for the block if it fails.

        Raise ``NotMaster`` when they are refused already.
        """
        self.check_open()
        refusal = self.close(reason)
        try:
            yield
        except MetaqError:
            if self.refusal is refusal:  # otherwise the role has changed meanwhile
                self.refusal = None
            raise

    def check_open(self) -> None:
        """Raise ``NotMaster`` when puts are refused: a new one, since an error keeps all that it was raised in."""
        if self.refusal is not None:
            raise NotMaster(str(self.refusal))

    def guard(self, check: Callable[[], None]) -> None:
        """Have ``check`` called before each append; it raises ``Fenced`` when another replica may be master by now."""
        self._check = check

    def release(self) -> None:
        """Refuse every append from now on: the folder may be another store's."""
        self._check = _released

    def check(self) -> None:
        """Raise ``Fenced`` when another replica may be master by now."""
        self._check()
