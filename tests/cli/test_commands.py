"""The command line as scripts and people use it: real processes against a real broker."""

import json
import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import metaq
from metaq.cli import commands
from metaq.cli.host.settings import GROUPS
from metaq.client import TextClient
from metaq.config import FIELDS
from metaq.form import FORM
from tests.support.broker import BrokerProcess, wait_until
from tests.support.terminal import Terminal

DEADLINE_S = 60.0
MANY_LINES = 200_000


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("cli") / "data", "--max-body-bytes", "100000") as process:
        yield process


def command(*arguments: str | bytes) -> list[str | bytes]:
    return [sys.executable, "-m", "metaq", *arguments]


def environment(broker: BrokerProcess | None) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("METAQ_")}
    return clean if broker is None else {**clean, "METAQ_BROKER": f"{broker.host}:{broker.port}"}


def run(
    broker: BrokerProcess | None, *arguments: str | bytes, given: bytes = b"", code: int = 0
) -> subprocess.CompletedProcess[bytes]:
    """Run ``metaq`` to its end and check its exit code."""
    done = subprocess.run(
        command(*arguments), input=given, capture_output=True, env=environment(broker), timeout=DEADLINE_S, check=False
    )
    assert done.returncode == code, (arguments, done.returncode, done.stderr.decode(errors="replace"))
    assert b"Traceback" not in done.stderr
    return done


def output(broker: BrokerProcess | None, *arguments: str) -> str:
    return run(broker, *arguments).stdout.decode()


def as_json(broker: BrokerProcess, *arguments: str) -> Any:
    return json.loads(run(broker, *arguments, "--json").stdout)


def test_put_and_get(broker: BrokerProcess) -> None:
    """MQ-037, MQ-059, MQ-060: one message each way."""
    assert output(broker, "put", "greet", "hello").startswith("stored in greet-0 at 0, id ")
    assert output(broker, "put", "greet", "").startswith("stored in greet-0 at 25, id ")
    assert output(broker, "get", "greet") == "hello\n\n"
    assert output(broker, "get", "greet", "--no-final-newline", "--count", "1") == "hello"
    assert output(broker, "get", "greet", "--position", "25") == "\n"


def test_a_body_may_hold_any_bytes_that_an_argument_may(broker: BrokerProcess) -> None:
    """MQ-011: also those that are no text."""
    body = bytes(range(1, 256))
    run(broker, "put", "bytes", b"--", body)
    assert run(broker, "get", "bytes", "-n").stdout == body


def test_json_of_messages(broker: BrokerProcess) -> None:
    """MQ-010, MQ-012, MQ-033: everything that is known about a message, one object a line."""
    sent = as_json(broker, "put", "json", "é", "--attribute", "TagA")
    assert sent == {"topic": "json", "id": sent["id"], "partition": 0, "position": 0}
    run(broker, "put", "json", b"\xff")
    first, second = run(broker, "get", "json", "--json").stdout.splitlines()
    assert json.loads(first) == {
        "id": sent["id"],
        "flag": 1,
        "attribute": "TagA",
        "body": "é",
        "position": 0,
        "next_position": 30,
        "partition": 0,
    }
    assert json.loads(second)["attribute"] is None
    assert json.loads(second)["body_base64"] == "/w=="


@settings(max_examples=40)
@given(st.lists(st.sampled_from([b"\n", b"\r", b"\r\n", b"\0", b"put t 0 1 0 1", b"\xff\xfe", b"a" * 3000]), max_size=25))
def test_lines_come_back_byte_for_byte(broker: BrokerProcess, pieces: list[bytes]) -> None:
    """MQ-011: empty lines, carriage returns, no text at all, with and without a newline at the end."""
    data = b"".join(pieces)
    topic = f"lines-{next(_topics)}"
    flags = ["--broker", f"{broker.host}:{broker.port}"]
    stored = CliRunner().invoke(commands, ["put", topic, "--lines", "-", *flags], input=data)
    assert stored.exit_code == 0
    ending = [] if data.endswith(b"\n") else ["--no-final-newline"]
    assert ("the last line has no newline" in stored.stderr) == bool(data and ending)
    found = CliRunner().invoke(commands, ["get", topic, *ending, *flags])
    assert found.stdout_bytes == data
    assert found.exit_code == (0 if data else 1)


