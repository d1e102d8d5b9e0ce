"""Options that do not exist are told with the nearest one that does, on every version of Python."""

import asyncio
from typing import Any, Final

import pytest

import metaq
import metaq.aio
from metaq.testing import InMemoryBroker

CALLS: Final[dict[str, tuple[str, tuple[Any, ...], str, str]]] = {
    "producer": ("producer", (), "linger", "linger_ms"),
    "consumer": ("consumer", ("t", "g"), "tag", "tags"),
    "listen": ("listen", ("t", "g", print), "thread", "threads"),
    "lease consumer": ("lease_consumer", ("t", "g"), "form_first", "from_first"),
    "pull consumer": ("pull_consumer", ("t",), "by_prioriti", "by_priority"),
    "session": ("xa_session", ("t",), "qualifer", "qualifier"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_option_is_told_with_the_near_one(memory: InMemoryBroker, name: str) -> None:
    """For both forms of the client, before anything is made."""
    method, arguments, wrong, near = CALLS[name]
    told = rf"Client.{method}\(\) got an unexpected keyword argument '{wrong}'. Did you mean '{near}'\?"
    with metaq.connect(memory.address) as client:
        with pytest.raises(TypeError, match=told):
            getattr(client, method)(*arguments, **{wrong: None})

        async def fail() -> None:
            made = getattr(metaq.aio.Client(client), method)(*arguments, **{wrong: None})
            await made

        with pytest.raises(TypeError, match=told):
            asyncio.run(fail())


def test_an_option_that_resembles_none_is_told_with_all() -> None:
    """The text has all of them."""
    wrong: Any = {"xyz": 1}
    with pytest.raises(TypeError, match=r"^connect\(\) got an unexpected keyword argument 'xyz'; its options are address, in"):
        metaq.connect("127.0.0.1:1", **wrong)
    near: Any = {"timeout": 1}
    with pytest.raises(TypeError, match=r"^connect\(\) got an .* 'timeout'. Did you mean 'timeout_s'\?"):
        metaq.aio.connect("127.0.0.1:1", **near)
