"""Authentication, which decides who may ask: what it checks, in which order, and what a stranger can learn from it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

import gevent
import pytest

from metaq.errors import AccessDenied, Overloaded
from metaq.protocol.remoting.codes import Request
from metaq.protocol.remoting.frames import FrameReader, RemotingCommand, encode_request
from metaq.protocol.remoting.signature import Credentials
from metaq.server.access import authentication as authentication_module
from metaq.server.access.authentication import MOST_WAITING, WRONG, Authentication
from metaq.server.access.guesses import ALL_TIMES
from metaq.server.access.permissions import Action
from metaq.server.access.users import User, hashed
from metaq.server.remoting.session import RemotingSession
from tests.support.descriptors import no_descriptors
from tests.support.users import ADMIN, READER, USERS, WRITER, write_users

HERE: Final = "10.0.0.1"
A_MINUTE: Final = 5
HASHED: Final = "hashed-password"
DEADLINE_S: Final = 60.0


class FakeSession:
    """A connection, as far as authentication looks at it."""

    def __init__(self, authentication: Authentication, address: str = HERE) -> None:
        self.address = (address, 1)
        self.principal = authentication.anonymous


class Opened:
    """An authentication, and the file of its users."""

    def __init__(self, folder: Path) -> None:
        self.path = write_users(folder / "users.yaml", f"{USERS}  ann: {{password: {hashed(HASHED)}}}\n")
        self.now_s = 0.0
        self.authentication = Authentication(str(self.path), A_MINUTE, lambda: self.now_s)

    def session(self, address: str = HERE) -> RemotingSession:
        return cast(RemotingSession, FakeSession(self.authentication, address))

    def left(self, address: str = HERE, name: str = "nemo") -> int:
        """How many guesses are looked at now; none is after it."""
        for number in range(1000):
            try:
                self.authentication._guesses.take(address, name)
            except AccessDenied:
                return number
        raise AssertionError("there is no limit")


@pytest.fixture
def opened(tmp_path: Path) -> Opened:
    return Opened(tmp_path)


def signed(who: Credentials, body: bytes = b"", **changed: str) -> RemotingCommand:
    fields = {**who.signed({"topic": "t"}, body), **changed}
    (request,) = FrameReader().receive(encode_request(Request.GET_ROUTEINFO_BY_TOPIC, 1, fields, body))
    return request


def counted(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, before: Callable[[], None] = lambda: None) -> list[object]:
    """The calls of a function; ``before`` is called with each."""
    calls: list[object] = []
    real = getattr(where, name)

    def call(*arguments: Any) -> Any:
        calls.append(arguments[0])
        before()
        return real(*arguments)

    monkeypatch.setattr(where, name, call)
    return calls


# -- passwords --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nemo", "anonymous", WRITER.name, "ann"])
def test_a_wrong_password_takes_one_hash(opened: Opened, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """E-05: whether there is such a user, and whatever is kept of its password: names cannot be told apart by time."""
    hashes = counted(monkeypatch, authentication_module, "run_in_pool")
    made = counted(monkeypatch, authentication_module, "no_user")
    with pytest.raises(AccessDenied, match=f"^{WRONG}$"):
        opened.authentication.check(name, "wrong-password", HERE)
    assert (len(hashes), len(made)) == (1, 0)


def test_what_was_no_guess_is_given_back(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """E-05: when too many passwords wait, none has been looked at, and who was right has not guessed."""
    monkeypatch.setattr(opened.authentication, "_waiting", MOST_WAITING)
    for name in ("nemo", WRITER.name, "ann"):
        for _ in range(A_MINUTE):
            with pytest.raises(Overloaded):
                opened.authentication.check(name, "wrong-password", HERE)
    assert opened.authentication.check(WRITER.name, WRITER.secret, HERE).name == WRITER.name
    assert opened.left() == A_MINUTE


def test_users_that_are_read_again_meanwhile(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """E-05: the password is compared with the new ones, and one that is right is not refused, nor counted."""
    text = opened.path.read_text()

    def reload() -> None:
        if len(hashes) == 1:
            write_users(opened.path, text.replace("admin: true", "admin: false"))
            opened.authentication.reload()

    hashes = counted(monkeypatch, authentication_module, "run_in_pool", reload)
    assert opened.authentication.check("ann", HASHED, HERE).name == "ann"
    assert len(hashes) == 2
    assert opened.left() == A_MINUTE


def test_a_password_that_is_taken_away_meanwhile(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """E-05: does not let in."""

    def remove() -> None:
        if len(hashes) == 1:
            write_users(opened.path)
            opened.authentication.reload()

    hashes = counted(monkeypatch, authentication_module, "run_in_pool", remove)
    with pytest.raises(AccessDenied, match=WRONG):
        opened.authentication.check("ann", HASHED, HERE)


def test_many_clients_of_one_host_log_in_at_once(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """E-05: who says the same shares one check, and none of them is a guess."""
    hashes = counted(monkeypatch, authentication_module, "run_in_pool")
    logins = [gevent.spawn(opened.authentication.check, "ann", HASHED, HERE) for _ in range(10 * A_MINUTE)]
    gevent.joinall(logins, timeout=DEADLINE_S, raise_error=True)
    assert all(login.value is opened.authentication.check("ann", HASHED, HERE) for login in logins)
    assert len(hashes) == 1
    assert (opened.left(), opened.left(name="ann")) == (A_MINUTE, A_MINUTE)


def test_the_same_wrong_password_at_once_is_guessed_once_by_each(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """E-05: nobody gets to know more by asking at the same time."""
    hashes = counted(monkeypatch, authentication_module, "run_in_pool")
    logins = [gevent.spawn(opened.authentication.check, "ann", "wrong-password", HERE) for _ in range(2 * A_MINUTE)]
    gevent.joinall(logins, timeout=DEADLINE_S)
    assert all(isinstance(login.exception, AccessDenied) for login in logins)
    assert (len(hashes), opened.left()) == (A_MINUTE, 0)


def test_a_password_that_was_right_before_is_a_guess_elsewhere(opened: Opened) -> None:
    """E-05, P33: beyond the limit of its address nobody learns that it is right, although no hash is needed to know."""
    elsewhere = "10.9.9.9"
    assert opened.authentication.check("ann", HASHED, HERE).name == "ann"
    for _ in range(2 * A_MINUTE):
        assert opened.authentication.check("ann", HASHED, elsewhere).name == "ann"
    assert opened.left(elsewhere) == A_MINUTE
    assert opened.authentication.check("ann", HASHED, elsewhere).name == "ann"  # was right there before
    opened.left("10.9.9.10")
    with pytest.raises(AccessDenied, match="too many wrong"):
        opened.authentication.check("ann", HASHED, "10.9.9.10")


# -- secrets without a name -------------------------------------------------------------------------------------------


def test_one_secret_opens_no_way_to_guess_others(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """E-05, P33: who holds one, at many addresses, guesses no more than others from many addresses."""
    addresses = [f"10.1.0.{number}" for number in range(100)]
    for address in addresses:
        opened.authentication.holder(READER.secret, address)
    looked_at = counted(monkeypatch, User, "proves")
    for address in addresses * (2 * A_MINUTE):
        with pytest.raises(AccessDenied):
            opened.authentication.holder("wrong-secret", address)
    writer = opened.authentication._users[WRITER.name]
    assert sum(user is writer for user in looked_at) == A_MINUTE * ALL_TIMES
    with pytest.raises(AccessDenied, match="too many wrong"):
        opened.authentication.holder(WRITER.secret, "10.1.0.99")  # although it is right: it is not looked at


def test_a_holder_who_is_known_is_not_hindered_by_others(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """E-05: every secret is looked at, and what was right is not counted."""
    for secret in (READER.secret, WRITER.secret) * (3 * A_MINUTE):
        opened.authentication.holder(secret, HERE)
    opened.left()
    looked_at = counted(monkeypatch, User, "proves")
    assert opened.authentication.holder(WRITER.secret, HERE).name == WRITER.name
    assert len(looked_at) == 2
    with pytest.raises(AccessDenied):
        opened.authentication.holder(ADMIN.secret, HERE)  # was never right here


def test_guesses_of_one_secret_keep_no_other_holder_out(opened: Opened) -> None:
    """E-05: who was right here before is counted apart from everybody else who was."""
    for secret in (READER.secret, WRITER.secret):
        opened.authentication.holder(secret, HERE)
    assert (opened.left(name=READER.name), opened.left()) == (A_MINUTE, A_MINUTE)
    assert opened.authentication.holder(WRITER.secret, HERE).name == WRITER.name


def test_wrong_secrets_without_a_name_keep_no_named_user_out(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """E-05: who was right here before by signature or password; only secrets without a name share a limit."""
    opened.authentication.identify(opened.session(), signed(WRITER))
    opened.authentication.check("ann", HASHED, HERE)
    looked_at = counted(monkeypatch, User, "proves")
    for _ in range(4 * A_MINUTE):
        with pytest.raises(AccessDenied):
            opened.authentication.holder("wrong-secret", HERE)
    writer = opened.authentication._users[WRITER.name]
    assert sum(user is writer for user in looked_at) == 2 * A_MINUTE
    with pytest.raises(AccessDenied, match="too many wrong"):
        opened.authentication.holder(WRITER.secret, HERE)
    opened.authentication.identify(opened.session(), signed(WRITER))
    assert opened.authentication.check("ann", HASHED, HERE).name == "ann"
    opened.now_s += 60
    assert opened.authentication.holder(WRITER.secret, HERE).name == WRITER.name


# -- signatures -------------------------------------------------------------------------------------------------------


def test_wrong_signatures_are_told_alike(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """E-05: no such user, one without a secret, a wrong secret: the same words after the same work."""
    computed = counted(monkeypatch, authentication_module, "is_signed_with")
    said = set()
    for name in ("nemo", "ann", "anonymous", WRITER.name):
        with pytest.raises(AccessDenied) as caught:
            opened.authentication.identify(opened.session(), signed(Credentials(name, "wrong-secret")))
        said.add(str(caught.value).replace(repr(name), "NAME"))
    assert len(said) == 1
    assert len(computed) == 4


def test_no_signature_is_computed_that_may_not_be_looked_at(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """E-05: a body may have 16 MB; a session that is that user already is looked at all the same."""
    known, stranger = opened.session(), opened.session()
    opened.authentication.identify(known, signed(WRITER))
    opened.left()
    computed = counted(monkeypatch, authentication_module, "is_signed_with")
    for name in ("nemo", "anonymous", READER.name):
        with pytest.raises(AccessDenied, match="too many wrong"):
            opened.authentication.identify(stranger, signed(Credentials(name, "wrong-secret")))
    assert computed == []
    opened.authentication.identify(known, signed(WRITER, b"body"))
    with pytest.raises(AccessDenied, match="wrong signature"):
        opened.authentication.identify(known, signed(WRITER, Signature="wrong"))
    assert known.principal.name == WRITER.name


def test_a_user_who_is_added_again_is_another_one(opened: Opened) -> None:
    """E-05: sessions of the one before stay what they are: nobody's."""
    session, before = opened.session(), opened.authentication.check(WRITER.name, WRITER.secret, HERE)
    opened.authentication.identify(session, signed(WRITER))
    for text in (USERS.replace("writer:", "writer2:"), USERS):
        write_users(opened.path, text)
        opened.authentication.reload()
        assert not before.named
        assert not session.principal.named
    opened.authentication.identify(session, signed(WRITER))
    assert session.principal.named
    assert session.principal is opened.authentication.check(WRITER.name, WRITER.secret, HERE)


