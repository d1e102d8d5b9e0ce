"""The bits of sysFlag, in requests and records (specs: store format, section 1.1)."""

from typing import Final

COMPRESSED: Final = 1
MULTI_TAGS: Final = 2
TRANSACTION_TYPE: Final = 12
TRANSACTION_PREPARED: Final = 4
TRANSACTION_COMMIT: Final = 8
TRANSACTION_ROLLBACK: Final = 12
BORN_HOST_IPV6: Final = 16
STORE_HOST_IPV6: Final = 32
COMPRESSION_KIND: Final = 0x700
