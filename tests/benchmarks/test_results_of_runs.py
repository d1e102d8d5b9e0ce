"""The benchmarks: their arithmetic, their tables, and a load generator whose counts are right."""

import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.figures import Check, Load, MeasurementError, Spread, Verdict, ratio, spread
from benchmarks.memory import drift_bytes
from benchmarks.peers import Level, System, beanstalkd, nats, redis, sendfile_loop
from benchmarks.programs import LoadPlan, parse, run_load, run_sync_loop
from benchmarks.report import Report, Table, checks_table, file_system, markdown, markdown_table, of_rounds
from benchmarks.suites.get import messages_for, write_records
from benchmarks.suites.put import ladder, steps

RATES = st.floats(min_value=0.001, max_value=1e9)
LINE = {
    "protocol": "metaq-put",
    "connections": 4,
    "in_flight": 100,
    "body_bytes": 128,
    "block_bytes": 0,
    "batch": 0,
    "rate_wanted": 0,
    "seconds": 2.0,
    "requests": 1000,
    "messages": 1000,
    "bytes": 128000,
    "messages_per_second": 500.0,
    "mb_per_second": 0.064,
    "p50_us": 1.0,
    "p99_us": 2.0,
    "p999_us": 3.0,
    "max_us": 4.0,
    "wraps": 0,
    "errors": 0,
    "first_error": "",
}


def load(**changes: object) -> Load:
    return parse(Load, json.dumps(LINE | changes))


@given(st.lists(RATES, min_size=1))
def test_a_spread_holds_every_round_between_its_ends(values: list[float]) -> None:
    summary = spread(values)
    assert summary is not None
    assert summary.low == min(values) <= summary.median <= max(values) == summary.high
    assert sum(value <= summary.median for value in values) * 2 >= len(values) == summary.rounds


@given(RATES, RATES)
def test_a_ratio_is_ours_in_parts_of_theirs(ours: float, theirs: float) -> None:
    found = ratio(spread([ours]), spread([theirs]))
    assert found == pytest.approx(ours / theirs)


def test_a_ratio_needs_both_sides() -> None:
    one = Spread(1.0, 1.0, 1.0, 1)
    assert spread([]) is None
    assert ratio(one, None) is None
    assert ratio(None, one) is None
    assert ratio(one, Spread(0.0, 0.0, 0.0, 1)) is None


@given(RATES, RATES)
def test_a_bound_holds_exactly_on_its_side(measured: float, bound: float) -> None:
    low = Check("rate", measured, "at least", must=bound, aim=bound)
    high = Check("latency", measured, "at most", must=bound, aim=bound)
    assert (low.must_verdict is Verdict.HELD) == (low.aim_verdict is Verdict.REACHED) == (measured >= bound)
    assert (high.must_verdict is Verdict.HELD) == (high.aim_verdict is Verdict.REACHED) == (measured <= bound)


def test_a_bound_without_a_figure_says_so_and_a_figure_without_a_bound_says_nothing() -> None:
    unmeasured = Check("rate", None, "at least", must=1.0, aim=2.0)
    assert unmeasured.must_verdict is unmeasured.aim_verdict is Verdict.NOT_MEASURED
    unbounded = Check("rate", 1.0, "at least")
    assert unbounded.must_verdict is unbounded.aim_verdict is Verdict.NONE


def test_a_report_holds_unless_a_must_is_missed_or_a_cell_failed() -> None:
    held = Check("rate", 1.0, "at least", must=1.0, aim=2.0)
    missed = Check("rate", 0.9, "at least", must=1.0)
    absent = Check("rate", None, "at least", must=1.0)
    assert Report("targets", {}, [], [held, absent]).held
    assert not Report("targets", {}, [], [held, missed]).held
    assert not Report("targets", {}, [], [held], failures=["metaq: it ended with 1"]).held


def test_a_line_of_the_load_generator_is_read_strictly() -> None:
    assert load(p99_us=7.5).p99_us == 7.5
    for text in ("", "{}", "load: no reply", json.dumps(LINE | {"errors": -1}), json.dumps(LINE | {"more": 1})):
        with pytest.raises(MeasurementError, match="not a line of Load"):
            parse(Load, text)


def test_the_ladder_covers_every_size_connection_count_and_depth() -> None:
    grid = steps(quick=False)
    assert {step[0] for step in grid} == {16, 128, 1024, 4096, 16384, 65536}
    assert {step[1:] for step in grid} == {(c, d) for c in (1, 4, 50) for d in (1, 16, 100)}
    assert len(grid) == len(set(grid)) == 54
    assert set(steps(quick=True)) < set(grid)


