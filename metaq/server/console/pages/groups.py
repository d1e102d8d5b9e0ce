"""Groups: the list, one with members and lag, why it does not consume, its settings, reset and deletion."""

from collections.abc import Mapping
from typing import Any, Final

from metaq.errors import BadRequest, RequestFailed
from metaq.protocol.remoting.attributes import GROUP_ATTRIBUTES
from metaq.server.console.pages.charts import drawn_lag
from metaq.server.console.pages.topics import check_typed
from metaq.server.console.visit import GoTo, PageChange, PageView, Route, Visit, link, list_page, time_ms
from metaq.server.services.diagnosis import DiagnosisQuery, diagnose_group
from metaq.server.services.groups import (
    GroupSettingsInput,
    GroupsQuery,
    LagQuery,
    ResetInput,
    ResetTo,
    delete_group,
    list_groups,
    put_group,
    reset_offsets,
    show_group,
    show_lag,
)

_GROUP: Final = "/groups/{group}"
_PLACES: Final = {"first": "the oldest message", "last": "the end", "time": "a time", "offset": "an offset"}
"""Where a reset leads, by the word in its form."""


def _list(visit: Visit, query: GroupsQuery) -> dict[str, Any]:
    page, lags = list_groups(visit.call, query), dict[str, int]()
    for number, row in enumerate(page.rows, 1):
        try:
            lags[row.group] = show_lag(visit.call, row.group, LagQuery()).lag
        except RequestFailed:  # the group was deleted meanwhile
            lags[row.group] = 0
        visit.call.rest_after(number)
    return {"page": page, "lags": lags}


def _group(visit: Visit) -> dict[str, Any]:
    group = visit.path["group"]
    shown, lag = show_group(visit.call, group), show_lag(visit.call, group, LagQuery())
    leases = any(row.in_flight is not None for row in lag.partitions)
    return {"group": shown, "lag": lag, "leases": leases, **drawn_lag(visit, group)}


def _why(visit: Visit) -> dict[str, Any]:
    query = visit.asked(DiagnosisQuery)
    shown = show_group(visit.call, visit.path["group"])
    pages = {
        "consumers": (link("groups", shown.group), "its members"),
        "enabled": (link("groups", shown.group, "settings"), "its settings"),
        "topic": (link("topics"), "the topics"),
        "offsets": (link("groups", shown.group, "reset"), "reset"),
        "leases": (link("leases"), "the leases"),
        "dead letters": (link("dead-letters", shown.group), "its dead letters"),
    }
    return {"group": shown, "query": query, "diagnosis": diagnose_group(visit.call, shown.group, query), "pages": pages}


# -- changes ----------------------------------------------------------------------------------------------------------


def _settings(visit: Visit) -> dict[str, Any]:
    return {"group": show_group(visit.call, visit.path["group"]), "attributes": GROUP_ATTRIBUTES}


def _creation(_: Visit) -> dict[str, Any]:
    return {"group": None, "attributes": GROUP_ATTRIBUTES}


def create_group(visit: Visit) -> GoTo:
    """Create a group."""
    group = visit.sent.get("group", "").strip()
    if not group:
        raise BadRequest("a group needs a name")
    if visit.call.context.groups.get(group) is not None:
        raise BadRequest(f"the group {group} exists already")
    put_group(visit.call, group, _settings_given(visit, {}))
    return GoTo(link("groups", group), "created")


def change_group(visit: Visit) -> GoTo:
    """Change the settings of a group."""
    known = show_group(visit.call, visit.path["group"])
    put_group(visit.call, known.group, _settings_given(visit, known.attributes))
    return GoTo(link("groups", known.group), "changed")


def _settings_given(visit: Visit, before: Mapping[str, str]) -> GroupSettingsInput:
    """Return the settings of a form; an empty attribute is the default, and only one that is not can be made so."""
    typed = {name: visit.sent.get(name, "").strip() for name in GROUP_ATTRIBUTES}
    attributes = {name: value for name, value in typed.items() if value or name in before}
    return visit.given(GroupSettingsInput, attributes=attributes)


def _reset(visit: Visit) -> dict[str, Any]:
    """Return what a reset would change, once the form says where it leads."""
    group = show_group(visit.call, visit.path["group"])
    fields = {**visit.query, **visit.sent}
    shown: dict[str, Any] = {"group": group, "fields": fields, "places": _PLACES, "result": None}
    if fields.get("topic") and fields.get("place"):
        try:
            shown["result"] = reset_offsets(visit.call, group.group, _reset_input(fields, apply=False))
        except BadRequest as error:
            shown["error"] = str(error)  # beside the form, where it can be put right
    return shown


def reset_group(visit: Visit) -> GoTo:
    """Reset the offsets of a group in a topic."""
    group = visit.path["group"]
    reset_offsets(visit.call, group, _reset_input(visit.sent, apply=True))
    return GoTo(link("groups", group), "reset")


def _reset_input(fields: Mapping[str, str], *, apply: bool) -> ResetInput:
    place, offset = fields.get("place", ""), fields.get("offset", "").strip()
    if place not in _PLACES:
        raise BadRequest(f"a reset leads to one of {', '.join(_PLACES)}, and not to {place[:40]!r}")
    if place == "time":
        when = time_ms(fields.get("time", ""))
        if when is None:
            raise BadRequest("type the time from which the group goes on")
        return ResetInput(topic=fields["topic"], time_ms=when, apply=apply)
    if place == "offset":
        if not (offset.isascii() and offset.isdecimal() and len(offset) < 19):
            raise BadRequest(f"an offset is a number, and {offset[:40]!r} is not")
        return ResetInput(topic=fields["topic"], offset=int(offset), apply=apply)
    return ResetInput(topic=fields["topic"], to=ResetTo(place), apply=apply)


def _deletion(visit: Visit) -> dict[str, Any]:
    group = show_group(visit.call, visit.path["group"])
    consequences = ["Its offsets on this broker are deleted: when it comes back, it begins anew."]
    if group.members:
        consequences.append(f"Consumers are connected ({group.members}): they make the group again with their next heartbeat.")
    return {
        "question": f"Delete the group {group.group}?",
        "consequences": consequences,
        "action": link("groups", group.group, "delete"),
        "word": "Delete",
        "name": group.group,
        "back": link("groups", group.group),
    }


def remove_group(visit: Visit) -> GoTo:
    """Delete a group whose name was typed."""
    group = visit.path["group"]
    check_typed(visit, group)
    delete_group(visit.call, group)
    return GoTo(link("groups"), "deleted")


_CREATION: Final = PageView("/new-group", "group_form.html", _creation)
_SETTINGS: Final = PageView(f"{_GROUP}/settings", "group_form.html", _settings)
_RESET: Final = PageView(f"{_GROUP}/reset", "group_reset.html", _reset)
_DELETION: Final = PageView(f"{_GROUP}/delete", "confirm.html", _deletion)
ROUTES: Final[tuple[Route, ...]] = (
    list_page("/groups", "groups.html", GroupsQuery, _list),
    PageView(_GROUP, "group.html", _group),
    PageView(f"{_GROUP}/why", "group_why.html", _why),
    _CREATION,
    PageChange(_CREATION.path, create_group, _CREATION),
    _SETTINGS,
    PageChange(_SETTINGS.path, change_group, _SETTINGS),
    _RESET,
    PageChange(_RESET.path, reset_group, _RESET),
    _DELETION,
    PageChange(_DELETION.path, remove_group, _DELETION),
)
