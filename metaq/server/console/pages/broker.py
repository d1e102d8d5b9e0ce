"""This broker: its clients' connections, its settings with their origin, its log, its users, and its threads."""

from collections.abc import Iterable
from typing import Any, Final

from metaq.server.console.visit import PAGE_ROWS, GoTo, PageChange, PageView, Route, Visit, link
from metaq.server.services.brokers import SettingRow, SettingsInput, change_settings, list_connections, show_settings
from metaq.server.services.operating.logs import LogLevel, LogsQuery, show_logs
from metaq.server.services.operating.stacks import show_stacks
from metaq.server.services.operating.users import list_users
from metaq.server.services.rows import NamesQuery

MOST_LINES: Final = 300
"""Log lines of a page."""


def _connections(visit: Visit) -> dict[str, Any]:
    query = visit.asked(NamesQuery, limit=PAGE_ROWS)
    return {"query": query, "page": list_connections(visit.call, query)}


def _settings(visit: Visit) -> dict[str, Any]:
    search = visit.query.get("search", "").strip()
    rows = show_settings(visit.call).rows
    shown = [row for row in rows if search in row.name or search in str(row.value)]
    return {"rows": shown, "search": search, "changeable": _changeable(rows)}


def _changeable(rows: Iterable[SettingRow]) -> dict[str, str]:
    """Return the settings that can change in a running broker, as its form has them."""
    return {row.name: f"{row.value:g}" for row in rows if row.name in SettingsInput.__struct_fields__}


def change_running(visit: Visit) -> GoTo:
    """Change settings of the running broker; those that are as they were are left alone."""
    same = {name: None for name, text in _changeable(show_settings(visit.call).rows).items() if visit.sent.get(name) == text}
    change_settings(visit.call, visit.given(SettingsInput, **same))
    return GoTo(link("settings"), "changed")


def _logs(visit: Visit) -> dict[str, Any]:
    query = visit.asked(LogsQuery, limit=MOST_LINES)
    found = show_logs(visit.call, query)
    return {"query": query, "rows": found.rows[::-1], "levels": [level.value for level in LogLevel]}


def _users(visit: Visit) -> dict[str, Any]:
    query = visit.asked(NamesQuery, limit=PAGE_ROWS)
    has_users = visit.call.interior.endpoint.authentication.has_users
    return {"query": query, "page": list_users(visit.call, query), "has_users": has_users}


def _stacks(visit: Visit) -> dict[str, Any]:
    return {"text": show_stacks(visit.call).text}


_SETTINGS: Final = PageView("/settings", "settings.html", _settings)
ROUTES: Final[tuple[Route, ...]] = (
    PageView("/connections", "connections.html", _connections),
    _SETTINGS,
    PageChange(_SETTINGS.path, change_running, _SETTINGS),
    PageView("/logs", "logs.html", _logs),
    PageView("/users", "users.html", _users),
    PageView("/stacks", "stacks.html", _stacks),
)
