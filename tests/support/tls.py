"""Certificates for tests."""

from pathlib import Path
from typing import NamedTuple

import trustme


class Certificates(NamedTuple):
    """Files: what a server shows (certificate and key in one), and what a client checks it with."""

    chain: Path
    authority: Path

    @property
    def flags(self) -> tuple[str, str]:
        """For ``metaq serve`` and ``metaq registry``."""
        return ("--tls-certificate", str(self.chain))


def issue(folder: Path, *names: str) -> Certificates:
    """For a server of these names, by default 127.0.0.1."""
    authority = trustme.CA()
    certificate = authority.issue_cert(*(names or ("127.0.0.1",)))
    files = Certificates(folder / "chain.pem", folder / "ca.pem")
    certificate.private_key_and_cert_chain_pem.write_to_path(str(files.chain))
    authority.cert_pem.write_to_path(str(files.authority))
    return files
