"""metaq as a broker of Celery and kombu: importing it makes known the scheme ``metaq://``."""

from typing import Final

from kombu.transport import TRANSPORT_ALIASES

TRANSPORT_ALIASES["metaq"] = "kombu_metaq.transport:Transport"

NO_SERIALIZER: Final = (None, None, "application/x-metaq")
"""The entry point that kombu loads by itself: it has no entry points for transports, but for serializers, which this is not."""
