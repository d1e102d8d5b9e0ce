"""The package, as it is installed: it makes its scheme known by itself, and imports little."""

import subprocess
import sys
from typing import Final

from tests.docs.examples import ROOT
from tests.packaging.built import clean_environment

FOLDER: Final = ROOT / "integrations" / "kombu"
MOST_MS: Final = 30.0
RUNS: Final = 5
COST: Final = """
import celery, time
celery.Celery(broker="memory://").connection().transport
begin = time.process_time()
import kombu_metaq.transport
print((time.process_time() - begin) * 1000)
"""


def test_the_scheme_is_known_to_celery_by_itself() -> None:
    """The README says no more than a URL; this package was installed, and nobody has imported it."""
    shown = "import celery; print(celery.Celery(broker='metaq://127.0.0.1:1//').connection().transport.driver_name)"
    answer = subprocess.check_output([sys.executable, "-c", shown], env=clean_environment(), text=True)
    assert answer == "metaq\n"


def test_the_transport_imports_little_and_not_the_client() -> None:
    """In processor time, the least of some starts: other programs may be busy."""
    paths = ":".join([str(FOLDER), str(ROOT)])
    costs = [
        float(subprocess.check_output([sys.executable, "-c", COST], env=clean_environment(PYTHONPATH=paths), text=True))
        for _ in range(RUNS)
    ]
    assert min(costs) < MOST_MS, costs
    shown = "import sys, kombu_metaq.transport; print('metaq.client' in sys.modules, 'celery' in sys.modules)"
    answer = subprocess.check_output([sys.executable, "-c", shown], env=clean_environment(PYTHONPATH=paths), text=True)
    assert answer == "False False\n"
