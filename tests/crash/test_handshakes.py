"""A sample of the handshakes run."""

from tests.crash.handshakes import COMPARED, run


def test_mutated_handshakes_let_nobody_in() -> None:
    """E-05, P21, P33: through TLS, text, remoting, replication and HTTP; the others are served, and all proofs are compared."""
    result = run(seed=0, count=1000)
    assert result.cases == 1000
    assert result.details.pop("crowds") > 2
    assert min(result.details.pop(what) for what in COMPARED) > 5
    assert min(result.details.values()) > 50
    assert len(result.details) == 10
