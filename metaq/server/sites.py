"""All that a broker answers over HTTP beside metrics and health: its API below ``/api``, and its console."""

from collections.abc import Iterable
from typing import Final

from metaq.server.api.site import api_site
from metaq.server.console.site import console_site
from metaq.server.http.environ import Environ, StartResponse
from metaq.server.services.call import Interior

API: Final = "/api"


class BrokerSite:
    """A WSGI application."""

    def __init__(self, interior: Interior) -> None:
        """Prepare the answers of the broker with these parts."""
        self._api = api_site(interior)
        self._console = console_site(interior)
        self.pace = interior.endpoint.pace

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        site = self._api if path == API or path.startswith(f"{API}/") else self._console
        return site(environ, start_response)

    def stop(self) -> None:
        """Take no more requests: the store is about to be closed."""
        self._api.stopped = self._console.stopped = True
