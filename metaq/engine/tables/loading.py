"""Loading of the saved tables of topics, groups and request modes when a broker is opened."""

import logging
from typing import NamedTuple

from metaq.config import Settings
from metaq.engine.tables.groups import GroupTable
from metaq.engine.tables.modes import ModeTable
from metaq.engine.tables.topics import TopicTable
from metaq.errors import MetaqError
from metaq.store.files.filecache import Run
from metaq.store.messagestore import MessageStore

logger = logging.getLogger(__name__)


class LoadedTables(NamedTuple):
    """The tables that are kept on the disk."""

    topics: TopicTable
    groups: GroupTable
    modes: ModeTable


def load_tables(settings: Settings, store: MessageStore, *, is_master: bool, goes_on: bool, run: Run) -> LoadedTables:
    """Load the tables of topics, groups and request modes, and create the topics that the settings name.

    With ``goes_on`` the broker has served already, in another role, and a topic that cannot be created is only logged;
    otherwise that raises ``MetaqError``.
    """
    topics = _topics(settings, store, is_master=is_master, goes_on=goes_on, run=run)
    return LoadedTables(topics, _groups(settings, store), _modes(settings, store))


def _topics(settings: Settings, store: MessageStore, *, is_master: bool, goes_on: bool, run: Run) -> TopicTable:
    topics = TopicTable(settings.data, settings.max_topics)
    known = {key: queue.next for key, queue in store.queues.items()}
    for problem in topics.load(store.disk, known):
        logger.error("topic table damaged, rebuilt from the store problem=%s", problem)
    if is_master:
        topics.forget_lost(known)
    topics.add_system_topics(settings.cluster_name, settings.broker_name, auto_create=settings.auto_create_topics)
    for name, wanted in settings.topics.items():
        try:
            topics.configure({name: wanted})
        except MetaqError as error:
            if not goes_on:
                raise
            logger.error("topic of the settings not made topic=%s reason=%s", name, error)
    topics.restrict(settings.broker_permission)
    for key, end in topics.deleted.items():
        store.queue(*key).hide_before(end)
    if is_master and topics.unsaved:  # ordinals of what was deleted, and lost, are given again, but only after this
        store.log.owed.do(topics.written(store.disk, store.clock.now_ms()), run)
    return topics


def _groups(settings: Settings, store: MessageStore) -> GroupTable:
    groups = GroupTable(settings.data, max_groups=settings.max_groups, auto_create=settings.auto_create_groups)
    for problem in groups.load(store.disk):
        logger.error("table of groups damaged problem=%s", problem)
    return groups


def _modes(settings: Settings, store: MessageStore) -> ModeTable:
    modes = ModeTable(settings.data)
    for problem in modes.load(store.disk):
        logger.error("table of request modes damaged problem=%s", problem)
    return modes
