"""A broker whose disk is as slow as a test wants it, and fails when the test wants that."""

from pathlib import Path
from typing import Final

from tests.support.broker import BrokerProcess

SMALL: Final = ("--segment-bytes", "1048576", "--max-body-bytes", "65536")


class Controlled(BrokerProcess):
    """A broker at DISK whose syncs a test stalls and fails."""

    program = ("tests.support.controlled",)

    def __init__(self, data: Path, *flags: str) -> None:
        super().__init__(data, *SMALL, "--checkpoint-interval-ms", "600000", *flags, durability="disk")
        self._stall, self._fail = data.with_name("stall"), data.with_name("fail")

    def stall(self) -> None:
        self._stall.touch()

    def go_on(self, *, failing: bool = False) -> None:
        if failing:
            self._fail.touch()
        self._stall.unlink()

    def recover(self) -> None:
        self._fail.unlink()
