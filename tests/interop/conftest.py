"""Fixtures for the tests of unmodified RocketMQ clients: one build of each driver, a broker, driver processes."""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.interop.clients import ClientProcess, go_command, java_command
from tests.interop.java5 import NEWEST, OLDER, Java5, java5_command
from tests.support.broker import BrokerProcess

pytest.register_assert_rewrite("tests.interop.scenarios")

Spawn = Callable[[tuple[str, ...], str], ClientProcess]
"""Starts a driver: its program, the address of the registry."""

Start5 = Callable[[str], Java5]
"""Starts another driver of the Java client 5, in the version that the test is about: the address of the registry."""


@pytest.fixture(scope="session")
def java_program() -> tuple[str, ...]:
    return java_command()


@pytest.fixture(scope="session")
def go_program() -> tuple[str, ...]:
    return go_command()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("broker") / "data") as process:
        yield process


@pytest.fixture(scope="module")
def spawn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spawn]:
    """Driver processes that end with the module at the latest."""
    with ExitStack() as stack:

        def start(program: tuple[str, ...], registry: str) -> ClientProcess:
            home = tmp_path_factory.mktemp("client") / "home"
            return stack.enter_context(ClientProcess(program, registry, home))

        yield start


@pytest.fixture(scope="module")
def client(spawn: Spawn, program: tuple[str, ...], broker: BrokerProcess) -> ClientProcess:
    """The process that most scenarios of a module run in; ``program`` is the module's."""
    return spawn(program, broker.registry)


@pytest.fixture(scope="module", params=[*(pytest.param(version, marks=pytest.mark.slow) for version in OLDER), NEWEST])
def version(request: pytest.FixtureRequest) -> str:
    """The version of RocketMQ's Java client 5."""
    chosen: str = request.param
    return chosen


@pytest.fixture(scope="module")
def start5(tmp_path_factory: pytest.TempPathFactory, version: str) -> Iterator[Start5]:
    """Drivers that end with the module at the latest."""
    with ExitStack() as stack:

        def start(registry: str) -> Java5:
            return stack.enter_context(Java5(java5_command(version), registry, tmp_path_factory.mktemp("client5") / "home"))

        yield start


@pytest.fixture(scope="module")
def java5(start5: Start5, broker: BrokerProcess) -> Java5:
    """The driver that most tests of a module share."""
    return start5(broker.registry)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A name for the topic, group and clients of one test with one version."""
    return re.sub(r"\W+", "-", request.node.name.removeprefix("test_")).strip("-")
