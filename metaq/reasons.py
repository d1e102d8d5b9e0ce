"""The reasons that the operating system and OpenSSL give for a failure, in words for people."""

import re
from typing import Final

_PLACES: Final = re.compile(r"^\[[^]]*\] | \(_ssl\.c:\d+\)$")
"""The names of errors in OpenSSL, and where in Python's source they were noticed."""
_OF_OPENSSL: Final = {
    "PEM lib": "there is no certificate with its private key in PEM form",
    "no certificate or crl found": "there is no certificate in PEM form",
    "no start line": "there is no certificate in PEM form",
    "key values mismatch": "the private key is not that of the certificate",
    "wrong version number": "what listens there does not use TLS",
    "record layer failure": "what listens there does not use TLS",
    "packet length too long": "what listens there does not use TLS",
}


def reason_of(error: OSError) -> str:
    """Return why something failed, without the numbers of errors, file names and places in source code."""
    text = error.strerror or str(error)
    while (shorter := _PLACES.sub("", text)) != text:
        text = shorter
    return _OF_OPENSSL.get(text, text)
