"""The REST API."""

from typing import Final

from tests.mutants.mutant import Mutant as M

API: Final = [
    M(
        "MY-032",
        "server/services/outgoing.py",
        "return abs(java_hash(message.ordering_key)) % partitions",
        "return ROTATION.next(partitions)",
        "server/api/test_operations.py::test_many_messages",
    ),
    M(
        "MY-032",
        "server/services/outgoing.py",
        "DEDUPE_ID: message.id,",
        "",
        "server/api/test_operations.py::test_an_id_is_stored_once",
    ),
    M(
        "rest",
        "server/services/groups.py",
        "lags_of(call, group, topic.name)  # who",
        "pass  # who",
        "server/api/test_operations.py::test_a_reset_is_shown_before_it_is_made",
    ),
    M(
        "rest",
        "server/services/rows.py",
        "if name(it) > query.after and",
        "if name(it) >= query.after and",
        "server/api/test_operations.py::test_topics",
    ),
    M(
        "rest",
        "server/services/call.py",
        "self.anonymous = principal",
        "self.anonymous = Principal('x', admin=True)",
        "server/api/test_access.py::test_rights_are_those_of_other_protocols",
    ),
    M(
        "rest",
        "server/api/origin.py",
        'environ.get("HTTP_SEC_FETCH_SITE") == "cross-site" or ',
        "",
        "server/api/test_access.py::test_a_page_of_another_site_gets_nothing",
    ),
    M(
        "rest",
        "server/api/application.py",
        "if kind != _JSON:",
        "if False:",
        "server/api/test_access.py::test_only_json_is_a_body",
    ),
    M(
        "rest",
        "server/api/application.py",
        "if self._operation.is_change and ",
        "if False and ",
        "server/api/test_access.py::test_changes_are_in_the_log",
    ),
    M(
        "rest",
        "server/services/messages.py",
        "topic_of_reader(call, topic, 0)  # the user may have lost",
        "pass  # the user may have lost",
        "server/api/test_streams.py::test_who_loses_the_right_loses_the_stream",
    ),
    M(
        "rest",
        "server/http/bounded.py",
        "if self.stopped or self._calls >= self._bounds.calls:",
        "if self.stopped or self._calls >= 2 * self._bounds.calls:",
        "server/api/test_streams.py::test_streams_keep_nothing_else_waiting",
    ),
    M(
        "console",
        "server/services/deadletters.py",
        "or letter.queue_offset in topic.discarded",
        "",
        "server/console/test_operating.py::test_chosen_dead_letters",
    ),
    M(
        "SG-102",
        "server/registering/cluster.py",
        "asked = {**self._processes.lost(known), **known}",
        "asked = dict(known)",
        "server/api/test_cluster.py::test_each_shows_all_and_a_lost_master",
    ),
    M(
        "console",
        "server/console/pages/broker.py",
        'lambda row: f"{row.name} {row.value}"',
        "lambda row: row.name",
        "server/console/test_operating.py::test_settings",
    ),
    M(
        "rest",
        "server/services/operating/logs.py",
        "line.number > query.after and ",
        "",
        "server/api/test_watching.py::test_the_log_of_the_last_minutes",
    ),
    M(
        "rest",
        "server/services/operating/history.py",
        "else max(part)",
        "else part[0]",
        "server/api/test_history.py::test_fewer_points",
    ),
    M(
        "rest",
        "server/http/sampler.py",
        "lags[group] += metrics",
        "lags[group] = 0 * metrics",
        "server/api/test_watching.py::test_the_history_is_that_of_the_metrics",
    ),
    M(
        "console",
        "server/console/pages/deadletters.py",
        'if visit.sent.get("sure") != "true":',
        "if False:",
        "server/console/test_operating.py::test_chosen_dead_letters",
    ),
    M(
        "console",
        "server/console/pages/transactions.py",
        'if visit.sent.get("sure") != "true":',
        "if False:",
        "server/console/test_operating.py::test_transactions_in_doubt",
    ),
]
