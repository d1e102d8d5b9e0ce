"""The users file, what it grants, and how fast passwords can be guessed."""

import re
import stat
from pathlib import Path

import pytest

from metaq.errors import AccessDenied, ConfigError
from metaq.server.access.guesses import ALL_TIMES, MOST_BUCKETS, Guesses
from metaq.server.access.permissions import Action, Permission, Principal, allowed, demand, denied
from metaq.server.access.users import User, credentials, hashed, written_permission
from metaq.server.access.usersfile import load_users, save_users
from tests.support.users import write_users


def file_of(folder: Path, text: str) -> Path:
    return write_users(folder / "users.yaml", text)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    """E-05: written as a whole, for its owner only."""
    grants = {"orders": Permission.SUB, "audit-*": Permission.PUB | Permission.CREATE, "*": Permission.DENY}
    users = {
        "anonymous": User(topics={"news": Permission.SUB}),
        "ann": User(password=hashed("a password"), admin=True),
        "billing": User(secret="12345678", topics=grants, groups={"billing": Permission.SUB}),
    }
    path = tmp_path / "users.yaml"
    save_users(path, users)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_users(path) == users
    assert "PUB|CREATE" in path.read_text()
    assert [entry.name for entry in tmp_path.iterdir()] == ["users.yaml"]
    assert credentials(users, "cluster_user", "billing").secret == "12345678"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("users: {ann: {secret: 12345678, pasword: x}}", "pasword"),
        ("users: {ann: {secret: hush-hush, password: hush-hush}}", "a secret and a password"),
        ("users: {ann: {secret: hush}}", "characters"),
        ("users: {ann: {password: hush-hush}}", "not a hash"),
        ("users: {ann: {admin: true}}", "neither a secret nor a password"),
        ("users: {ann: {secret: hush-hush, topics: {t: PUB|HUSH}}}", "HUSH"),
        ("users: {a b: {secret: hush-hush}}", "name"),
        ("users: {anonymous: {admin: true}}", "anonymous"),
        ("users: {ann: hush-hush}", "ann"),
        ("users: {ann: {secret: [hush-hush}", "not YAML"),
        ("- hush-hush", "users_file"),
        ("users: {ann: {secret: \x01hush-hush}}", "not YAML"),
        ("users:\n  ann:\n    secret: !hush-hush", "line 3: not YAML"),
        ("users:\n  ann: {secret: *hush-hush}", "line 2: not YAML"),
        (
            "users:\n  ann: {secret: hush-hush}\n  bob: {secret: hush-hush}\n  ann: {secret: hush-hush}",
            "line 4 has the same name",
        ),
        ("users: {ann: {secret: hush-hush, topics: {t: PUB, t: SUB}}}", "the same name as line 1"),
        ("users: {ann: {secret: " + "[" * 2000 + "]" * 2000 + "}}", "nested too deep"),
        ("users: &all {ann: *all}", "nested too deep"),
        ("users:\n  ann: {secret: 1234-56-78}", "put a secret in quotes"),
        ("users:\n  ann: {secret: !!int hush-hush}", "put a secret in quotes"),
        ("users:\n  ann: {secret: !!bool hush-hush}", "put a secret in quotes"),
        ("users:\n  ann: {secret: !!timestamp hush-hush}", "put a secret in quotes"),
    ],
)
def test_a_file_that_is_wrong(tmp_path: Path, text: str, problem: str) -> None:
    """E-05, E-23: says what is wrong, and nothing of the secrets that stand there."""
    with pytest.raises(ConfigError, match=re.escape(problem)) as caught:
        load_users(file_of(tmp_path, text))
    assert "hush-hush" not in str(caught.value)
    assert "1234-56-78" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_file_that_others_can_read(tmp_path: Path) -> None:
    """E-05: is refused, as ssh does with keys."""
    path = file_of(tmp_path, "users: {}")
    for mode in (0o640, 0o604, 0o660):
        path.chmod(mode)
        with pytest.raises(ConfigError, match="chmod 600"):
            load_users(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_users(tmp_path / "absent.yaml")


def test_passwords_are_kept_as_salted_hashes() -> None:
    """E-05: equal passwords have other hashes; a hash signs nothing."""
    first, second = hashed("a password"), hashed("a password")
    assert first != second
    assert "a password" not in first
    user = User(password=first)
    assert user.proves("a password")
    assert not user.proves("a Password")
    assert "scrypt" not in repr(user)
    with pytest.raises(ConfigError, match="cluster_user"):
        credentials({"ann": user}, "cluster_user", "ann")


def principal(**grants: dict[str, Permission]) -> Principal:
    found = Principal("ann")
    found.become(grants.get("topics", {}), grants.get("groups", {}), admin=False)
    return found


def test_the_name_counts_before_the_longest_beginning() -> None:
    """E-06: and what no line grants is denied."""
    ann = principal(
        topics={"*": Permission.SUB, "a*": Permission.PUB, "ab*": Permission.DENY, "abc": Permission.PUB | Permission.SUB}
    )
    may = [(name, allowed(ann, Action.PUBLISH, name), allowed(ann, Action.SUBSCRIBE, name)) for name in ("x", "a", "ab", "abc")]
    assert may == [("x", False, True), ("a", True, False), ("ab", False, False), ("abc", True, True)]
    assert not allowed(principal(), Action.SUBSCRIBE, "x")
    assert written_permission(Permission.DENY) == "DENY"


def test_topics_of_the_broker_are_for_administrators() -> None:
    """E-06, P21: whatever a pattern says. A retry topic belongs to its group."""
    ann = principal(topics={"*": Permission.PUB | Permission.SUB}, groups={"g": Permission.SUB})
    for action in (Action.PUBLISH, Action.SUBSCRIBE):
        assert not allowed(ann, action, "RMQ_SYS_TRANS_HALF_TOPIC")
        assert allowed(ann, action, "%RETRY%g")
        assert not allowed(ann, action, "%RETRY%other")
    assert allowed(Principal("root", admin=True), Action.SUBSCRIBE, "RMQ_SYS_TRANS_HALF_TOPIC")


def test_a_user_who_is_no_more_may_nothing() -> None:
    """E-05: at once, on every connection."""
    ann = principal(topics={"*": Permission.SUB})
    demand(ann, Action.SUBSCRIBE, "t")
    ann.end()
    for action in Action:
        with pytest.raises(AccessDenied, match="log in"):
            demand(ann, action, "t")


def test_long_names_are_not_remembered() -> None:
    """E-05: whoever asks, without a login even, fills no memory with them, nor with what they are told."""
    ann = principal(topics={"*": Permission.SUB})
    for length in (255, 256, 1_000_000):
        assert not allowed(ann, Action.PUBLISH, "x" * length)
        assert allowed(ann, Action.SUBSCRIBE, "x" * length)
    assert {len(name) for _, name in ann._known} == {255}
    assert len(str(denied(ann, Action.PUBLISH, "x" * 1_000_000))) < 300


class Time:
    """A clock that is set."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def tried(guesses: Guesses, address: str, name: str, most: int = 10_000) -> int:
    """How many wrong guesses are looked at now."""
    for number in range(most):
        try:
            guesses.take(address, name)
        except AccessDenied:
            return number
    return most


def test_failures_of_one_address_are_limited() -> None:
    """E-05, P33: so many at once, then so many a minute; other addresses have their own."""
    time = Time()
    guesses = Guesses(30, time)
    assert tried(guesses, "10.0.0.1", "ann") == 30
    assert tried(guesses, "10.0.0.1", "bob") == 0  # another name from there
    time.now_s += 60
    assert tried(guesses, "10.0.0.1", "ann") == 30
    time.now_s += 10
    assert tried(guesses, "10.0.0.1", "ann") == 5
    assert tried(guesses, "10.0.0.2", "ann") == 30
    with pytest.raises(AccessDenied, match="try again in 2 s"):
        guesses.take("10.0.0.1", "ann")


def test_failures_of_all_addresses_are_limited() -> None:
    """E-05, P33: also when each guess comes from somewhere else, and a network of IPv6 is one address."""
    guesses = Guesses(30, Time())
    assert tried(guesses, "2001:db8::1", "ann", 20) == 20
    assert tried(guesses, "2001:db8::ffff:1", "ann", 20) == 10
    assert tried(guesses, "10.1.0.1", "ann", 20) == 20
    assert tried(guesses, "::ffff:10.1.0.1", "ann", 20) == 10  # the same, as a socket of IPv6 writes it
    assert tried(guesses, "::ffff:10.1.0.2", "ann", 20) == 20
    looked_at = 80 + sum(tried(guesses, f"10.0.{number // 256}.{number % 256}", "ann", 1) for number in range(3000))
    assert looked_at == 30 * ALL_TIMES


def test_who_was_right_is_not_hindered_by_others() -> None:
    """E-05: neither by those who guess at the same address nor by those elsewhere."""
    guesses = Guesses(30, Time())
    guesses.was_right("10.0.0.1", "ann", guesses.take("10.0.0.1", "ann"))
    tried(guesses, "10.0.0.1", "bob")
    for number in range(100):
        tried(guesses, f"10.1.0.{number}", "ann")
    assert tried(guesses, "10.2.0.1", "ann") == 0
    for _ in range(1000):
        guesses.was_right("10.0.0.1", "ann", guesses.take("10.0.0.1", "ann"))
    assert tried(guesses, "10.0.0.1", "ann") == 30  # who knows one password guesses no faster


def test_what_was_taken_goes_back_to_where_it_was() -> None:
    """E-05: of logins that are looked at together, the first that is right moves the others nowhere."""
    guesses = Guesses(30, Time())
    for taken in [guesses.take("10.0.0.1", "ann") for _ in range(30)]:
        guesses.was_right("10.0.0.1", "ann", taken)
    assert tried(guesses, "10.0.0.1", "bob") == 30


def test_what_is_remembered_is_bounded() -> None:
    """E-05: an attacker with many addresses fills no memory."""
    time = Time()
    guesses = Guesses(30, time)
    for number in range(MOST_BUCKETS + 500):
        time.now_s += 60
        address = f"10.{number // 65536}.{number // 256 % 256}.{number % 256}"
        guesses.was_right(address, "ann", guesses.take(address, "ann"))
    assert len(guesses._buckets) <= MOST_BUCKETS
    assert len(guesses._known) <= MOST_BUCKETS


def test_the_bucket_of_all_is_never_forgotten() -> None:
    """E-05: who is known at many addresses does not fill it by being right there."""
    guesses = Guesses(1, Time())
    addresses = [f"10.{number // 65536}.{number // 256 % 256}.{number % 256}" for number in range(MOST_BUCKETS)]
    for address in addresses:
        guesses.was_right(address, "ann", guesses.take(address, "ann"))
    for number in range(ALL_TIMES):
        guesses.take(f"11.0.0.{number}", "bob")
    for address in addresses:
        guesses.take(address, "ann")
    assert tried(guesses, "11.0.1.1", "bob") == 0
