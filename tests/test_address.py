"""Addresses: what is written can be parsed again, and every other text is refused with a message that repeats it."""

import ipaddress
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.address import HIGHEST_PORT, LOOPBACK, Address, parse_address, parse_listen
from metaq.errors import BadRequest, ConfigError

NAMES: Final = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,8}[a-z0-9])?(\.[a-z]{2,8}){0,2}", fullmatch=True)
IPV6: Final = st.ip_addresses(v=6).map(str)
HOSTS: Final = st.one_of(NAMES, st.ip_addresses(v=4).map(str), IPV6)
PORTS: Final = st.integers(1, HIGHEST_PORT)


@given(HOSTS, PORTS)
def test_what_is_written_is_parsed(host: str, port: int) -> None:
    address = Address(host, port)
    assert parse_address(f" {address} ") == parse_address(str(address), default_port=1) == address
    assert parse_listen("listen", str(address)) == address


@given(IPV6, PORTS)
def test_ipv6_is_written_in_brackets_and_taken_without(host: str, port: int) -> None:
    assert str(Address(host, port)) == f"[{host}]:{port}"
    assert parse_address(f"{host}:{port}") == Address(host, port)
    assert parse_address(f"[{host}]", default_port=port) == Address(host, port)


@given(st.one_of(NAMES, st.ip_addresses(v=4).map(str)), PORTS)
def test_a_missing_port_is_the_default(host: str, port: int) -> None:
    assert parse_address(host, default_port=port) == Address(host, port)
    with pytest.raises(BadRequest):
        parse_address(host)


@given(st.integers(0, HIGHEST_PORT))
def test_who_listens_may_leave_out_the_host_and_choose_port_0(port: int) -> None:
    assert parse_listen("listen", f":{port}") == Address(LOOPBACK, port)


@given(HOSTS, st.one_of(st.integers(max_value=0), st.integers(min_value=HIGHEST_PORT + 1)))
def test_ports_that_do_not_exist(host: str, port: int) -> None:
    with pytest.raises(BadRequest, match="write host:port with a port from 1 to 65535"):
        parse_address(str(Address(host, port)))


@given(st.text())
def test_any_text_is_an_address_or_repeated_in_the_error(text: str) -> None:
    try:
        address = parse_address(text, setting="listen")
    except ConfigError as error:
        assert str(error).startswith(f"listen: {text!r} is not HOST:PORT")
    else:
        assert address.host
        assert 0 < address.port <= HIGHEST_PORT
        assert ":" not in address.host or ipaddress.IPv6Address(address.host)


@pytest.mark.parametrize("text", ["", ":", "a", "a:", ":1", "a:b:1", "[::1:1", "::1]:1", "[]:1", "a:+1", "a:1_0", "a:١"])
def test_no_addresses(text: str) -> None:
    with pytest.raises(BadRequest):
        parse_address(text)
