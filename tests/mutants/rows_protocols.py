"""Protocols."""

from typing import Final

from tests.mutants.mutant import Mutant as M

PROTOCOLS: Final = [
    M(
        "batches",
        "protocol/remoting/sending/plain.py",
        "is_batch = request.code == BATCH",
        "is_batch = False",
        "server/remoting/test_batch_runs.py::test_known_headers_change_nothing",
    ),
    M(
        "batches",
        "server/remoting/sending/send.py",
        "None if head.is_batch else self._queue_of(session, head)",
        "self._queue_of(session, head)",
        "server/remoting/test_batch_runs.py::test_sends_and_batches_come_in_any_order",
    ),
    M(
        "SG-093",
        "protocol/remoting/frames.py",
        "            at = stop\n",
        "            at = end\n",
        "protocol/test_remoting.py::test_requests_come_as_they_were_written",
    ),
    M(
        "RD-021",
        "protocol/remoting/frames.py",
        "_decode_compact(header, body) if serialization else _decode_json(header, body)",
        "_decode_json",
        "protocol/test_remoting.py::test_requests_come_as_they_were_written",
    ),
    M(
        "RD-019",
        "protocol/remoting/frames.py",
        '_COMPACT_HEAD: Final = struct.Struct(">hbhiii")',
        '_COMPACT_HEAD: Final = struct.Struct(">hhbiii")',
        "wire/test_golden_frames.py::test_a_golden_frame_is_written",
    ),
    M(
        "SG-096",
        "protocol/remoting/frames.py",
        "remark or None, _language(language)",
        "None, _language(language)",
        "wire/test_golden_frames.py::test_a_golden_frame_is_read_however_it_is_cut",
    ),
    M(
        "filters",
        "protocol/sql92.py",
        'decisive=word == "OR"',
        'decisive=word != "OR"',
        "protocol/test_sql92.py::test_a_filter_matches_or_not",
    ),
    M(
        "filters",
        "protocol/sql92.py",
        "(value in texts) is not negated",
        "(value in texts) is negated",
        "protocol/test_sql92.py::test_a_filter_matches_or_not",
    ),
    M(
        "filters",
        "protocol/sql92.py",
        "if self._nesting > MAX_NESTING:",
        "if False:",
        "protocol/test_sql92.py::test_a_filter_is_refused_with_place_and_reason",
    ),
    M(
        "filters",
        "protocol/subscription.py",
        "words.split(SEPARATOR)",
        'words.split("|||")',
        "protocol/test_subscription.py::test_tags_have_the_hashes_of_java",
    ),
    M(
        "RD-101",
        "protocol/subscription.py",
        "return not self.tags or tag in self.tags",
        "return True",
        "client/test_consumers.py::test_tags_choose_messages",
    ),
    M(
        "text protocol",
        "protocol/record.py",
        "(31 * value + unit)",
        "(33 * value + unit)",
        "protocol/test_record.py::test_java_hash_of_known_strings",
    ),
]
