"""Administration: brokers, and what asking them is made of."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

from metaq.client.admin.views import BrokerIdentity, BrokerView, read_identity, read_lines, read_table
from metaq.client.connecting.core import Core
from metaq.client.connecting.transport import RemotingRequest, ask, successful
from metaq.client.consuming.offsets import QueueEnds
from metaq.errors import ClientError, Refused
from metaq.protocol.remoting import headers
from metaq.protocol.remoting.codes import MASTER, Request
from metaq.protocol.remoting.frames import RemotingCommand

T = TypeVar("T")


def do_all(calls: Iterable[Callable[[], object]]) -> None:
    """Make all calls, whichever fails. Raise the first ``ClientError`` at the end."""
    errors: list[ClientError] = []
    for call in calls:
        try:
            call()
        except ClientError as error:
            errors.append(error)
    if errors:
        raise errors[0]


class BrokerAdmin:
    """The administration of a cluster's brokers."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._ends = QueueEnds(core)

    @property
    def registries(self) -> tuple[str, ...]:
        """The addresses of the registries that it asks."""
        return self._core.routes.registries

    def brokers(self) -> list[BrokerView]:
        """Return all broker processes that the registry knows.

        Raises:
            RouteNotFound: no registry answers.
        """
        info = self._core.routes.clusters(self._core.deadline())
        return sorted(
            BrokerView(broker.cluster, broker.name, number, address)
            for broker in info.brokers.values()
            for number, address in broker.addresses.items()
        )

    def masters(self) -> list[BrokerView]:
        """Return the broker processes that are masters.

        Raises:
            RouteNotFound: no registry answers.
        """
        return [broker for broker in self.brokers() if broker.broker_id == MASTER]

    def identity(self, address: str) -> BrokerIdentity:
        """Return which process answers at an address. Servers that are not metaq's refuse with code 3.

        Args:
            address: the broker's address, ``host:port``.

        Raises:
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        return read_identity(self._ask(address, Request.IDENTITY).fields)

    def broker_info(self, address: str) -> dict[str, str]:
        """Return a broker's runtime statistics, with its own names and values.

        Args:
            address: the broker's address, ``host:port``.

        Raises:
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        return read_table(self._ask(address, Request.GET_BROKER_RUNTIME_INFO).body)

    def broker_config(self, address: str) -> dict[str, str]:
        """Return a broker's settings.

        Args:
            address: the broker's address, ``host:port``.

        Raises:
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        return read_lines(self._ask(address, Request.GET_BROKER_CONFIG).body)

    def update_broker_config(self, /, address: str, **values: str) -> None:
        """Change settings of a running broker. The broker decides which ones may change.

        Args:
            address: the broker's address, ``host:port``.
            **values: settings and their new values, as text.

        Raises:
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        body = "".join(f"{name}={value}\n" for name, value in values.items())
        self._ask(address, Request.UPDATE_BROKER_CONFIG, None, body.encode())

    def set_broker_writable(self, broker_name: str, *, writable: bool) -> int:
        """Take write permission from all topics of a broker in one registry, or give it back; return how many topics change.

        Args:
            broker_name: the name of the broker.
            writable: ``False`` takes the permission, ``True`` gives it back.

        Raises:
            RouteNotFound: no registry answers.
            Refused: the registry refuses.
        """
        code = Request.ADD_WRITE_PERM_OF_BROKER if writable else Request.WIPE_WRITE_PERM_OF_BROKER
        request = RemotingRequest.of(code, headers.BrokerNameOnly(broker_name))
        response = successful(self._core.routes.ask_registry(request, self._core.deadline()))
        return int(response.fields.get("addTopicCount" if writable else "wipeTopicCount", "0"))

    # -- asking ------------------------------------------------------------------------------------------------------

    def _ask(self, address: str, code: Request, header: tuple[object, ...] | None = None, body: bytes = b"") -> RemotingCommand:
        return ask(self._core.transport, address, RemotingRequest.of(code, header, body), self._core.deadline())

    def _tell_registries(self, code: Request, header: tuple[object, ...]) -> None:
        """Send a request to every registry, because registries do not share their state. Raise the first error at the end."""
        do_all(partial(self._ask, address, code, header) for address in self._core.routes.registries)

    def _first(self, ask_one: Callable[[str], T]) -> T:
        """Return the answer of the first master that does not refuse; ``Refused`` when all do."""
        refused: Refused | None = None
        for broker in self.masters():
            try:
                return ask_one(broker.address)
            except Refused as error:
                refused = error
        raise refused if refused is not None else ClientError("the registry knows no master")
