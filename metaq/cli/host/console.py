"""``metaq console``: open the console of a broker in the browser."""

import webbrowser

import click

from metaq.address import Address
from metaq.cli.common import AddressParameter, broker_option, command_login, examples
from metaq.client.connecting.access import Access

TIMEOUT_S = 10.0


@click.command(
    epilog=examples(
        "metaq console",
        "metaq console 127.0.0.1:8124",
        "metaq console --broker mq1:8123 --print",
    )
)
@click.argument("address", type=AddressParameter(), metavar="[ADDRESS]", required=False)
@broker_option
@click.option("only_print", "--print", is_flag=True, help="Only print its address.")
def console(address: Address | None, broker: Address, only_print: bool) -> None:
    """Open the console of a broker in the browser: topics, messages, groups, and what is wrong.

    ADDRESS is the broker's HTTP port, as the line `metaq ready` shows it (http=); by default the port after that of
    --broker. The address of the console is printed, too, for a browser on another machine.
    """
    where, tls = address or broker._replace(port=broker.port + 1), command_login().tls
    Access(tls=tls).connect(where, TIMEOUT_S).close()  # says why when nothing listens there
    page = f"{'https' if tls else 'http'}://{where}/"
    click.echo(page)
    if not only_print and not webbrowser.open(page):
        click.echo("metaq: there is no browser here; open the address in one", err=True)
