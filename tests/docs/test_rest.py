"""docs/rest.md has the operations that there are, and its program subscribes."""

import subprocess
import sys

from tests.docs.examples import fences
from tests.docs.rest import PAGE, written
from tests.support.broker import BrokerProcess
from tests.support.rest import Rest

AS_WRITTEN = "127.0.0.1:8124"


def test_the_table_of_operations_is_made_of_them() -> None:
    """E-32: ``python -m tests.docs.rest`` writes it."""
    text = PAGE.read_text("utf-8")
    assert written(text) == text


def test_the_program_that_subscribes(broker: BrokerProcess) -> None:
    """E-33: it prints each message and acks it."""
    (program,) = fences("docs/rest.md", "python")
    assert AS_WRITTEN in program.text
    with Rest(broker.http) as rest:
        rest.put("/topics/orders", {"partitions": 1})
        rest.publish("orders", "first", "second")
        command = [sys.executable, "-u", "-c", program.text.replace(AS_WRITTEN, broker.http)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                assert [process.stdout.readline() for _ in range(2)] == ["first\n", "second\n"]
            finally:
                process.kill()
        (lag,) = rest.get("/groups/billing/lag", topic="orders")["partitions"]
        assert lag["committed"] >= 1  # the first one was acked before the second one came
