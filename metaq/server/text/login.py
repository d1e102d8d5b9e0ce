"""``auth``: the text protocol's login."""

import gevent

from metaq.errors import BrokerError
from metaq.protocol.text.commands import Auth
from metaq.protocol.text.replies import BAD_REQUEST, OK, write_result
from metaq.server.access.authentication import Authentication
from metaq.server.text.session import TextSession


def log_in(authentication: Authentication, session: TextSession, auth: Auth) -> None:
    """Check the password in a greenlet, then answer; the commands after this one wait.

    A failed login also ends the one before.
    """
    if not authentication.has_users:
        session.reply(write_result(BAD_REQUEST, "there are no users here (users_file): nobody needs to log in", auth.opaque))
        return
    session.owed += 1
    gevent.spawn(_log_in, authentication, session, auth)


def _log_in(authentication: Authentication, session: TextSession, auth: Auth) -> None:
    try:
        session.principal = authentication.check(auth.user, auth.password, session.address[0])
        answer = write_result(OK, auth.user, auth.opaque)
    except BrokerError as error:
        session.principal = authentication.anonymous
        answer = write_result(error.status, str(error), auth.opaque)
    session.answer(1, 0, answer)
