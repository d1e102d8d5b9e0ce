"""All routes of the console, and what its navigation names."""

from typing import Final, NamedTuple

from metaq.server.console.pages import groups, messages, overview, topics
from metaq.server.console.visit import Route

ROUTES: Final[tuple[Route, ...]] = (*overview.ROUTES, *topics.ROUTES, *messages.ROUTES, *groups.ROUTES)


class Section(NamedTuple):
    """A line of the navigation."""

    title: str
    segment: str
    """The first part of its pages' paths; empty for the first page."""


SECTIONS: Final = {
    "": (Section("Overview", ""),),
    "Messages": (Section("Topics", "topics"), Section("Find a message", "search")),
    "Consumers": (Section("Groups", "groups"),),
}
"""By heading, in the order in which they are shown."""
