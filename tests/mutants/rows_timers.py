"""Timers."""

from typing import Final

from tests.mutants.mutant import Mutant as M

TIMERS: Final = [
    M(
        "timers",
        "engine/timers/copying.py",
        '(b"METAQ_", b"QUEUE_MS\\x01", _PLACE)',
        '(b"METAQ_", _PLACE)',
        "engine/test_copying.py::test_both_ways_make_the_same_copy",
    ),
    M(
        "timers",
        "engine/timers/copying.py",
        "if topic is None or topic.has_priorities:",
        "if topic is None:",
        "engine/test_copying.py::test_a_topic_with_priorities_decides_by_the_whole_message",
    ),
    M(
        "timers",
        "store/log/noted.py",
        "if is_intact(view[at : at + size], place) else None",
        "if size else None",
        "store/test_noted_places.py::test_what_is_no_record_of_the_partition_is_missing",
    ),
    M(
        "timers",
        "store/log/noted.py",
        "if magic == MAGIC and at + size > len(view):",
        "if False:",
        "store/test_noted_places.py::test_records_of_many_segments_and_sizes",
    ),
    M(
        "timers",
        "protocol/delays.py",
        "_PARKED[0] in others or _PARKED[1] in others or _PARKED[2] in others",
        "_PARKED[2] in others",
        "protocol/test_delays.py::test_what_only_delays_is_kept_as_it_was_sent",
    ),
    M(
        "timers",
        "engine/timers/delivery.py",
        "if clock.monotonic() >= until:",
        "if True:",
        "engine/test_delivery_turns.py::test_several_groups_are_staged_in_one_turn",
    ),
    M(
        "timers",
        "engine/timers/upkeep.py",
        "if step is not IndexStep.MORE or self._clock.monotonic() - began >= WORK_S:",
        "if step is not IndexStep.MORE:",
        "engine/test_upkeep.py::test_timers_are_read_a_little_at_a_time",
    ),
    M(
        "timers",
        "engine/timers/upkeep.py",
        """(LONG_WORK_S if table.waiting > MANY else WORK_S):
                    return True""",
        """(LONG_WORK_S if table.waiting > MANY else WORK_S):
                    gevent.sleep(REST_S)""",
        "engine/test_upkeep.py::test_others_have_the_index_while_much_enters",
    ),
    M(
        "timers",
        "engine/timers/delivery.py",
        "if taken and taken[0][1] < self._store.log.hot_from():",
        "if False:",
        "engine/test_delivery_turns.py::test_parks_on_the_disk_are_read_for_several_groups_at_once",
    ),
    M(
        "timers",
        "engine/timers/keeping.py",
        """for key, place, data in parks:
            self._store.check_appendable()""",
        """for key, place, data in parks:
            self._store.check_writable()""",
        "engine/test_room.py::test_a_pending_timer_does_not_stop_retention",
    ),
    M(
        "timers",
        "engine/timers/keeping.py",
        "return self._clean if needed is None else min(needed, self._clean)",
        "return needed",
        "engine/test_timer_keeping.py::test_a_timer_is_kept_whatever_its_segment_counts",
    ),
    M(
        "timers",
        "engine/timers/keeping.py",
        "table.discount(counted)",
        "pass",
        "engine/test_timer_keeping.py::test_a_segment_without_timers_goes_whatever_it_counts",
    ),
    M(
        "timers",
        "engine/timers/delivery.py",
        "copies = self._without_last(copies, str(error))",
        "raise",
        "engine/test_delivery_turns.py::test_a_message_that_is_larger_than_a_segment_is_dropped",
        waits=True,
    ),
    M(
        "timers",
        "engine/timers/table.py",
        "self._handles = None if pending.secret is None else Handles(pending.secret.secret)",
        "self._handles = None",
        "engine/test_room.py::test_handles_stay_good_when_their_secret_is_not_stored_again",
    ),
    M(
        "timers",
        "timers/fold.py",
        "mark.log_offset < park.log_offset",
        "mark.log_offset > 0",
        "timers/test_fold.py::test_the_events_come_in_the_order_of_the_log",
    ),
    M(
        "timers",
        "timers/records.py",
        "if at < 0 or (at > 0 and text[at - 1] != _END):",
        "if at < 0:",
        "timers/test_records.py::test_the_quick_way_reads_what_nearly_all_parks_are",
    ),
    M(
        "timers",
        "timers/pending.py",
        "if self._whole and self._whole[0] is event:",
        "if False:",
        "timers/test_entering.py::test_a_run_is_found_before_and_after_it_has_entered",
    ),
    M(
        "timers",
        "timers/pending.py",
        "if self._whole_from < end:",
        "if False:",
        "timers/test_entering.py::test_a_delivery_ends_a_part_of_a_run_that_has_not_entered",
    ),
    M(
        "timers",
        "timers/entering.py",
        "if ends or len(over) == OVER_AT_ONCE else",
        "if ends else",
        "timers/test_entering.py::test_packs_of_which_all_was_delivered_are_removed_until_none_is_left",
    ),
    M(
        "timers",
        "timers/pending.py",
        "if key is not None and (lowest is None or key < lowest):",
        "if False:",
        "timers/test_pending.py::test_the_table_is_what_the_log_comes_to",
    ),
    M(
        "timers",
        "store/log/noted.py",
        "read_around(read_here, windows[at].file, windows[at].size, windows[at].at)",
        "windows[at].file.read(windows[at].size, windows[at].at)",
        "store/test_unreadable.py::test_delayed_messages_around_it_are_found",
    ),
]
