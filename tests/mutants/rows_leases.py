"""Leases."""

from typing import Final

from tests.mutants.mutant import Mutant as M

FAULTS: Final = "engine/leases/test_faults.py"
GAPS: Final = "leases/test_gaps.py"
PLAIN_ACKS: Final = "protocol/remoting/leases/test_plain_acks.py"
POPS: Final = "server/remoting/test_pops.py"

LEASES: Final = [
    M(
        "leases",
        "engine/leases/leaselog.py",
        "self._made_whole(noted, places & self._unkept)",
        "noted",
        f"{FAULTS}::test_what_was_given_without_room_is_not_done_after_a_kill",
    ),
    M(
        "leases",
        "engine/leases/leaselog.py",
        "self._write([(place, Forgotten())])",
        "pass",
        f"{FAULTS}::test_what_died_after_a_full_disk_is_dead_after_a_kill",
    ),
    M(
        "leases",
        "engine/leases/leaselog.py",
        "        self._next_since = None\n",
        "",
        f"{FAULTS}::test_a_snapshot_without_room_is_worth_nothing",
    ),
    M(
        "leases",
        "engine/leases/leaselog.py",
        "self._write([])",
        "pass",
        f"{FAULTS}::test_a_snapshot_of_nothing_keeps_the_secret",
    ),
    M(
        "leases",
        "engine/leases/leaselog.py",
        "self.since = max(least, since)",
        "self.since = since + 1",
        f"{POPS}::test_a_snapshot_is_all_that_an_opening_reads",
    ),
    M(
        "leases",
        "engine/leases/popping.py",
        "return state is part.state and self._context.offsets.get(*place) == part.offset",
        "return state is part.state",
        f"{FAULTS}::test_a_pop_that_read_while_the_offset_changed_gives_nothing",
    ),
    M(
        "leases",
        "engine/leases/keeping.py",
        "with self._taking:",
        "if True:",
        f"{FAULTS}::test_one_snapshot_follows_the_other",
    ),
    M(
        "leases",
        "engine/leases/keeping.py",
        "if offset is not None and offset >= before:",
        "if True:",
        f"{FAULTS}::test_what_is_open_is_a_dead_letter_before_its_segment_goes",
    ),
    M(
        "leases",
        "engine/leases/poison.py",
        " or state.is_claimed(ordinal)",
        "",
        f"{FAULTS}::test_two_rejections_in_one_turn_make_one_dead_letter",
    ),
    M(
        "leases",
        "engine/leases/moving.py",
        "if was_claimed and failure is None:",
        "if failure is None:",
        f"{FAULTS}::test_a_reset_after_a_rejection_gives_the_message_again",
    ),
    M(
        "leases",
        "engine/leases/poison.py",
        "except MessageIllegal:",
        "except KeyError:",
        f"{FAULTS}::test_a_message_with_properties_to_the_brim_can_die",
    ),
    M(
        "leases",
        "engine/leases/moving.py",
        "put_record_group(self._context.store, mark, copies)",
        "put_record_group(self._context.store, mark, [])",
        f"{POPS}::test_a_rejected_message_is_a_dead_letter",
    ),
    M(
        "leases",
        "engine/leases/planning.py",
        "if request.by_partition and state.open:",
        "if False:",
        f"{FAULTS}::test_in_order_nothing_new_comes_while_something_waits",
    ),
    M(
        "leases",
        "engine/leases/planning.py",
        "self.fresh is not None or self.begins",
        "self.fresh is not None",
        f"{FAULTS}::test_a_group_that_begins_at_the_end_gets_what_comes",
    ),
    M(
        "leases",
        "engine/leases/planning.py",
        "elif state is not None and following < least:",
        "elif False:",
        f"{FAULTS}::test_what_is_open_is_a_dead_letter_before_its_segment_goes",
    ),
    M(
        "leases",
        "engine/leases/popping.py",
        "return state is part.state and state.version == part.version",
        "return True",
        f"{FAULTS}::test_a_message_that_is_finished_during_a_plan_is_no_failure",
    ),
    M(
        "leases",
        "engine/leases/planning.py",
        "bunch.times + times_of(record) >= group.retry_max_times",
        "bunch.times + times_of(record) > group.retry_max_times",
        f"{POPS}::test_the_last_delivery_is_followed_by_the_dead_letters",
    ),
    M(
        "leases",
        "engine/leases/leases.py",
        "now_ms = max(self._clock.now_ms(), pop_ms)",
        "now_ms = self._clock.now_ms()",
        f"{FAULTS}::test_a_lease_is_extended_although_the_clock_was_set_back",
    ),
    M(
        "leases",
        "engine/leases/leases.py",
        "self.context.offsets.get(*place) != state.base",
        "False",
        f"{FAULTS}::test_a_reset_is_kept_with_the_leases",
    ),
    M(
        "leases",
        "engine/leases/leases.py",
        "self.record(place, Forgotten())",
        "self._drop(place)",
        f"{FAULTS}::test_leases_that_were_left_do_not_take_an_offset_back",
    ),
    M(
        "leases",
        "engine/leases/leases.py",
        "self.record(GroupPartition(group, topic, partition), Forgotten())",
        "pass",
        f"{FAULTS}::test_places_of_a_deleted_topic_are_forgotten",
    ),
    M(
        "leases",
        "engine/leases/waiting.py",
        "leases.touched = self.look",
        "pass",
        "engine/leases/test_waiting.py::test_a_message_that_is_given_back_wakes_who_waits",
    ),
    M(
        "leases",
        "engine/leases/waiting.py",
        "line.timer.start(self.look, line.group, line.topic)",
        "pass",
        "engine/leases/test_waiting.py::test_a_lease_that_ends_wakes_who_waits",
    ),
    M(
        "leases",
        "engine/tables/offsets.py",
        "elif self._resets and self._resets.get(place, now_s) > now_s:",
        "elif False:",
        f"{FAULTS}::test_a_reset_stands_against_commits_of_members",
    ),
    M(
        "leases",
        "leases/state.py",
        "mine = (wide.open >> (first - wide.first)) & bits",
        "mine = (wide.open & (bits << (first - wide.first))) >> (first - wide.first)",
        f"{FAULTS}::test_bits_that_are_far_away_finish_nothing",
    ),
    M(
        "leases",
        "leases/state.py",
        "if bunch is None or ordinal in self._claimed:",
        "if bunch is None:",
        f"{FAULTS}::test_two_rejections_in_one_turn_make_one_dead_letter",
    ),
    M(
        "leases",
        "leases/state.py",
        '''is on its way to the dead letters."""
        self.version += 1
''',
        '''is on its way to the dead letters."""
''',
        f"{FAULTS}::test_two_plans_give_a_message_up_once",
    ),
    M(
        "leases",
        "leases/gaps.py",
        "return [*again, event, *_given(_between(state.next, first), now_ms)]",
        "return [*again, event]",
        f"{GAPS}::test_what_a_missing_pop_gave_waits",
    ),
    M(
        "leases",
        "leases/gaps.py",
        "return [Passed(ordinal + 1), *_given(_between(state.next, ordinal), now_ms)]",
        "return [event]",
        f"{GAPS}::test_what_is_dead_by_an_event_that_is_there_stays_dead",
    ),
    M(
        "leases",
        "leases/gaps.py",
        "[*state.ordinals(), *_between(state.next, following)]",
        "[*_between(state.next, following)]",
        f"{GAPS}::test_what_is_dead_by_an_event_that_is_there_stays_dead",
    ),
    M(
        "leases",
        "protocol/remoting/leases/plainacks.py",
        "elif number < 0 or (offset >= 0 and number != offset):",
        "elif number < 0:",
        f"{PLAIN_ACKS}::test_they_mean_what_they_mean_to_the_parser",
    ),
    M(
        "leases",
        "protocol/remoting/leases/plainacks.py",
        "any(header.count(name) != 1 for name in _NAMES)",
        "False",
        f"{PLAIN_ACKS}::test_a_header_that_names_a_number_twice_is_not_compared",
    ),
    M(
        "leases",
        "leases/bunch.py",
        "self._history = self._history >> 1 << 1",
        "self._history = 0",
        "leases/test_bunch.py::test_what_is_kept_comes_back",
    ),
]
