"""Promises that all parts of the client share: names, parameters, and errors that can be reached."""

import importlib
import inspect
import pkgutil
import re
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Final, get_type_hints

import pytest

import metaq
import metaq.aio
import metaq.aio.admin
import metaq.client
from metaq import errors
from metaq.client.admin.offsetexport import OffsetExport
from metaq.client.admin.replicas import ReplicaAdmin
from metaq.client.admin.transactions import TransactionAdmin
from metaq.testing import InMemoryBroker
from tests.docs.examples import ROOT

SHARED: Final = [name for name in metaq.aio.__all__ if name != "connect"]
FACES: Final = [(getattr(metaq.client, name), getattr(metaq.aio, name)) for name in SHARED] + [
    (kind, getattr(metaq.aio.admin, kind.__name__)) for kind in (OffsetExport, ReplicaAdmin, TransactionAdmin)
]
NOT_AWAITED: Final = {"send_async"}
"""``send`` of asyncio is that."""
MAKE_AT_ONCE: Final = {
    "producer",
    "transaction_producer",
    "pull_consumer",
    "xa_session",
    "xid",
    "admin",
    "transactions",
    "replicas",
    "offset_export",
    "timers",
    "leases",
}
"""Do not wait, so they are not awaited."""


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")} - NOT_AWAITED


def parameters(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    """Names, kinds and defaults."""
    found = inspect.signature(function).parameters.values()
    return [(one.name, one.kind, one.default) for one in found if one.name != "self"]


@pytest.mark.parametrize(("blocking", "awaited"), FACES, ids=lambda kind: kind.__name__)
def test_asyncio_has_the_same_names(blocking: type, awaited: type) -> None:
    """P44: none is forgotten, and each takes the same parameters; what waits is awaited."""
    assert public(blocking) <= public(awaited)
    for name in public(blocking):
        ours, theirs = getattr(blocking, name), getattr(awaited, name)
        if isinstance(ours, property):
            assert isinstance(theirs, property), name
            continue
        assert parameters(ours) == parameters(theirs), name
        if inspect.isasyncgenfunction(theirs):
            assert get_type_hints(ours)["return"].__origin__ is Iterator, name
        else:
            assert inspect.iscoroutinefunction(theirs) is (name not in MAKE_AT_ONCE), name


@pytest.mark.parametrize(("blocking", "awaited"), FACES, ids=lambda kind: kind.__name__)
def test_asyncio_has_the_same_attributes(blocking: type, awaited: type) -> None:
    """P44: also those that objects get when they are made."""
    assigned = set(re.findall(r"^        self\.([a-z]\w*)(?:: [^=]+)? = ", inspect.getsource(blocking), re.MULTILINE))
    for base in blocking.__mro__[1:-1]:
        assigned |= set(re.findall(r"^        self\.([a-z]\w*)(?:: [^=]+)? = ", inspect.getsource(base), re.MULTILINE))
    assert assigned <= public(awaited)


def test_connect_takes_the_same_parameters() -> None:
    """P44."""
    assert parameters(metaq.connect) == parameters(metaq.aio.connect)


def functions_of(module: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in module.__all__:
        found = getattr(module, name)
        if inspect.isfunction(found):
            yield name, found
        elif inspect.isclass(found):
            for own, method in inspect.getmembers(found, inspect.isfunction):
                if method.__module__.startswith("metaq.") and (own == "__init__" or not own.startswith("_")):
                    yield f"{name}.{own}", method


@pytest.mark.parametrize("module", [metaq, metaq.aio, importlib.import_module("metaq.testing")], ids=lambda one: one.__name__)
def test_every_parameter_has_a_name_and_a_type(module: Any) -> None:
    """P44: nothing passes as an option that no type checker knows."""
    for name, function in functions_of(module):
        for one in inspect.signature(function).parameters.values():
            if one.kind is one.VAR_KEYWORD:
                assert one.annotation is str, f"{name} takes **{one.name}: {one.annotation}"
            if one.name != "self":
                assert one.annotation is not one.empty, f"{name} has no type for {one.name}"


def test_the_broker_for_tests_has_what_administration_has() -> None:
    """P44: what has the same name takes the same parameters and gives the same."""
    same = public(InMemoryBroker) & public(metaq.client.Admin)
    assert same == {"create_topic", "dead_letters"}
    for name in same:
        ours, theirs = getattr(metaq.client.Admin, name), getattr(InMemoryBroker, name)
        assert get_type_hints(ours)["return"] == get_type_hints(theirs)["return"], name
        assert set(parameters(theirs)) <= set(parameters(ours)), name
    assert get_type_hints(metaq.aio.Admin.dead_letters)["return"] == get_type_hints(metaq.Admin.dead_letters)["return"]
    assert not issubclass(get_type_hints(metaq.Admin.dead_letters)["return"].__origin__, AsyncIterator)


def error_classes() -> dict[str, type[Exception]]:
    """All that the client's modules define or import, and can therefore raise."""
    modules = [importlib.import_module(module.name) for module in pkgutil.walk_packages(metaq.client.__path__, "metaq.client.")]
    return {
        name: value
        for module in modules
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, errors.MetaqError)
    }


def test_every_error_of_the_client_can_be_caught_by_name() -> None:
    """P14: as metaq.X, whichever module raises it, and whichever the documents name."""
    assert len(error_classes()) > 15
    for name, kind in error_classes().items():
        assert getattr(metaq, name) is kind
        assert name in metaq.__all__
    text = "".join((ROOT / "docs" / page).read_text("utf-8") for page in ("clients.md", "transactions.md", "spark.md"))
    named = {name for name in re.findall(r"`(?:metaq\.)?([A-Z]\w+)`", text) if hasattr(errors, name) or name in error_classes()}
    assert {"BadRequest", "ClientClosed", "OutcomeUnknown"} <= named
    assert named <= set(metaq.__all__)