def test_a_ladder_compares_medians_and_leaves_a_gap_where_nothing_was_measured() -> None:
    def system(name: str) -> System:
        return System(name, Level.MEMORY, "metaq-put", "", Path("x"), "", lambda *_: [], b"", b"")

    step = (128, 4, 100)
    figures = {
        (step, "metaq memory"): [load(messages_per_second=rate) for rate in (100.0, 300.0, 200.0)],
        (step, "redis"): [load(messages_per_second=400.0)],
    }
    table = ladder("Put", [system("metaq memory"), system("redis"), system("nats")], [step], figures)
    assert table.rows == [["128 × 4 × 100", "200", "0.00", "400", "0.50", "-", "-"]]
    assert len(table.columns) == len(table.rows[0])


def test_the_markdown_has_every_figure_and_fact() -> None:
    checks = [Check("put: of redis", 0.5, "at least", must=0.4, aim=1.0, unit="×")]
    report = Report("targets", {"rounds": "5"}, [Table("Rates", ["a|b", "rate"], [["x", "1"]])], checks, notes=["no y"])
    text = markdown(report, {"commit": "abc"})
    assert "| put: of redis | 0.50 × | ≥ 0.4 × | pass | ≥ 1 × | not reached |" in text
    assert "| a\\|b | rate |\n| --- | ---: |\n| x | 1 |" in text
    assert "| commit | abc |\n| rounds | 5 |" in text
    assert "## Left out\n\n- no y" in text
    assert "## Failed" not in text


@given(st.lists(st.lists(st.text("ab|\\ "), min_size=3, max_size=3)))
def test_a_markdown_table_keeps_its_shape_whatever_its_cells_say(rows: list[list[str]]) -> None:
    lines = markdown_table(Table("t", ["a", "b", "c"], rows)).splitlines()[2:]
    assert len(lines) == len(rows) + 2
    assert all(line.replace("\\|", "").count("|") == 4 for line in lines)


def test_rounds_are_shown_with_their_spread() -> None:
    assert of_rounds(None) == "-"
    assert of_rounds(spread([1234.5]), 1) == "1,234.5"
    assert of_rounds(spread([1.0, 3.0, 2.0])) == "2 (1 to 3)"
    assert checks_table([Check("a", None, "at most", must=1.0, unit="s")]).rows[0][1] == "-"


def test_drift_counts_both_ways() -> None:
    assert drift_bytes([], 10) == 0
    assert drift_bytes([12, 9], 10) == 2
    assert drift_bytes([11, 3], 10) == 7


def test_the_file_system_is_that_of_the_nearest_mount(tmp_path: Path) -> None:
    mounts = ["dev / ext4 rw 0 0", f"dev {tmp_path} xfs rw 0 0", f"dev {tmp_path}x tmpfs rw 0 0", "none /else proc rw 0 0"]
    assert file_system(tmp_path / "data", mounts) == "xfs (rw)"
    assert file_system(Path("/"), mounts) == "ext4 (rw)"
    assert file_system(Path("/"), []) == "unknown"


def test_the_log_of_the_get_ladder_has_a_bounded_number_of_messages() -> None:
    assert messages_for(1 << 20, 1004) == 1024
    assert messages_for(1 << 40, 16) == 1_000_000


