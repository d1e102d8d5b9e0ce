"""The stacks of all threads and greenlets: what the broker is doing at this moment."""

from typing import Annotated

from msgspec import Meta

from metaq.server.access.permissions import Action
from metaq.server.services.call import Call
from metaq.server.services.rows import Output
from metaq.server.stacks import stacks


class Stacks(Output, frozen=True):
    """The stacks of each thread and each greenlet."""

    text: Annotated[str, Meta(description="As the broker's own tools write it; it differs from version to version.")]


def show_stacks(call: Call) -> Stacks:
    """Return the stacks of all threads and greenlets; for administrators: the broker stands still for some 50 ms meanwhile."""
    call.demand(Action.ADMINISTER)
    return Stacks(text=stacks())