def test_a_file_that_could_not_be_read_is_tried_again(opened: Opened, caplog: pytest.LogCaptureFixture) -> None:
    """E-05: although it has not changed since, once there are descriptors again; the log says it once."""
    write_users(opened.path, USERS.replace("writer:", "writer2:"))
    with no_descriptors():
        for _ in range(2):
            opened.authentication.reload_if_changed()
    assert WRITER.name in opened.authentication.users
    assert caplog.text.count("users not reloaded") == 1
    opened.authentication.reload_if_changed()
    assert "writer2" in opened.authentication.users


def test_a_file_with_a_mistake_is_read_once(opened: Opened) -> None:
    """E-05: until it changes; to read a long one every second would stop everybody else's work."""
    write_users(opened.path, "users: {ann: {}}")
    opened.authentication.reload_if_changed()
    stamp = opened.authentication._stamp
    with no_descriptors():
        opened.authentication.reload_if_changed()
    assert opened.authentication._stamp == stamp != ()


def test_nobody_stays_nobody(opened: Opened) -> None:
    """E-05: what the file grants to those who have not logged in holds for connections that are open, again and again."""
    nobody = opened.authentication.anonymous
    for topics in ("{t: SUB}", "{}", "{t: SUB}"):
        for text in (USERS, f"{USERS}  anonymous: {{topics: {topics}}}\n"):
            write_users(opened.path, text)
            opened.authentication.reload()
        assert opened.authentication.anonymous is nobody
        assert nobody.may(Action.SUBSCRIBE, "t") == (topics != "{}")
