"""Dead letters: groups that have some, the letters of one, sent again, discarded, and as a file."""

from collections.abc import Iterator
from typing import Any, Final

from metaq.errors import BadRequest, MetaqError, RequestFailed
from metaq.message import DEAD_PREFIX
from metaq.protocol.remoting.codes import Response
from metaq.server.console.bodies import preview
from metaq.server.console.visit import PAGE_ROWS, GoTo, PageChange, PageExport, PageView, Route, Visit, link, rows_page
from metaq.server.services.deadletters import (
    MOST_LETTERS,
    DeadQuery,
    DiscardInput,
    ReplayInput,
    ReplayTarget,
    all_dead,
    discard_dead,
    discard_some,
    list_dead,
    list_dead_groups,
    replay_dead,
)
from metaq.server.services.rows import NamesQuery, as_json_lines
from metaq.server.services.topics import number_of_messages

_GROUP: Final = "/dead-letters/{group}"
CHOSEN: Final = "letter."
"""The begin of the name of a box; the rest is the id of its letter."""
MOST_REPLAYED: Final = 20_000
"""Letters that are sent again at once: some ten seconds of work."""


def _letters(visit: Visit) -> dict[str, Any]:
    group = visit.path["group"]
    read = list_dead(visit.call, group, visit.asked(DeadQuery, limit=PAGE_ROWS))
    rows = [{"message": row, "preview": preview(row.body, row.size)} for row in read.messages]
    following = read.next if read.next < read.end else None
    return {"group": group, "count": _count(visit), "letters": rows, "next": following, "query": visit.query}


def _count(visit: Visit) -> int:
    return number_of_messages(visit.call, f"{DEAD_PREFIX}{visit.path['group']}")


# -- some -------------------------------------------------------------------------------------------------------------


def change_letters(visit: Visit) -> GoTo:
    """Send the chosen dead letters again, or discard them."""
    group = visit.path["group"]
    chosen = [name.removeprefix(CHOSEN) for name in visit.sent if name.startswith(CHOSEN)]
    if not chosen:
        raise BadRequest("no dead letter is chosen")
    if visit.sent.get("do") == "discard":
        if visit.sent.get("sure") != "true":
            raise BadRequest("nothing was discarded: say that you are sure, as nothing brings a discarded letter back")
        done = discard_some(visit.call, group, visit.given(DiscardInput, offset_ids=chosen)).discarded
        return GoTo(link("dead-letters", group), "discarded", done)
    return GoTo(link("dead-letters", group), "replayed", _replay(visit, chosen))


def _replay(visit: Visit, offset_ids: list[str]) -> int:
    """Send letters again and return how many.

    Raise ``RequestFailed`` when one is refused, of one it is not known, or one is not discarded as it should.
    """
    group, sent = visit.path["group"], 0
    for begin in range(0, len(offset_ids), MOST_LETTERS):
        try:
            some = visit.given(ReplayInput, offset_ids=offset_ids[begin : begin + MOST_LETTERS])
            result = replay_dead(visit.call, group, some)
        except MetaqError as error:
            if sent:
                error.add_note(f"{sent:,} were sent again before")
            raise
        except BaseException:  # the request is ended in the middle of these: some may have been sent
            visit.changed = True
            raise
        sent += result.sent
        refused = [letter for letter in result.letters if letter.refused is not None]
        in_doubt = sum(letter.in_doubt for letter in refused)
        visit.changed |= bool(sent or in_doubt)
        if refused:
            others = f"{len(refused) - in_doubt:,} were not"
            unsent = f"{others}, and of {in_doubt:,} it is not known" if in_doubt else f"and {others}"
            raise RequestFailed(Response.SYSTEM_ERROR, f"{sent:,} were sent again, {unsent}; the first: {refused[0].refused}")
        if result.not_discarded is not None:
            why = f"{sent:,} were sent again; the last {result.sent:,} of them were not discarded: {result.not_discarded}"
            raise RequestFailed(Response.SYSTEM_ERROR, why)
    return sent


# -- all --------------------------------------------------------------------------------------------------------------


def _replay_form(visit: Visit) -> dict[str, Any]:
    return {"group": visit.path["group"], "count": _count(visit), "targets": [target.value for target in ReplayTarget]}


def replay_letters(visit: Visit) -> GoTo:
    """Send all dead letters that a group has now again."""
    group, ids = visit.path["group"], list[str]()
    for letters in all_dead(visit.call, group):
        ids += [letter.offset_id for letter in letters]
    if len(ids) > MOST_REPLAYED:
        raise BadRequest(f"{len(ids):,} dead letters are more than {MOST_REPLAYED:,}: send them with metaq dlq replay {group}")
    return GoTo(link("dead-letters", group), "replayed", _replay(visit, ids))


def _discard_form(visit: Visit) -> dict[str, Any]:
    group, count = visit.path["group"], _count(visit)
    letters = "1 dead letter is" if count == 1 else f"{count:,} dead letters are"
    consequence = f"{letters} deleted. They cannot be brought back: download them first if somebody may need them."
    return {
        "question": f"Discard all dead letters of {group}?",
        "consequences": [consequence if count else "The group has no dead letters."],
        "action": link("dead-letters", group, "discard"),
        "word": "Discard" if count else "",
        "name": group if count else "",
        "back": link("dead-letters", group),
    }


def discard_letters(visit: Visit) -> GoTo:
    """Discard all dead letters of a group whose name was typed."""
    group = visit.path["group"]
    if visit.sent.get("name", "").strip() != group:
        raise BadRequest(f"nothing was discarded: type {group} to confirm")
    return GoTo(link("dead-letters"), "discarded", discard_dead(visit.call, group).discarded)


def _export(visit: Visit) -> tuple[str, Iterator[bytes]]:
    """Return all dead letters of a group as lines of JSON, each as the API shows it."""
    group = visit.path["group"]
    list_dead(visit.call, group, DeadQuery(limit=1))  # raises before the answer begins
    return f"{group}-dead-letters.jsonl", map(as_json_lines, all_dead(visit.call, group))


_LETTERS: Final = PageView(_GROUP, "dead_letters.html", _letters)
_REPLAY: Final = PageView(f"{_GROUP}/replay", "dead_replay.html", _replay_form)
_DISCARD: Final = PageView(f"{_GROUP}/discard", "confirm.html", _discard_form)
ROUTES: Final[tuple[Route, ...]] = (
    rows_page("/dead-letters", "dead_groups.html", NamesQuery, list_dead_groups),
    _LETTERS,
    PageChange(_LETTERS.path, change_letters, _LETTERS),
    _REPLAY,
    PageChange(_REPLAY.path, replay_letters, _REPLAY),
    _DISCARD,
    PageChange(_DISCARD.path, discard_letters, _DISCARD),
    PageExport(f"{_GROUP}/export", _export),
)
