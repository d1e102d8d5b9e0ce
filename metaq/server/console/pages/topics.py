"""Topics: the list, one topic with its partitions and groups, and its creation, change and deletion."""

from typing import Any, Final

from metaq.errors import BadRequest
from metaq.server.console.visit import GoTo, PageChange, PageView, Route, Visit, link, rows_page
from metaq.server.services.topics import (
    NEW_PARTITIONS,
    TopicSettingsInput,
    TopicsQuery,
    delete_topic,
    list_topics,
    put_topic,
    show_topic,
)

_TOPIC: Final = "/topics/{topic}"


def _topic(visit: Visit) -> dict[str, Any]:
    return {"topic": show_topic(visit.call, visit.path["topic"])}


def _creation(visit: Visit) -> dict[str, Any]:
    return {"topic": None, "partitions": NEW_PARTITIONS}


def _settings(visit: Visit) -> dict[str, Any]:
    topic = show_topic(visit.call, visit.path["topic"])
    return {"topic": topic, "partitions": topic.partitions}


def _deletion(visit: Visit) -> dict[str, Any]:
    topic = show_topic(visit.call, visit.path["topic"])
    consequences = [
        f"Its {topic.messages:,} messages on this broker are deleted. Other brokers and the registries keep theirs."
    ]
    if topic.groups:
        consequences.append(f"Groups that consume it: {', '.join(topic.groups)}.")
    return {
        "question": f"Delete the topic {topic.topic}?",
        "consequences": consequences,
        "action": link("topics", topic.topic, "delete"),
        "word": "Delete",
        "name": topic.topic,
        "back": link("topics", topic.topic),
    }


def create_topic(visit: Visit) -> GoTo:
    """Create a topic."""
    topic = visit.sent.get("topic", "").strip()
    if not topic:
        raise BadRequest("a topic needs a name")
    if visit.call.context.topics.get(topic) is not None:
        raise BadRequest(f"the topic {topic} exists already")
    put_topic(visit.call, topic, visit.given(TopicSettingsInput))
    return GoTo(link("topics", topic), "created")


def change_topic(visit: Visit) -> GoTo:
    """Change the settings of a topic; those that are as they were are left alone."""
    topic = show_topic(visit.call, visit.path["topic"])
    shown = {name: str(getattr(topic, name)).lower() for name in TopicSettingsInput.__struct_fields__}
    same = {name: None for name, text in shown.items() if visit.sent.get(name) == text}
    put_topic(visit.call, topic.topic, visit.given(TopicSettingsInput, **same))
    return GoTo(link("topics", topic.topic), "changed")


def remove_topic(visit: Visit) -> GoTo:
    """Delete a topic whose name was typed."""
    topic = visit.path["topic"]
    check_typed(visit, topic)
    delete_topic(visit.call, topic)
    return GoTo(link("topics"), "deleted")


def check_typed(visit: Visit, name: str) -> None:
    """Raise ``BadRequest`` unless the name was typed to confirm a deletion."""
    if visit.sent.get("name", "").strip() != name:
        raise BadRequest(f"nothing was deleted: type {name} to confirm")


_CREATION: Final = PageView("/new-topic", "topic_form.html", _creation)
_SETTINGS: Final = PageView(f"{_TOPIC}/settings", "topic_form.html", _settings)
_DELETION: Final = PageView(f"{_TOPIC}/delete", "confirm.html", _deletion)
ROUTES: Final[tuple[Route, ...]] = (
    rows_page("/topics", "topics.html", TopicsQuery, list_topics),
    PageView(_TOPIC, "topic.html", _topic),
    _CREATION,
    PageChange(_CREATION.path, create_topic, _CREATION),
    _SETTINGS,
    PageChange(_SETTINGS.path, change_topic, _SETTINGS),
    _DELETION,
    PageChange(_DELETION.path, remove_topic, _DELETION),
)
