"""The REST API."""

from typing import Final

from tests.mutants.mutant import Mutant as M

API: Final = [
    M(
        "MY-032",
        "server/services/sending.py",
        "return abs(java_hash(message.ordering_key)) % partitions",
        "return next(_turns) % partitions",
        "server/api/test_operations.py::test_many_messages",
    ),
    M(
        "MY-032",
        "server/services/sending.py",
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
]
