"""The console."""

from typing import Final

from tests.mutants.mutant import Mutant as M

CONSOLE: Final = [
    M(
        "console",
        "server/console/application.py",
        'check_change(visitor, sent.pop(TOKEN_FIELD, ""), self._interior)',
        'sent.pop(TOKEN_FIELD, "")',
        "server/console/test_changes.py::test_a_change_needs_the_token_of_its_page",
    ),
    M(
        "console",
        "server/console/visitors.py",
        "check_origin(request.env, interior)",
        "pass",
        "server/console/test_changes.py::test_pages_of_another_site_change_nothing",
    ),
    M(
        "console",
        "server/console/rendering.py",
        "autoescape=True",
        "autoescape=False",
        "server/console/test_pages.py::test_every_page_answers_and_is_harmless",
    ),
    M(
        "console",
        "server/access/logins.py",
        "user_of(login.name) != login.user:",
        "user_of(login.name) is None:",
        "server/console/test_logins.py::test_a_change_of_the_user_ends_its_logins",
    ),
    M(
        "MQ-111",
        "server/console/pages/groups.py",
        "_reset_input(fields, apply=False)",
        "_reset_input(fields, apply=True)",
        "server/console/test_changes.py::test_a_reset_is_shown_first",
    ),
    M(
        "E-09",
        "protocol/remoting/attributes.py",
        '_joined(current.get(name, ""), value)',
        "value",
        "cli/test_deadletters.py::test_chosen_dead_letters_are_discarded",
    ),
    M(
        "console",
        "server/console/visit.py",
        "if name not in _NOT_KEPT",
        "if False",
        "server/console/test_pages.py::test_lists_come_in_pages",
    ),
    M(
        "rest",
        "server/services/messages.py",
        "heapq.heappush(heap, (-log_offset, queue.partition, ordinal, queue))",
        "heapq.heappush(heap, (queue.partition, -log_offset, ordinal, queue))",
        "server/api/test_operations.py::test_the_newest_messages",
    ),
]
