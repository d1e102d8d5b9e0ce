"""All rows."""

from typing import Final

from tests.mutants.mutant import Mutant
from tests.mutants.rows_api import API
from tests.mutants.rows_clients import CLIENT, TOOLS
from tests.mutants.rows_cluster import BROKER, REGISTRIES, REPLICAS, USERS
from tests.mutants.rows_console import CONSOLE
from tests.mutants.rows_leases import LEASES
from tests.mutants.rows_protocols import PROTOCOLS
from tests.mutants.rows_store import STORE, TRANSACTIONS
from tests.mutants.rows_timers import TIMERS

MUTANTS: Final[list[Mutant]] = [
    *STORE,
    *TIMERS,
    *PROTOCOLS,
    *TRANSACTIONS,
    *BROKER,
    *LEASES,
    *REPLICAS,
    *REGISTRIES,
    *USERS,
    *CLIENT,
    *TOOLS,
    *API,
    *CONSOLE,
]
