"""A sample of the handshakes run."""

from tests.crash.handshakes import run


def test_mutated_handshakes_let_nobody_in() -> None:
    """E-05, P21, P33: through TLS, text, remoting and replication; the others are served."""
    result = run(seed=0, count=800)
    assert result.cases == 800
    assert min(result.details.values()) > 50
    assert len(result.details) == 7
