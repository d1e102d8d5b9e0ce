"""Mutated frames of strangers, subscribers and publishers against a broker with users.

Each connection is that of a stranger, or of a subscriber or a publisher, which sign what they send. It sends the mutated frames
of ``tests.crash.frames``, and every code bodies of all shapes, up to the largest ones and beyond. What must hold is the same;
and what strangers send is not read, so no turn of the loop takes long and no memory is kept.

``python -m tests.crash.strangers --seed 7 --count 1000000`` runs it; a failure names the seed and the connection.
"""

import contextlib
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from metaq.protocol.remoting.codes import COMPACT, JSON
from metaq.protocol.remoting.frames import FrameReader, encode_request
from metaq.protocol.remoting.signature import Credentials
from metaq.server.remoting.admission import ADMITTED, TABLE_BYTES
from tests.crash.attack import Chance, main
from tests.crash.command import Result
from tests.crash.frames import FLAGS, KINDS, TEXTS, FrameAttack, Kind, Stream, draw_stream, recorded
from tests.server.access.test_access import FIELDS
from tests.support.bodies import LEGAL, shapes
from tests.support.broker import FreshBroker
from tests.support.users import ADMIN, write_users

SUBSCRIBER: Final = Credentials("subscriber", "subscriber-secret-1")
PUBLISHER: Final = Credentials("publisher", "publisher-secret-1")
USERS: Final = f"""\
users:
  {ADMIN.name}: {{secret: {ADMIN.secret}, admin: true}}
  {SUBSCRIBER.name}: {{secret: {SUBSCRIBER.secret}, topics: {{"*": SUB}}, groups: {{"*": SUB}}}}
  {PUBLISHER.name}: {{secret: {PUBLISHER.secret}, topics: {{"*": PUB|CREATE}}}}
"""
ROLES: Final = (None, SUBSCRIBER, PUBLISHER)
CODES: Final = sorted(ADMITTED)
SIZES: Final = (0, 20, 20, 300, 300, 4096, 4097, 16 * 1024)


def stuffed(chance: Chance) -> list[bytes]:
    """Requests of any code with bodies that are large, strange, or nearly right."""
    frames = []
    for _ in range(chance.randrange(1, 4)):
        code = chance.choice(CODES)
        size = chance.choice((TABLE_BYTES, TABLE_BYTES + 1)) if chance.random() < 0.02 else chance.choice(SIZES)
        body = chance.choice(shapes(size)) if size else b""
        if code in LEGAL and code in SMALL and chance.random() < 0.3:
            body = chance.choice(legal(code))
        if body and chance.random() < 0.5:
            at = chance.randrange(len(body))
            body = body[:at] + chance.randbytes(chance.randrange(4)) + body[at + chance.randrange(4) :]
        fields = dict(FIELDS)
        for _ in range(chance.randrange(3)):
            fields[chance.choice(sorted(fields))] = chance.choice(TEXTS)
        serialization = chance.choice((JSON, COMPACT)) if code < 1 << 15 else JSON  # the compact header has 16 bits for it
        frames.append(encode_request(code, chance.randrange(100), fields, body, serialization=serialization))
    return frames


SMALL: Final = frozenset(code for code in LEGAL if ADMITTED[code].most_bytes <= TABLE_BYTES)
"""Codes whose largest bodies do not make the run slow."""
_legal: Final[dict[int, tuple[bytes, ...]]] = {}


def legal(code: int) -> tuple[bytes, ...]:
    """Made once."""
    if code not in _legal:
        _legal[code] = LEGAL[code]()
    return _legal[code]


def signed(who: Credentials, kind: Kind, chance: Chance) -> list[bytes]:
    """The same frames, signed where they are requests."""
    return [_signed(who, frame) for frame in kind(chance)]


def _signed(who: Credentials, frame: bytes) -> bytes:
    found = FrameReader().receive(frame)
    if len(found) != 1 or found[0].is_response:
        return frame
    (request,) = found
    fields = who.signed(request.fields, request.body)
    code, opaque, oneway = request.code, request.opaque, request.is_oneway
    return encode_request(code, opaque, fields, request.body, oneway=oneway, serialization=request.serialization)


class StrangersAttack(FrameAttack):
    """Each connection is somebody else's, or nobody's."""

    def draw(self, chance: Chance) -> Stream:
        who = chance.choice(ROLES)
        kinds: list[Kind] = [*KINDS, stuffed, stuffed, stuffed]
        if who is None:
            return draw_stream(chance, kinds)
        as_who: Callable[[Kind], Kind] = partial(partial, signed, who)
        return draw_stream(chance, [*map(as_who, kinds), *kinds[:2]], as_who(recorded))


def run(seed: int, count: int) -> Result:
    """Send ``count`` frames; ``Violation`` when the broker breaks a promise."""
    with tempfile.TemporaryDirectory() as folder:
        users = write_users(Path(folder) / "users.yaml", USERS)
        flags = (*FLAGS, "--users-file", str(users), "--failed-logins-per-minute", "100000")
        with (
            FreshBroker(Path(folder) / "data", *flags) as broker,
            contextlib.closing(StrangersAttack(broker, seed, ADMIN)) as attack,
        ):
            attack.run_within(count)
    return Result("strangers", range(seed, seed + 1), attack.details["frames"], dict(attack.details))


if __name__ == "__main__":
    main(run, count=30_000)