_topics = iter(range(1_000_000))


def many_lines(file: Path) -> int:
    """Write the standard library's sources into one file, over and over until it has many lines; return their number."""
    library = Path(sysconfig.get_path("stdlib"))
    lines = 0
    with file.open("wb") as out:
        while lines <= MANY_LINES:
            for source in sorted(library.glob("*.py")):
                data = source.read_bytes()
                out.write(data if data.endswith(b"\n") else data + b"\n")
                lines += data.count(b"\n")
    return lines


@pytest.mark.slow
def test_a_file_of_many_lines_survives_a_killed_broker(tmp_path: Path) -> None:
    """MQ-004, MQ-011, RD-005: in through `put --lines`, out through `get`, before and after SIGKILL."""
    file = tmp_path / "file"
    lines = many_lines(file)
    with BrokerProcess(tmp_path / "data") as broker:
        stored = as_json(broker, "put", "file", "--lines", str(file))
        assert stored["messages"] == lines > MANY_LINES
        assert stored["bytes"] == file.stat().st_size - lines
        assert run(broker, "get", "file").stdout == file.read_bytes()
        broker.restart()
        assert run(broker, "get", "file").stdout == file.read_bytes()


def test_lines_stay_together_in_a_topic_of_several_partitions(broker: BrokerProcess) -> None:
    """MQ-017: in order in the partition that the broker chose for the first one, or in the one that was asked for."""
    run(broker, "topic", "create", "several", "4")
    given = b"".join(b"%d\n" % number for number in range(100))
    stored = json.loads(run(broker, "put", "several", "--lines", "-", "--json", given=given).stdout)
    partition = stored["partition"]
    assert run(broker, "get", "several", "--partition", str(partition)).stdout == given
    asked = (partition + 1) % 4
    run(broker, "put", "several", "--lines", "-", "--partition", str(asked), given=given)
    assert run(broker, "get", "several", "--partition", str(asked)).stdout == given


def test_lines_that_the_broker_refuses(broker: BrokerProcess) -> None:
    """E-15: the exit code, and how many lines are stored for certain."""
    given = b"small\n" * 1234 + b"x" * 100_001 + b"\nsmall\n"
    done = run(broker, "put", "refused", "--lines", "-", given=given, code=4)
    assert b"lines 1 to 1234 are stored" in done.stderr
    assert b"100000 (max_body_bytes)" in done.stderr
    assert run(broker, "get", "refused", "--count", "1234").stdout == b"small\n" * 1234


def test_tail(broker: BrokerProcess) -> None:
    """MQ-060, MQ-063: the newest messages, however far back they begin."""
    bodies = [b"%d " % number + b"x" * (number % 7) * 1000 for number in range(300)]
    with TextClient(broker.host, broker.port) as client:
        client.put_many("tail", bodies)
    for count in (0, 1, 10, 150, 300, 1000):
        expected = b"".join(body + b"\n" for body in bodies[300 - min(count, 300) :])
        assert run(broker, "tail", "tail", "-n", str(count)).stdout == expected
    assert run(broker, "tail", "tail").stdout == b"".join(body + b"\n" for body in bodies[-10:])
    for count in (0, 1):
        run(broker, "tail", "tail-unknown", "-n", str(count), code=1)


def wait_for_content(file: Path, content: bytes) -> None:
    wait_until(lambda: file.read_bytes() == content, DEADLINE_S, f"{file} holds {content!r}")


