"""Errors as HTTP says them: problem details (RFC 9457), with the code and the sentence that the other protocols have."""

from http import HTTPStatus
from typing import Annotated, Final

from msgspec import Meta

from metaq.errors import MetaqError, StoreError, TimerDelivered
from metaq.protocol.remoting.codes import Response
from metaq.server.services.rows import Output

CONTENT_TYPE: Final = "application/problem+json"
_STATUSES: Final = {
    Response.SYSTEM_BUSY: HTTPStatus.SERVICE_UNAVAILABLE,
    Response.FLOW_CONTROL: HTTPStatus.SERVICE_UNAVAILABLE,
    Response.SERVICE_NOT_AVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
    Response.POLLING_FULL: HTTPStatus.SERVICE_UNAVAILABLE,
    Response.NO_PERMISSION: HTTPStatus.FORBIDDEN,
    Response.TOPIC_NOT_EXIST: HTTPStatus.NOT_FOUND,
    Response.SUBSCRIPTION_GROUP_NOT_EXIST: HTTPStatus.NOT_FOUND,
    Response.QUERY_NOT_FOUND: HTTPStatus.NOT_FOUND,
    Response.NO_MESSAGE: HTTPStatus.CONFLICT,
    Response.CONSUMER_NOT_ONLINE: HTTPStatus.CONFLICT,
    Response.ILLEGAL_OPERATION: HTTPStatus.NOT_FOUND,
}
"""By the code of an error; what has another code was asked for in a way that the broker refuses."""
_BY_CODE: Final[dict[int, HTTPStatus]] = {int(code): status for code, status in _STATUSES.items()}


class ProblemDetails(Output, frozen=True):
    """The reason why a request failed."""

    title: Annotated[str, Meta(description="The name of the status.")]
    status: int
    detail: Annotated[str, Meta(description="What is wrong, and what to do.")]
    code: Annotated[int, Meta(description="The remoting protocol's code.")]
    retriable: Annotated[bool, Meta(description="Whether the same request may succeed later.")]
    type: Annotated[str, Meta(description="Always `about:blank`: `code` says more.")] = "about:blank"


class SubscriptionProblem(Output, frozen=True):
    """The reason why something that a subscriber said was not done."""

    problem: ProblemDetails
    receipt: str | None


def problem_with(status: int, detail: str, code: int = Response.SYSTEM_ERROR, *, retriable: bool = False) -> ProblemDetails:
    """Return a problem of the HTTP side."""
    return ProblemDetails(
        title=HTTPStatus(status).phrase, status=int(status), detail=detail, code=int(code), retriable=retriable
    )


def problem_of(error: MetaqError, *, is_known: bool) -> ProblemDetails:
    """Return an error as a problem; who is refused and is not ``is_known`` has to log in first (401)."""
    status = _status_of(error)
    if status is HTTPStatus.FORBIDDEN and not is_known:
        status = HTTPStatus.UNAUTHORIZED
    retriable = error.retriable or status is HTTPStatus.SERVICE_UNAVAILABLE
    return problem_with(status, error.told, error.code, retriable=retriable)


def problem_headers(found: ProblemDetails, retry_after_ms: int | None = None) -> dict[str, str]:
    """Return the headers of a problem's answer, without those of its length and date."""
    headers = {"content-type": CONTENT_TYPE}
    if found.status == HTTPStatus.UNAUTHORIZED:
        headers["www-authenticate"] = 'Basic realm="metaq"'
    if found.status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers["retry-after"] = str(max(1, -(-(retry_after_ms or 1000) // 1000)))
    return headers


def _status_of(error: MetaqError) -> HTTPStatus:
    if isinstance(error, TimerDelivered):
        return HTTPStatus.CONFLICT
    known = _BY_CODE.get(error.code)
    if known is not None:
        return known
    if isinstance(error, StoreError):
        return HTTPStatus.INTERNAL_SERVER_ERROR
    return HTTPStatus.BAD_REQUEST