class TextServer:
    """Answers text puts on loopback with the given code, and counts them."""

    def __init__(self, code: int) -> None:
        self.puts = 0
        self.bodies = 0
        self._code = code
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]

    @contextmanager
    def serving(self, connections: int) -> Iterator["TextServer"]:
        thread = threading.Thread(target=self._serve, args=[connections])
        thread.start()
        try:
            yield self
        finally:
            thread.join(timeout=60)
            self._listener.close()
        assert not thread.is_alive()

    def _serve(self, connections: int) -> None:
        accepted = [self._listener.accept()[0] for _ in range(connections)]
        threads = [threading.Thread(target=self._answer, args=[connection]) for connection in accepted]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _answer(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rwb") as stream:
            while line := stream.readline():
                word, topic, partition, length, _flag, opaque = line.split()
                assert (word, topic, partition) == (b"put", b"bench", b"0")
                self.bodies += len(stream.read(int(length)))
                self.puts += 1
                stream.write(b"result %d 5 %b\r\n1 0 0" % (self._code, opaque))
                stream.flush()


@pytest.mark.partner("gcc")
@pytest.mark.parametrize(
    "plan",
    [
        LoadPlan(1, 1, 16, 30.0, 0.0, count=7),
        LoadPlan(1, 100, 128, 30.0, 0.0, count=500),
        LoadPlan(1, 16, 65536, 30.0, 0.0, count=40),
        LoadPlan(1, 1, 128, 0.5, 0.0, rate=200),
    ],
    ids=["one by one", "pipelined", "bodies beyond one send", "open loop"],
)
def test_the_load_generator_counts_what_the_server_got(plan: LoadPlan) -> None:
    server = TextServer(200)
    with server.serving(plan.connections):
        measured = run_load("metaq-put", server.port, plan)
    assert measured.messages == measured.requests == server.puts == (plan.count or 100)
    assert measured.bytes == server.bodies == server.puts * plan.body_bytes
    assert 0 < measured.p50_us <= measured.p99_us <= measured.p999_us <= measured.max_us
    assert measured.messages_per_second == pytest.approx(measured.messages / measured.seconds, rel=0.05, abs=0.05)


@pytest.mark.partner("gcc")
def test_an_error_reply_makes_the_figure_invalid() -> None:
    server = TextServer(500)
    with server.serving(1), pytest.raises(MeasurementError, match=r"20 of 20 replies were errors, the first: 1 0 0"):
        run_load("metaq-put", server.port, LoadPlan(1, 4, 8, 30.0, 0.0, count=20))


@pytest.mark.partner("gcc")
def test_a_get_walks_the_whole_log_in_order(tmp_path: Path) -> None:
    records = tmp_path / "records"
    write_records(records, 1000, 500)
    head = struct.unpack_from(">iIqi", records.read_bytes(), 499 * 1020)
    assert records.stat().st_size == 500 * 1020
    assert head[0] == 1000
    with sendfile_loop(records).running(tmp_path / "server") as server:
        measured = run_load("metaq-get", server.port, LoadPlan(1, 1, 1000, 30.0, 0.0, count=500))
        assert measured.messages == 500
        assert measured.bytes == 500 * 1000
        assert measured.requests == 8  # 64 records of 1,020 bytes in a block of 65,536
        assert measured.wraps == 0
        again = run_load("metaq-get", server.port, LoadPlan(1, 1, 1000, 30.0, 0.0, count=1000))
        assert (again.messages, again.wraps) == (1000, 1)
        with pytest.raises(MeasurementError, match="a get at 0 was answered: a record of another size"):
            run_load("metaq-get", server.port, LoadPlan(1, 1, 999, 30.0, 0.0, count=1))


@pytest.mark.partner("gcc")
def test_the_sync_loop_syncs_every_record_and_leaves_no_file(tmp_path: Path) -> None:
    bare = run_sync_loop(tmp_path, 256, 0.1, 0)
    assert bare.messages == bare.syncs > 0
    paced = run_sync_loop(tmp_path, 256, 0.2, 50)
    assert paced.syncs <= paced.messages
    assert list(tmp_path.iterdir()) == []


@pytest.mark.partner("gcc", "redis-server", "beanstalkd", "nats-server")
@pytest.mark.parametrize(
    "system",
    [redis("everysec", Level.MEMORY), redis("always", Level.DISK), beanstalkd(True), beanstalkd(False), nats()],
    ids=lambda system: system.name,
)
def test_every_peer_starts_stores_gives_back_and_ends(system: System, tmp_path: Path) -> None:
    with system.running(tmp_path / "server") as server:
        put = run_load(system.puts, server.port, LoadPlan(4, 16, 128, 30.0, 0.0, count=2000))
        assert put.messages == 2000
        got = run_load(system.gets, server.port, LoadPlan(2, 3, 128, 30.0, 0.0, count=100, block_bytes=1480))
        per_reply = 1 if system.gets == "beanstalkd-peek" else 10  # a message of 128 bytes is 148 in MetaQ's encoding
        assert got.messages == got.requests * per_reply
        assert 100 <= got.messages <= 100 + 2 * 3 * 10
    assert server.process.returncode is not None


def test_a_server_that_cannot_start_is_reported_with_its_log(tmp_path: Path) -> None:
    program = tmp_path / "broken"
    program.write_text("#!/bin/sh\necho out of luck >&2\nexit 3\n", "utf-8")
    program.chmod(0o755)
    broken = System("broken", Level.DISK, "metaq-put", "", program, "", lambda *_: [], b"x", b"y", ready_line="port")
    with pytest.raises(MeasurementError, match=r"(?s)broken did not start: .*out of luck"):
        broken.start(tmp_path / "server")