@pytest.mark.parametrize("known", [True, False])
def test_tail_follows_until_it_is_interrupted(broker: BrokerProcess, tmp_path: Path, known: bool) -> None:
    """MQ-005, SG-084: also a topic that does not exist yet, which it says; Ctrl-C ends it without a word."""
    topic = f"follow-{known}"
    with TextClient(broker.host, broker.port) as client, (tmp_path / "out").open("w+b") as out:
        if known:
            client.put_many(topic, [b"0", b"1", b"2"])
        process = subprocess.Popen(
            command("tail", topic, "-f", "-n", "1"), stdout=out, stderr=subprocess.PIPE, env=environment(broker)
        )
        expected = b"2\n" if known else b""
        try:
            wait_for_content(tmp_path / "out", expected)
            for body in (b"a", b"b", b"c"):
                client.put(topic, body)
                expected += body + b"\n"
                wait_for_content(tmp_path / "out", expected)
        finally:
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=DEADLINE_S)
    waits = b"metaq: there is no topic follow-False; did you mean follow-True?; waiting for it\n"
    assert errors == b"" or (errors == waits and not known)  # the first message may have been there before tail was
    assert process.returncode == 130


def test_a_closed_pipe_is_no_error_message(broker: BrokerProcess) -> None:
    """MQ-060: `metaq get | head`."""
    with TextClient(broker.host, broker.port) as client:
        client.put_many("pipe", [b"x" * 50_000] * 100)
    process = subprocess.Popen(command("get", "pipe"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(broker))
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(100)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(DEADLINE_S) == 141


def test_a_full_disk_is_no_traceback(broker: BrokerProcess) -> None:
    """E-15, MQ-060: nor an output that is complete; whether it is noticed at the first write or at the last.

    Where errors go to that disk, too, as with 2>&1, the exit code alone says what happened.
    """
    with TextClient(broker.host, broker.port) as client:
        client.put_many("full", [b"x" * 50_000] * 2)
    for words, errors_to, code in (
        (("get", "full"), subprocess.PIPE, 141),
        (("stats",), subprocess.PIPE, 141),
        (("get", "full"), subprocess.STDOUT, 141),
        (("stats",), subprocess.STDOUT, 141),
        (("put", "full", "x" * 100_001), subprocess.STDOUT, 4),
    ):
        with open("/dev/full", "wb") as full:
            done = subprocess.run(
                command(*words), stdout=full, stderr=errors_to, env=environment(broker), timeout=DEADLINE_S, check=False
            )
        assert done.stderr in (None, b"metaq: cannot write the output: No space left on device\n")
        assert done.returncode == code, (words, errors_to)


def test_nobody_who_gives_a_password() -> None:
    """E-05, E-15: without a terminal the command says where else it looks for one; Ctrl-C ends the question."""
    ask = command("--user", "ann", "stats")
    done = subprocess.run(
        ask,
        capture_output=True,
        env=environment(None),
        timeout=DEADLINE_S,
        check=False,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert b"metaq: there is nobody to ask for the password; set METAQ_PASSWORD\n" in done.stderr
    assert done.returncode == 2 and b"Traceback" not in done.stderr
    with Terminal("--user", "ann", "stats", METAQ_PASSWORD="") as terminal:
        terminal.wait_for("Password of ann: ")
        terminal.interrupt()
        assert terminal.end() == 130
        assert "Traceback" not in terminal.drawn and "Aborted" not in terminal.drawn


def test_offset(broker: BrokerProcess) -> None:
    """MQ-063: the oldest position, the end, and the one nearest to another."""
    for body in ("one", "two"):
        run(broker, "put", "offsets", body)
    assert output(broker, "offset", "offsets") == "oldest 0\nend 46\n"
    assert as_json(broker, "offset", "offsets") == {"topic": "offsets", "partition": 0, "oldest": 0, "end": 46}
    assert output(broker, "offset", "offsets", "--position", "30") == "nearest 23\n"
    run(broker, "offset", "offsets-unknown", code=1)


def test_stats(broker: BrokerProcess) -> None:
    """MQ-064: the broker's own lines, or JSON."""
    run(broker, "put", "counted", "hello")
    assert f"pid {broker.pid}" in output(broker, "stats").splitlines()
    assert as_json(broker, "stats")["pid"] == broker.pid
    assert as_json(broker, "stats", "counted")["message_count"] == 1
    assert as_json(broker, "stats", "offsets")["counted part 0"] == {"min_offset": 0, "max_offset": 25}
    assert "STATS" not in output(broker, "stats", "topics")


def test_topics(broker: BrokerProcess) -> None:
    """MQ-006, MQ-017: create, grow, list."""
    assert output(broker, "topic", "create", "grown") == "grown has 1 partition\n"
    assert as_json(broker, "topic", "create", "grown", "3") == {"topic": "grown", "partitions": 3}
    assert output(broker, "topic", "create", "grown", "2") == "grown has 3 partitions\n"
    run(broker, "put", "grown", "hello", "--partition", "2")
    run(broker, "topic", "create", "untouched", "2")
    listed = output(broker, "topic", "list", "--json").splitlines()
    rows = {row["topic"]: row for row in map(json.loads, listed)}
    rights = {"accept_publish": True, "accept_subscribe": True}
    assert rows["grown"] == {"topic": "grown", "partitions": 3, "messages": 1, "bytes": 25, **rights}
    assert rows["untouched"] == {"topic": "untouched", "partitions": 2, "messages": 0, "bytes": 0, **rights}
    assert "grown: partitions 3, messages 1, bytes 25" in output(broker, "topic", "list").splitlines()


def test_verify_and_repair(tmp_path: Path) -> None:
    """E-10: exit code 1, file and offset of each damage; a repair brings back what the log knows."""
    with BrokerProcess(tmp_path / "data", "--segment-bytes", str(4 << 20)) as broker:
        run(broker, "put", "checked", "--lines", "-", given=b"".join(b"line %d\n" % number for number in range(3000)))
        assert b"another process" in run(None, "verify", str(broker.data), code=1).stderr
        assert broker.terminate() == 0
        data = str(broker.data)
        assert output(None, "verify", data).startswith("checked 3000 records, 3000 units, ")

        (queue,) = [file for file in (broker.data / "consumequeue").rglob("*") if file.is_file()]
        queue.unlink()
        assert str(queue.parent).encode() in run(None, "verify", data, code=1).stdout
        assert output(None, "verify", data, "--repair").startswith("checked 3000 records, 3000 units, ")

        (segment, *_) = sorted((broker.data / "commitlog").iterdir())
        content = segment.read_bytes()
        at = content.index(b"line 1500")
        segment.write_bytes(content[:at] + b"L" + content[at + 1 :])
        done = run(None, "verify", data, "--json", code=1)
        (damage,) = json.loads(done.stdout)["damages"]
        assert damage["file"] == str(segment)
        assert at - 200 < damage["offset"] <= at
        assert f"{segment} {damage['offset']}: ".encode() in run(None, "verify", data, code=1).stdout
        assert " bytes in quarantine: no damage" in output(None, "verify", data, "--repair")
        broker.restart()
        found = run(broker, "get", "checked").stdout.splitlines()
        assert found == [b"line %d" % number for number in range(3000) if number != 1500]

        assert broker.terminate() == 0
        (broker.data / "store.json").write_bytes(b"torn")
        assert b"whose folder it is is not known" in run(None, "verify", data, "--repair").stderr
        broker.restart()
        assert broker.terminate() == 0
        assert not run(None, "verify", data).stderr
    assert b"is not a data folder" in run(None, "verify", str(tmp_path), code=1).stderr
    run(None, "verify", str(tmp_path / "absent"), code=2)


def test_bench(broker: BrokerProcess) -> None:
    """MQ-037: a bounded load and its rates."""
    rates = as_json(broker, "bench", "--messages", "25000", "--size", "10", "--topic", "bench")
    assert rates["put"]["messages"] == 25_000
    assert rates["get"]["messages"] == 25_001
    assert rates["get"]["bytes"] == 250_010
    assert "put" in output(broker, "bench", "--messages", "100", "--topic", "bench")


def test_exit_codes(broker: BrokerProcess) -> None:
    """E-15: a script can tell what went wrong, a person reads it."""
    run(broker, "topic", "create", "void")
    assert b"nothing in void from 5 on" in run(broker, "get", "void", "--position", "5", code=1).stderr
    assert b"give either BODY or --lines FILE" in run(broker, "put", "t", code=2).stderr
    assert b"give either BODY or --lines FILE" in run(broker, "put", "t", "x", "--lines", "-", code=2).stderr
    assert b"topic 'a b' is not" in run(broker, "get", "a b", code=2).stderr
    assert b"'a:b' is not HOST or HOST:PORT" in run(broker, "get", "t", "--broker", "a:b", code=2).stderr
    assert b"No such command 'gte'" in run(broker, "gte", code=2).stderr
    assert b"cannot connect to 127.0.0.1:1: " in run(broker, "get", "t", "--broker", "127.0.0.1:1", code=3).stderr
    assert b"t has no partition 99; it has only partition 0" in run(broker, "put", "t", "x", "--partition", "99", code=4).stderr
    assert b"characters other than" in run(broker, "topic", "create", "a/b", code=4).stderr


def test_help_and_version() -> None:
    """MQ-057: every command says what it does, and the exit codes are there to read."""
    text = output(None, "--help")
    assert all(f"  {code} " in text for code in (0, 1, 2, 3, 4, 130, 141))
    for name in commands.list_commands(None):  # type: ignore[arg-type]
        assert f"  {name} " in text
    assert output(None, "--version") == f"metaq {metaq.__version__} ({FORM})\n"


def test_help_of_serve() -> None:
    """MQ-103, 19.1: --help-all has every setting once, under its heading; --help has the common ones."""
    assert sorted(" ".join(f"{group.common} {group.rare}" for group in GROUPS).split()) == sorted(FIELDS.keys() - {"topics"})
    everything, common = (output(None, "serve", flag) for flag in ("--help-all", "--help"))
    assert len(common.splitlines()) < len(everything.splitlines()) / 2
    text, short = (" ".join(shown.partition("\nSIZE is ")[0].split()) for shown in (everything, common))
    for group in GROUPS:
        assert f" {group.heading}: --" in text
        for name in f"{group.common} {group.rare}".split():
            flag = f" --{name.replace('_', '-')} "
            assert (text.count(flag), short.count(flag)) == (1, 1 if name in group.common.split() else 0)
            assert FIELDS[name].rules.description in text
    assert "--segment-bytes SIZE size of a commit-log segment [default: 1G]" in short
    assert "--keep-hours LENGTH age at which a segment expires [default: 3d]" in short
    assert "--idle-timeout-ms LENGTH silence after which a connection is closed [default: 5m]" in text
    assert f"All {len(FIELDS) - 1} settings: metaq serve --help-all\n" in common


def test_the_examples_of_serve_work(tmp_path: Path) -> None:
    """19.1: as they stand in its help, but for the addresses, which a test does not choose."""
    variables = {f"METAQ_{name}LISTEN": "127.0.0.1:0" for name in ("", "REGISTRY_", "HTTP_")} | {
        "METAQ_REMOTING_LISTEN": "none"
    }
    epilog = commands.get_command(None, "serve").epilog  # type: ignore[arg-type,union-attr]
    found = [line.split() for line in str(epilog).splitlines() if line.startswith("  metaq serve ")]
    assert len(found) >= 3
    for _, *words in found:
        process = subprocess.Popen(
            command(*words), cwd=tmp_path, env={**environment(None), **variables}, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        with process:
            try:
                assert process.stdout.readline().startswith("metaq ready listen=")
            finally:
                process.terminate()
            assert process.wait(DEADLINE_S) == 0


def test_settings_come_from_flags_then_environment_then_file(tmp_path: Path) -> None:
    """MQ-103: and every source is checked with the same words."""
    file = tmp_path / "broker.yaml"
    file.write_text("max_body_bytes: 1000\nmax_line_bytes: 2000\nmax_topics: 30\ntopics:\n  made: {partitions: 2}\n")
    with BrokerProcess(tmp_path / "data", "--config", str(file), "--max-line-bytes", "2222") as broker:
        shown = as_json(broker, "stats", "config")
        assert "made" in output(broker, "topic", "list")
    assert shown["metaq"]["max_body_bytes"] == 1000
    assert shown["metaq"]["max_line_bytes"] == 2222
    assert shown["topic=made"]["numPartitions"] == 2
    file.write_text("listen: of-the-file\n")
    for variables, arguments, used in (
        ({}, [], "of-the-file"),
        ({"METAQ_LISTEN": "of-the-environment"}, [], "of-the-environment"),
        ({"METAQ_LISTEN": "of-the-environment"}, ["--listen", "of-the-flag"], "of-the-flag"),
    ):
        done = subprocess.run(
            command("serve", "--config", str(file), *arguments),
            env={**environment(None), **variables},
            stderr=subprocess.PIPE,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert f"'{used}' is not HOST:PORT" in done.stderr
        assert done.returncode != 0
    for arguments, problem in (
        (["--max-topics", "many"], b"max_topics: must be a whole number"),
        (["--durability", "none"], b"durability: must be"),
        (["--no-such-setting", "1"], b"No such option '--no-such-setting'"),
        (["--config", str(tmp_path / "absent")], b"cannot read the configuration file"),
    ):
        assert problem in run(None, "serve", *arguments, code=2).stderr


def test_serve_that_cannot_start(broker: BrokerProcess, tmp_path: Path) -> None:
    """SG-042: the address or the folder of another broker."""
    taken = f"{broker.host}:{broker.port}"
    assert b"is another broker running?" in run(None, "serve", "--data", str(tmp_path), "--listen", taken, code=1).stderr
    free = ("--listen", "127.0.0.1:0", "--remoting-listen", "none", "--registry-listen", "127.0.0.1:0")
    locked = run(None, "serve", "--data", str(broker.data), *free, code=1)
    assert b"is in use by another process" in locked.stderr
    nowhere = run(None, "serve", "--data", "/proc/nope", *free, "--http-listen", "none", code=1)
    assert nowhere.stderr.startswith(b"metaq: cannot create /proc/nope: ")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_stops_in_order(tmp_path: Path, number: signal.Signals) -> None:
    """MQ-054: with exit code 0, whether a service manager or a person stops it."""
    with BrokerProcess(tmp_path / "data") as broker:
        os.kill(broker.pid, number)
        wait_until(lambda: not broker.running, DEADLINE_S, f"the end after {number.name}")
        assert broker.terminate() == 0
        assert "Traceback" not in broker.stderr()


SLOW = {"ssl", "hashlib", "hmac", "json", "orjson", "logging", "dataclasses", "decimal", "configparser", "crcmod", "queue"}
"""Modules that a put has no use for; together they take as long as all that it needs."""


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("metaq", {"metaq.client", "socket"}),
        ("metaq.cli", {"gevent", "rich", "pydantic", "yaml", "metaq.server", "metaq.store"}),
        ("metaq.cli.messages.lines", {"gevent", "rich", "pydantic", "yaml", "metaq.server", "metaq.store", *SLOW}),
        ("metaq.cli.messages.lines", {"metaq.client.client", "metaq.client.sending", "metaq.client.consuming", "metaq.config"}),
        ("metaq.cli.host.serve", {"rich", "pydantic", "yaml", "asyncio", "kazoo", "rocksdict", "ssl", "http", "metaq.client"}),
        ("metaq.cli.host.serve", {"crcmod", "falcon", "jinja2", "msgspec", "shutil", "subprocess", "logging.handlers"}),
        ("metaq.client", {"gevent", "click", "rich", "pydantic", "yaml", "metaq.server", "metaq.store", "metaq.client.client"}),
        ("metaq.client.client", {"gevent", "click", "rich", "pydantic", "yaml", "metaq.server", "metaq.store", "ssl"}),
    ],
)
def test_commands_import_only_what_they_need(module: str, absent: set[str]) -> None:
    """P15: a broker stays small, and a put from a script starts fast."""
    program = f"import sys, {module}; print(*sorted(sys.modules), sep='\\n')"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert module in loaded
    assert absent & set(loaded) == set()
