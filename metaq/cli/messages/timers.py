"""``metaq timer``: messages that are delayed to any time."""

import click

from metaq.address import Address
from metaq.cli.common import connect_registry, connect_text, examples, json_option, print_json
from metaq.cli.messages.topics import either_option, means_one_broker


@click.group()
def timer() -> None:
    """Cancel delayed messages."""


@timer.command(
    epilog=examples(
        "metaq timer cancel djEgcmVtaW5kZXJzIG1ldGFxIDE3…",
        "metaq timer cancel 1769857200000-81920-5f0c2a9b3d417e68 --broker 127.0.0.1:8123",
    )
)
@click.argument("handle")
@either_option
@json_option
def cancel(handle: str, registry: str, broker: Address, as_json: bool) -> None:
    """Cancel the delayed message with HANDLE.

    Takes the handle of metaq message send and of any other client of the registry; with --broker that of metaq put. To cancel a
    message again does no harm.
    """
    if means_one_broker():
        with connect_text(broker) as client:
            client.cancel(handle)
    else:
        with connect_registry(registry) as registered:
            registered.cancel(handle)
    if as_json:
        print_json({"handle": handle, "cancelled": True})
    else:
        click.echo("cancelled: it will not be delivered")
