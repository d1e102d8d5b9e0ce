"""The registry's requests: 100 to 106, 205, 206, 216, 217, 219, 224, 304, 311 to 313, 318, 319, 322, 327, 901, 904.

(Specs: remoting protocol, section 2.) A broker's registration is bound to the connection that carried it last: when that
closes, the broker is removed.
"""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import gevent
from gevent.lock import BoundedSemaphore

from metaq.checksum import body_crc
from metaq.config import Settings
from metaq.engine.registry import Registry
from metaq.errors import AccessDenied, BadRequest, ChecksumMismatch, MetaqError, Overloaded, RequestFailed
from metaq.protocol.remoting.adminbodies import decode_settings, encode_settings
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.headers import (
    BrokerBeat,
    BrokerGroup,
    BrokerNameOnly,
    BrokerOnly,
    ClusterOnly,
    DeleteTopicInRegistry,
    KvKey,
    KvPair,
    Namespace,
    RegisterBroker,
    TopicOnly,
    decode_header,
)
from metaq.protocol.remoting.routes import (
    TopicConfigs,
    decode_data_version,
    decode_registration,
    decode_route,
    encode_cluster_info,
    encode_data_version,
    encode_kv_table,
    encode_member_group,
    encode_route,
    encode_topic_list,
)
from metaq.registry.routes import BrokerKey, nobody_waits
from metaq.server.access.permissions import Action, demand
from metaq.server.remoting.session import DONE, Answer, Kept, RemotingSession, RequestHandler, failure
from metaq.store.files.filecache import Run

logger = logging.getLogger(__name__)

UNCHANGEABLE: Final = frozenset(("configBlackList", "configStorePath", "kvConfigPath", "rocketmqHome"))
ORDER_MESSAGE_ENABLE: Final = "orderMessageEnable"
MOST_CHANGES: Final = 256
"""Changes of keys that may wait for the disk at once."""
READ_AT_ONCE_BYTES: Final = 8 * 1024
"""Bytes of a registration that is parsed at once. A longer or compressed one is parsed in a thread: 20,000 topics take up to
0.1 s."""
MOST_READING: Final = 16
"""Registrations that are parsed in a thread or wait for that, each with up to 4 MiB."""
RETRY_MS: Final = 100


