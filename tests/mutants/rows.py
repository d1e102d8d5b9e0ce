"""All rows."""

from typing import Final

from tests.mutants.mutant import Mutant

MUTANTS: Final = [
    Mutant(
        "RD-103",
        "client/sending.py",
        "self._choice.health.took(broker, now - self._began, now)",
        "pass",
        "client/test_sending.py::test_sends_pass_over_a_slow_broker",
    ),
    Mutant(
        "RD-103",
        "client/health.py",
        "(0.55, 30.0)",
        "(0.65, 30.0)",
        "client/test_sending.py::test_a_slow_broker_is_passed_over_for_a_while",
    ),
]
