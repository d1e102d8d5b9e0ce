"""All routes of the console, and what its navigation names."""

from typing import Final, NamedTuple

from metaq.server.console.pages import (
    broker,
    charts,
    cluster,
    deadletters,
    groups,
    leases,
    messages,
    overview,
    timers,
    topics,
    transactions,
)
from metaq.server.console.visit import Route

ROUTES: Final[tuple[Route, ...]] = (
    *overview.ROUTES,
    *charts.ROUTES,
    *topics.ROUTES,
    *messages.ROUTES,
    *timers.ROUTES,
    *transactions.ROUTES,
    *groups.ROUTES,
    *leases.ROUTES,
    *deadletters.ROUTES,
    *cluster.ROUTES,
    *broker.ROUTES,
)


class Section(NamedTuple):
    """A line of the navigation."""

    title: str
    segment: str
    """The first part of its pages' paths; empty for the first page."""


SECTIONS: Final = {
    "": (Section("Overview", ""), Section("Charts", "charts")),
    "Messages": (
        Section("Topics", "topics"),
        Section("Find a message", "search"),
        Section("Delayed", "timers"),
        Section("Recurring", "recurring"),
        Section("In doubt", "transactions"),
    ),
    "Consumers": (Section("Groups", "groups"), Section("Leases", "leases"), Section("Dead letters", "dead-letters")),
    "Brokers": (
        Section("Cluster", "cluster"),
        Section("Connections", "connections"),
        Section("Settings", "settings"),
        Section("Log", "logs"),
        Section("Users", "users"),
        Section("Threads", "stacks"),
    ),
}
"""By heading, in the order in which they are shown."""