class RegistryHandler:
    """Handles requests about one registry's tables and key-value configuration."""

    def __init__(self, settings: Settings, registry: Registry, run: Run) -> None:
        self._settings = settings
        self._registry = registry
        self._config = registry.config
        self._run = run
        self._changing = BoundedSemaphore(1)
        self._changes = 0  # those that wait for the disk
        self._reading_now = BoundedSemaphore(1)
        self._reading = 0  # registrations parsed in a thread, or waiting for that
        self._order_in_routes = settings.order_message_enable

    def requests(self) -> Mapping[int, RequestHandler]:
        """Return the handler methods by request code."""
        return {
            Request.GET_ROUTEINFO_BY_TOPIC: self.route,
            **self._looking(),
            **self._changing_requests(),
        }

    def _looking(self) -> dict[int, RequestHandler]:
        tables = self._registry.tables
        return {
            Request.GET_KV_CONFIG: self.get_key,
            Request.GET_KVLIST_BY_NAMESPACE: self.keys,
            Request.GET_BROKER_CLUSTER_INFO: lambda *_: _body(encode_cluster_info(tables.cluster_info())),
            Request.GET_BROKER_MEMBER_GROUP: self.member_group,
            Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: lambda *_: _topics(tables.topics()),
            Request.GET_TOPICS_BY_CLUSTER: self.topics_of_cluster,
            Request.GET_SYSTEM_TOPIC_LIST_FROM_NS: lambda *_: _topics(*tables.system_topics()),
            Request.GET_UNIT_TOPIC_LIST: lambda *_: _topics(tables.unit_topics()),
            Request.GET_HAS_UNIT_SUB_TOPIC_LIST: lambda *_: _topics(tables.unit_subscribed_topics()),
            Request.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST: lambda *_: _topics(
                tables.unit_subscribed_topics(only_outside_units=True)
            ),
            Request.GET_NAMESRV_CONFIG: self.settings,
        }

    def _changing_requests(self) -> dict[int, RequestHandler]:
        return {
            Request.PUT_KV_CONFIG: self.put_key,
            Request.DELETE_KV_CONFIG: self.delete_key,
            Request.REGISTER_BROKER: self.register_broker,
            Request.UNREGISTER_BROKER: self.unregister_broker,
            Request.QUERY_DATA_VERSION: self.query_data_version,
            Request.BROKER_HEARTBEAT: self.heartbeat,
            Request.WIPE_WRITE_PERM_OF_BROKER: self.wipe_write_permission,
            Request.ADD_WRITE_PERM_OF_BROKER: self.add_write_permission,
            Request.DELETE_TOPIC_IN_NAMESRV: self.delete_topic,
            Request.REGISTER_TOPIC_IN_NAMESRV: self.register_topic,
            Request.UPDATE_NAMESRV_CONFIG: self.update_settings,
        }

    # -- brokers come and go ------------------------------------------------------------------------------------------

    def register_broker(self, session: RemotingSession, request: RemotingCommand) -> Answer | None:
        """Register a broker with its topics, or renew its registration (103).

        A long or compressed body is parsed in a thread. Raise ``ChecksumMismatch`` for a damaged body, ``Overloaded`` when too
        many registrations wait.
        """
        header = decode_header(RegisterBroker, request.fields)
        if header.body_crc32 and body_crc(request.body) != header.body_crc32:
            raise ChecksumMismatch(f"the body's checksum is {body_crc(request.body)}, not {header.body_crc32} as announced")
        if len(request.body) <= READ_AT_ONCE_BYTES and not (header.compressed or self._reading):
            return self._enter(session, header, _read_table(request, header))
        if self._reading >= MOST_READING:
            raise Overloaded(f"{MOST_READING} other registrations are being read", retry_after_ms=RETRY_MS)
        self._reading += 1
        kept = session.owe(request, len(request.body))
        gevent.spawn(self._read_in_turn, session, kept, request, header)
        return None

    def _read_in_turn(self, session: RemotingSession, kept: Kept, request: RemotingCommand, header: RegisterBroker) -> None:
        """Parse a registration in a thread and enter it.

        One at a time, so that a newer registration is never entered before an older one.
        """
        try:
            with self._reading_now:
                table = self._run(partial(_read_table, request, header))
                answer = DONE if session.closed else self._enter(session, header, table, partial(gevent.sleep, 0))
        except MetaqError as error:
            answer = failure(error)
        finally:
            self._reading -= 1
        session.pay(kept, answer)

    def _enter(
        self,
        session: RemotingSession,
        header: RegisterBroker,
        table: TopicConfigs,
        rest: Callable[[], None] = nobody_waits,
    ) -> Answer:
        key = BrokerKey(header.cluster_name, header.broker_name, header.broker_id, header.broker_addr)
        done = self._registry.register(key, header.ha_server_addr, table, session, header.heartbeat_timeout_millis, rest)
        fields = {}
        if done.master is not None:
            fields = {"haServerAddr": done.master.ha_address, "masterAddr": done.master.address}
        ordered = self._registry.ordered_topics()
        return Answer(fields=fields, body=(encode_kv_table(ordered),) if ordered else ())

    def unregister_broker(self, _: RemotingSession, request: RemotingCommand) -> Answer:
        """Remove a broker's registration (104)."""
        header = decode_header(BrokerOnly, request.fields)
        self._registry.unregister(header.broker_name, header.broker_addr)
        return DONE

    def query_data_version(self, _: RemotingSession, request: RemotingCommand) -> Answer:
        """Compare a broker's data version with the registered one (322).

        Answer whether it differs, and the registered one; an equal version counts as a heartbeat.
        """
        header = decode_header(BrokerOnly, request.fields)
        version = decode_data_version(request.body)
        changed, known = self._registry.tables.query_version(
            header.broker_name, header.broker_addr, version, self._registry.now_ms
        )
        body = () if known is None else (encode_data_version(known),)
        return Answer(fields={"changed": "true" if changed else "false"}, body=body)

    def heartbeat(self, _: RemotingSession, request: RemotingCommand) -> Answer:
        """Take a broker's heartbeat (904)."""
        header = decode_header(BrokerBeat, request.fields)
        self._registry.tables.refresh(header.broker_name, header.broker_addr, self._registry.now_ms)
        return DONE

    # -- routes -------------------------------------------------------------------------------------------------------

    def route(self, session: RemotingSession, request: RemotingCommand) -> Answer:
        """Return the route of a topic (105). Requires the right to locate the topic."""
        topic = decode_header(TopicOnly, request.fields).topic
        demand(session.principal, Action.LOCATE, topic)
        route = self._registry.tables.route(topic, self._registry.now_ms)
        if self._order_in_routes:
            route = route._replace(order_conf=self._registry.ordered_topics().get(topic))
        return _body(encode_route(route))

    def member_group(self, _: RemotingSession, request: RemotingCommand) -> Answer:
        """Return the processes of one broker name (901)."""
        header = decode_header(BrokerGroup, request.fields)
        return _body(encode_member_group(self._registry.tables.members(header.cluster_name, header.broker_name)))

    def topics_of_cluster(self, _: RemotingSession, request: RemotingCommand) -> Answer:
        """Return the topics of a cluster (224)."""
        return _topics(self._registry.tables.topics_of_cluster(decode_header(ClusterOnly, request.fields).cluster))

    def wipe_write_permission(self, _: RemotingSession, request: RemotingCommand) -> Answer:
        """Take the write permission from all topics of a broker (205); the answer has their number."""
        name = decode_header(BrokerNameOnly, request.fields).broker_name
        return Answer(fields={"wipeTopicCount": str(self._registry.tables.wipe_write_permission(name))})

    def add_write_permission(self, _: RemotingSession, request: RemotingCommand) -> Answer:
        """Give the write permission back to all topics of a broker (327); the answer has their number."""
        name = decode_header(BrokerNameOnly, request.fields).broker_name
        return Answer(fields={"addTopicCount": str(self._registry.tables.add_write_permission(name))})

    def delete_topic(self, _: RemotingSession, request: RemotingCommand) -> Answer:
        """Delete a topic from the tables, of one cluster or of all (216)."""
        header = decode_header(DeleteTopicInRegistry, request.fields)
        self._registry.tables.delete_topic(header.topic, header.cluster_name or None)
        return DONE

    def register_topic(self, _: RemotingSession, request: RemotingCommand) -> Answer:
        """Register a topic with the brokers of a given route (217)."""
        topic = decode_header(TopicOnly, request.fields).topic
        self._registry.tables.add_topic(topic, {queue.broker_name: queue for queue in decode_route(request.body).queues})
        return DONE

    # -- keys ---------------------------------------------------------------------------------------------------------

    def put_key(self, session: RemotingSession, request: RemotingCommand) -> None:
        """Set a key of the key-value configuration (100)."""
        header = decode_header(KvPair, request.fields)
        self._change(session, request, partial(self._config.put, header.namespace, header.key, header.value, self._run))

    def delete_key(self, session: RemotingSession, request: RemotingCommand) -> None:
        """Delete a key of the key-value configuration (102)."""
        header = decode_header(KvKey, request.fields)
        self._change(session, request, partial(self._config.delete, header.namespace, header.key, self._run))

    def _change(self, session: RemotingSession, request: RemotingCommand, change: Callable[[], None]) -> None:
        """Run the change in a greenlet, and answer when it is durable.

        Raise ``Overloaded`` when ``MOST_CHANGES`` changes wait.
        """
        if self._changes >= MOST_CHANGES:
            raise Overloaded(f"{MOST_CHANGES} other changes of keys wait for the disk", retry_after_ms=RETRY_MS)
        self._changes += 1
        gevent.spawn(self._change_one_at_a_time, session, session.owe(request), change)

    def _change_one_at_a_time(self, session: RemotingSession, kept: Kept, change: Callable[[], None]) -> None:
        answer = DONE
        try:
            with self._changing:
                change()
        except MetaqError as error:
            answer = failure(error)
        finally:
            self._changes -= 1
        session.pay(kept, answer)

    def get_key(self, _: RemotingSession, request: RemotingCommand) -> Answer:
        """Return the value of a key (101); 22 when there is no such key."""
        namespace, key = decode_header(KvKey, request.fields)
        value = self._config.get(namespace, key)
        if value is None:
            raise RequestFailed(Response.QUERY_NOT_FOUND, f"there is no key {key} in namespace {namespace}")
        return Answer(fields={"value": value})

    def keys(self, _: RemotingSession, request: RemotingCommand) -> Answer:
        """Return all keys and values of a namespace (219); 22 when there is no such namespace."""
        namespace = decode_header(Namespace, request.fields).namespace
        table = self._config.table(namespace)
        if table is None:
            raise RequestFailed(Response.QUERY_NOT_FOUND, f"there is no namespace {namespace}")
        return _body(encode_kv_table(table))

    # -- settings -----------------------------------------------------------------------------------------------------

    def settings(self, *_: Any) -> Answer:
        """Return the registry's settings (319)."""
        values = {
            "kvConfigPath": self._config.path,
            ORDER_MESSAGE_ENABLE: self._order_in_routes,
            "registryExpiryMs": self._settings.registry_expiry_ms,
            "scanNotActiveBrokerInterval": self._settings.registry_scan_ms,
        }
        return _body(encode_settings(values))

    def update_settings(self, _: RemotingSession, request: RemotingCommand) -> Answer:
        """Change settings (318), until the registry stops.

        Raise ``AccessDenied`` or ``BadRequest`` for a setting that cannot be changed.
        """
        wanted = decode_settings(request.body)
        for name in wanted:
            if name in UNCHANGEABLE:
                raise AccessDenied(f"{name} cannot be changed while the registry runs")
        for name, value in wanted.items():
            if name != ORDER_MESSAGE_ENABLE or value not in {"true", "false"}:
                raise BadRequest(f"{name}={value[:40]}: only {ORDER_MESSAGE_ENABLE}=true or false can be changed while it runs")
        self._order_in_routes = wanted.get(ORDER_MESSAGE_ENABLE, str(self._order_in_routes).lower()) == "true"
        return DONE


def _read_table(request: RemotingCommand, header: RegisterBroker) -> TopicConfigs:
    return decode_registration(request.body, request.version, header.compressed)


def _body(body: bytes) -> Answer:
    return Answer(body=(body,))


def _topics(topics: list[str], broker_address: str | None = None) -> Answer:
    return _body(encode_topic_list(topics, broker_address))
