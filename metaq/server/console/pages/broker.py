"""This broker: its clients' connections, its settings with their origin, its log, its users, and its threads."""

from collections.abc import Iterable
from typing import Any, Final

from metaq.server.console.visit import GoTo, PageChange, PageView, Route, Visit, link, list_page, rows_page
from metaq.server.services.brokers import SettingRow, SettingsInput, change_settings, list_connections, show_settings
from metaq.server.services.operating.logs import LogLevel, LogsQuery, show_logs
from metaq.server.services.operating.stacks import show_stacks
from metaq.server.services.operating.users import list_users
from metaq.server.services.rows import MOST_ROWS, NamesQuery, RowPage, page_of

MOST_LINES: Final = 300
"""Log lines of a page."""


def _settings(visit: Visit, query: NamesQuery) -> dict[str, Any]:
    rows = show_settings(visit.call).rows
    page = page_of(visit.call, rows, query, lambda row: f"{row.name} {row.value}", lambda row: row)
    return {"page": page, "changeable": _changeable(rows)}


def _changeable(rows: Iterable[SettingRow]) -> dict[str, str]:
    """Return the settings that can change in a running broker, as its form has them."""
    return {row.name: f"{row.value:g}" for row in rows if row.name in SettingsInput.__struct_fields__}


def change_running(visit: Visit) -> GoTo:
    """Change settings of the running broker; those that are as they were are left alone."""
    same = {name: None for name, text in _changeable(show_settings(visit.call).rows).items() if visit.sent.get(name) == text}
    change_settings(visit.call, visit.given(SettingsInput, **same))
    return GoTo(link("settings"), "changed")


def _logs(visit: Visit, query: LogsQuery) -> dict[str, Any]:
    newest_first = RowPage(rows=show_logs(visit.call, query).rows[::-1], next=None)
    return {"page": newest_first, "levels": [level.value for level in LogLevel]}


def _users(visit: Visit, query: NamesQuery) -> dict[str, Any]:
    has_users = visit.call.interior.endpoint.authentication.has_users
    return {"page": list_users(visit.call, query), "has_users": has_users}


def _stacks(visit: Visit) -> dict[str, Any]:
    return {"text": show_stacks(visit.call).text}


_SETTINGS: Final = list_page("/settings", "settings.html", NamesQuery, _settings, limit=MOST_ROWS)
ROUTES: Final[tuple[Route, ...]] = (
    rows_page("/connections", "connections.html", NamesQuery, list_connections),
    _SETTINGS,
    PageChange(_SETTINGS.path, change_running, _SETTINGS),
    list_page("/logs", "logs.html", LogsQuery, _logs, limit=MOST_LINES),
    list_page("/users", "users.html", NamesQuery, _users),
    PageView("/stacks", "stacks.html", _stacks),
)
