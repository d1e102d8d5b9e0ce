"""The names of spans' attributes, from OpenTelemetry's semantic conventions for messaging, version 1.30 (in development).

They are written down here, as the package that has them changes its names with each release while they are in development; a
test compares. What the conventions do not know is under ``messaging.metaq``.
"""

from typing import Final

SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.30.0"

SYSTEM: Final = "messaging.system"
OPERATION_NAME: Final = "messaging.operation.name"
OPERATION_TYPE: Final = "messaging.operation.type"
DESTINATION_NAME: Final = "messaging.destination.name"
PARTITION_ID: Final = "messaging.destination.partition.id"
CONSUMER_GROUP: Final = "messaging.consumer.group.name"
CLIENT_ID: Final = "messaging.client.id"
MESSAGE_COUNT: Final = "messaging.batch.message_count"
MESSAGE_ID: Final = "messaging.message.id"
CONVERSATION_ID: Final = "messaging.message.conversation_id"
ERROR_TYPE: Final = "error.type"

MESSAGE_TAG: Final = "messaging.metaq.message.tag"
MESSAGE_KEYS: Final = "messaging.metaq.message.keys"
RECONSUME_TIMES: Final = "messaging.metaq.message.reconsume_times"
