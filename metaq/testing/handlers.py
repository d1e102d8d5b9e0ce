"""The answers of the in-memory broker to its clients, from lists and dictionaries."""

import itertools
import logging
import random
import threading
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

import orjson

from metaq.client import checks
from metaq.client.connecting.forks import renewed_in_children
from metaq.client.connecting.transport import Asked, ClientAnswer, Done, RemotingRequest
from metaq.errors import BadRequest, ClientClosed, MessageIllegal, MetaqError, TimerDelivered, UnknownTimer, UnknownTopic
from metaq.message import DEAD_PREFIX, RETRY_PREFIX, GroupPartition, MessageQueue
from metaq.protocol import properties as names
from metaq.protocol.remoting import fastjson, headers
from metaq.protocol.remoting.codes import READ, WRITE, Request, Response
from metaq.protocol.remoting.headers import decode_header, with_names
from metaq.protocol.remoting.heartbeats import Heartbeat, decode_heartbeat, decode_queue_set, encode_locked
from metaq.protocol.remoting.recall import DELIVERED, TIMER_STATE, decode_recall
from metaq.protocol.remoting.routes import (
    BrokerData,
    ClusterInfo,
    QueueData,
    TopicRoute,
    encode_cluster_info,
    encode_route,
    encode_topic_list,
    topic_row,
)
from metaq.protocol.remoting.sending.batch import decode_batch
from metaq.protocol.subscription import parse_subscription
from metaq.testing.consumerleases import ConsumerLeases
from metaq.testing.halves import Halves
from metaq.testing.log import ADDRESS, BROKER_NAME, Answered, Letter, Log, answer_of, chooser, decode, once_of
from metaq.testing.offsets import InMemoryOffsets
from metaq.testing.session import InMemorySession
from metaq.timers.handles import read_handle

logger = logging.getLogger(__name__)

CLUSTER: Final = "DefaultCluster"
DEFAULT_PARTITIONS: Final = 4
_MAX_RETRIES: Final = 16
H = TypeVar("H", bound=tuple[Any, ...])


class _Held(NamedTuple):
    """A pull or a pop that waits for messages."""

    session: InMemorySession
    request: RemotingRequest
    done: Done
    began_s: float


class RequestHandlers:
    """The part of the in-memory broker that its clients ask, which is its registry, too."""

    def __init__(self, address: str, partitions: int) -> None:
        self.address = address
        """The address to pass to ``metaq.connect``."""
        self._partitions = partitions
        self._renew()  # makes the guard of what follows
        renewed_in_children(self)
        self._log = Log()
        self._halves = Halves(self._log)
        self._held: list[_Held] = []
        self._beats: dict[InMemorySession, Heartbeat] = {}
        self._checks = itertools.count()
        """The number of the next round of checks of half messages, by which producers are asked in turn."""
        self._offsets = InMemoryOffsets(self._log.now_ms)
        self._leases = ConsumerLeases(self._log, self._offsets)
        self._locks: dict[tuple[str, MessageQueue], str] = {}
        self._handlers: dict[int, Callable[[InMemorySession, RemotingRequest], ClientAnswer]] = {
            Request.GET_ROUTEINFO_BY_TOPIC: self._route,
            Request.GET_BROKER_CLUSTER_INFO: self._clusters,
            Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: self._topics,
            Request.SEND_MESSAGE: self._send,
            Request.SEND_MESSAGE_V2: self._send,
            Request.SEND_BATCH_MESSAGE: self._send,
            Request.SEND_REPLY_MESSAGE_V2: self._reply,
            Request.RECALL_MESSAGE: self._cancel,
            Request.END_TRANSACTION: self._end_transaction,
            Request.CONSUMER_SEND_MSG_BACK: self._send_back,
            Request.HEART_BEAT: self._beat,
            Request.UNREGISTER_CLIENT: self._unregister,
            Request.GET_CONSUMER_LIST_BY_GROUP: self._members,
            Request.QUERY_CONSUMER_OFFSET: self._query_offset,
            Request.UPDATE_CONSUMER_OFFSET: self._update_offset,
            Request.GET_MAX_OFFSET: self._end,
            Request.GET_MIN_OFFSET: self._begin,
            Request.SEARCH_OFFSET_BY_TIMESTAMP: self._search_offset,
            Request.ACK_MESSAGE: lambda session, request: self._leases.ack(request),
            Request.BATCH_ACK_MESSAGE: lambda session, request: self._leases.ack_many(request),
            Request.CHANGE_MESSAGE_INVISIBLETIME: lambda session, request: self._leases.change(request),
            Request.LOCK_BATCH_MQ: self._lock,
            Request.UNLOCK_BATCH_MQ: self._unlock,
            Request.VIEW_MESSAGE_BY_ID: self._view,
            Request.QUERY_MESSAGE: self._query,
            Request.GET_TOPIC_CONFIG: self._topic,
            Request.UPDATE_AND_CREATE_TOPIC: self._create_topic,
            Request.DELETE_TOPIC_IN_BROKER: self._delete_topic,
            Request.DELETE_TOPIC_IN_NAMESRV: lambda session, request: ClientAnswer(),
        }

    def _renew(self) -> None:
        """Make a new lock in a child of a fork. The child has only a copy of the broker; clients there get errors."""
        self._guard = threading.RLock()

    # -- for clients --------------------------------------------------------------------------------------------------

    def _connect(self, asked: Asked, greet: object) -> InMemorySession:
        """Return the transport of a new client."""
        return InMemorySession(self, asked)

    def _take(self, session: InMemorySession, request: RemotingRequest, done: Done) -> None:
        """Answer a request at once, a pull or a pop when there are messages. ``ClientClosed`` when the client has left."""
        with self._guard:
            if session.closed:  # checked under the lock, or a late heartbeat would register a client that has left
                raise ClientClosed("the client was closed")
            if request.code in {Request.PULL_MESSAGE, Request.POP_MESSAGE}:
                self._held.append(_Held(session, request, done, time.monotonic()))
                self._wake()
                return
            handler = self._handlers.get(request.code)
            try:
                answer = self._unknown(request) if handler is None else handler(session, request)
            except MetaqError as error:
                answer = ClientAnswer(error.code, remark=str(error))
            session.answer(done, answer)
            self._wake()

    def _leave(self, session: InMemorySession) -> None:
        """Forget a client that has closed."""
        with self._guard:
            self._held = [held for held in self._held if held.session is not session]
            self._forget(session)

    def _unknown(self, request: RemotingRequest) -> ClientAnswer:
        return ClientAnswer(Response.REQUEST_CODE_NOT_SUPPORTED, remark=f"metaq.testing does not know request {request.code}")

    # -- routes and topics --------------------------------------------------------------------------------------------

    def _route(self, session: InMemorySession, request: RemotingRequest) -> ClientAnswer:
        topic = _fields(headers.TopicOnly, request).topic
        known = self._log.topics.get(topic)
        if topic == "TBW102":
            row = QueueData(BROKER_NAME, self._partitions, self._partitions, READ | WRITE | 1)
        elif known is None:
            return ClientAnswer(Response.TOPIC_NOT_EXIST, remark=f"no topic {topic}")
        else:
            row = QueueData(BROKER_NAME, len(known), len(known), READ | WRITE)
        return ClientAnswer(body=encode_route(TopicRoute((row,), (_BROKER,))))

    def _clusters(self, session: InMemorySession, request: RemotingRequest) -> ClientAnswer:
        return ClientAnswer(body=encode_cluster_info(ClusterInfo({BROKER_NAME: _BROKER}, {CLUSTER: [BROKER_NAME]})))

    def _topics(self, session: InMemorySession, request: RemotingRequest) -> ClientAnswer:
        return ClientAnswer(body=encode_topic_list(self._log.topics))

    def _topic(self, session: InMemorySession, request: RemotingRequest) -> ClientAnswer:
        topic = _fields(headers.TopicOnly, request).topic
        config = self._log.config_of(topic)
        if config is None:
            raise UnknownTopic(f"no topic {topic}")
        return ClientAnswer(body=fastjson.encode(topic_row(config)))

    def _create(self, topic: str, partitions: int) -> None:
        checks.topic(topic)
        checks.partitions(partitions)
        with self._guard:
            self._log.create(topic, partitions)

    def _create_topic(self, session: InMemorySession, request: RemotingRequest) -> ClientAnswer:
        header = _fields(headers.CreateTopic, request)
        self._create(header.topic, header.write_queue_nums)
        self._log.change_attributes(header.topic, header.attributes or "")
        return ClientAnswer()

    def _delete_topic(self, session: InMemorySession, request: RemotingRequest) -> ClientAnswer:
        topic = _fields(headers.TopicOnly, request).topic
        self._log.delete(topic)
        self._leases.forget(topic)
        self._offsets.forget(topic)
        return ClientAnswer()

    # -- messages -----------------------------------------------------------------------------------------------------

    def _send(self, session: InMemorySession, request: RemotingRequest) -> ClientAnswer:
        sent = self._letter(request)
        is_batch, is_half = request.code == Request.SEND_BATCH_MESSAGE, sent.properties.get(names.TRANSACTION) == "true"
        letters = [sent]
        if is_batch:
            letters = [
                sent._replace(body=item.body, flag=item.flag, properties={**names.parse(item.properties), **sent.properties})
                for item in decode_batch(sent.body)
            ]
        letters = self._log.prioritized(letters)
        is_timed = any(name in letter.properties for name in names.TIMERS for letter in letters)
        if (is_batch or is_half) and is_timed:
            raise MessageIllegal("a message of a batch or a transaction cannot be delayed")
        for letter in letters:
            names.encode(letter.properties)  # refuses those that no record can keep
        once = once_of(letters[0])
        if once in self._log.answers:
            return self._log.answers[once].answer
        if is_half:
            beat = self._beats.get(session, Heartbeat("", (), ()))  # the heartbeat that names the group may still be in flight
            self._beats[session] = beat._replace(producers=(*beat.producers, sent.properties.get(names.PRODUCER_GROUP, "")))
        put = self._halves.put if is_half else self._log.put
        placed = [put(letter) for letter in letters]
        answer = answer_of(letters[0], placed)
        if once[1]:
            self._log.answers[once] = Answered(answer, is_timed or names.DELAY in letters[0].properties)
        return answer

    def _letter(self, request: RemotingRequest) -> Letter:
        """Return what a request sends, a batch as one letter; its topic is made if it is not there."""
        header = decode_header(headers.SendMessage, with_names(dict(request.fields or {})))
        if header.topic not in self._log.topics:
            self._log.create(header.topic, self._partitions)
        topic, partition = header.topic, header.queue_id if header.queue_id >= 0 else random.randrange(self._partitions)
        properties = names.parse(header.properties or "")
        if names.REPLY_TO in properties:
            properties[names.CLUSTER] = CLUSTER
        is_dead = topic.startswith(RETRY_PREFIX) and header.reconsume_times >= (header.max_reconsume_times or _MAX_RETRIES)
        if is_dead:
            topic, partition = f"{DEAD_PREFIX}{topic.removeprefix(RETRY_PREFIX)}", 0
        if is_dead or not properties.get(names.DELAY):
            properties.pop(names.DELAY, None)
        flags = header.flag, header.sys_flag
        return Letter(topic, partition, request.body, properties, *flags, header.born_timestamp, header.reconsume_times)

    def _cancel(self, session: InMemorySession, request: RemotingRequest) -> ClientAnswer:
        header = _fields(headers.RecallMessage, request)
        try:
            recall = decode_recall(header.recall_handle)
            handle = read_handle(recall.handle)
            if (recall.topic, recall.broker_name) != (header.topic, BROKER_NAME):
                raise UnknownTimer(f"the handle is of the topic {recall.topic} of the broker {recall.broker_name}")
            self._log.cancel(handle, recall.topic)
        except BadRequest as error:
            return ClientAnswer(Response.ILLEGAL_OPERATION, remark=str(error))
        except TimerDelivered as error:
            return ClientAnswer(error.code, remark=str(error), fields={TIMER_STATE: DELIVERED})
        return ClientAnswer(fields={"msgId": recall.unique_key})

    def _end_transaction(self, session: InMemorySession, request: RemotingRequest) -> ClientAnswer:
        return self._halves.end(_fields(headers.EndTransaction, request))

    def _reply(self, session: InMemorySession, request: RemotingRequest) -> ClientAnswer:
        header = decode_header(headers.SendMessage, with_names(dict(request.fields or {})))
        client = names.parse(header.properties or "").get(names.REPLY_TO)
        requester = next((other for other, beat in self._beats.items() if beat.client_id == client and beat.producers), None)
        if requester is None:
            return ClientAnswer(Response.SYSTEM_ERROR, remark=f"the requester {client} is not here any more")
        pushed = headers.PushReply(
            header.producer_group,
            header.topic,
            header.default_topic,
            header.default_topic_queue_nums,
            header.queue_id,
            header.sys_flag,
            header.born_timestamp,
            header.flag,
            ADDRESS,
            ADDRESS,
            self._log.now_ms(),
            header.properties,
        )
        requester.ask(Request.PUSH_REPLY_MESSAGE_TO_CLIENT, pushed, request.body)
        return ClientAnswer(fields={"msgId": "0", "queueId": "0", "queueOffset": "0"})

    def _send_back(self, session: InMemorySession, request: RemotingRequest) -> ClientAnswer:
        header = _fields(headers.SendBack, request)
        record = self._log.record_at(header.offset)
        if record is None:
            return ClientAnswer(Response.SYSTEM_ERROR, remark=f"no message at {header.offset}")
        message = decode(record)
        properties = {names.RETRY_TOPIC: message.topic, names.ORIGIN_ID: message.offset_id, **message.properties}
        limit = _MAX_RETRIES if header.max_reconsume_times is None else header.max_reconsume_times
        topic = f"{RETRY_PREFIX}{header.group}"
        properties[names.DELAY] = str(header.delay_level or 3 + message.reconsume_times)
        if message.reconsume_times >= limit or header.delay_level < 0:
            topic = f"{DEAD_PREFIX}{header.group}"
            del properties[names.DELAY]
        (body, sys_flag), times = message._packed(), message.reconsume_times + 1
        self._log.put(Letter(topic, 0, body, properties, message.flag, sys_flag, message.born_ms, times))
        return ClientAnswer()

    def _view(self, session: InMemorySession, request: RemotingRequest) -> ClientAnswer:
        record = self._log.record_at(_fields(headers.ViewMessage, request).offset)
        return ClientAnswer(Response.SYSTEM_ERROR, remark="no such message") if record is None else ClientAnswer(body=record)

    def _query(self, session: InMemorySession, request: RemotingRequest) -> ClientAnswer:
        header = _fields(headers.QueryMessage, request)
        found = [
            message
            for message in self._log.messages(header.topic)
            if header.key in {message.id, *message.keys} and header.begin_timestamp <= message.store_ms <= header.end_timestamp
        ]
        records = [self._log.record_at(message.log_offset) or b"" for message in found[-header.max_num :]]
        fields = {"indexLastUpdateTimestamp": str(self._log.now_ms()), "indexLastUpdatePhyoffset": "0"}
        return ClientAnswer(Response.SUCCESS if records else Response.QUERY_NOT_FOUND, b"".join(records), None, fields)

    # -- pulls and pops -----------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        """Answer the held pulls and pops that can be answered now."""
        self._held = [held for held in self._held if not self._give(held)]

    def _give(self, held: _Held) -> bool:
        """Answer a pull or a pop if possible; return whether it was answered."""
        is_pull = held.request.code == Request.PULL_MESSAGE
        try:
            answer = self._pull(held.request) if is_pull else self._leases.pop(held.request, held.began_s)
        except MetaqError as error:
            answer = ClientAnswer(error.code, remark=str(error))
        if answer is not None:
            held.session.answer(held.done, answer)
        return answer is not None

    def _pull(self, request: RemotingRequest) -> ClientAnswer | None:
        header = _fields(headers.PullMessage, request)
        partition = self._log.partition(header.topic, header.queue_id)
        code, following = Response.PULL_NOT_FOUND, header.queue_offset
        chosen: list[bytes] = []
        if not partition.first <= header.queue_offset <= partition.end:
            code, following = Response.PULL_OFFSET_MOVED, min(max(following, partition.first), partition.end)
        elif header.queue_offset < partition.end:
            wanted = chooser(parse_subscription(header.topic, header.subscription or "*", 0, header.expression_type or "TAG"))
            fresh = partition.since(header.queue_offset)[: header.max_msg_nums]
            chosen = [row for row in fresh if wanted(decode(row))]
            following = header.queue_offset + len(fresh)
            code = Response.SUCCESS if chosen else Response.PULL_RETRY_IMMEDIATELY
        else:
            return None
        fields = {
            "suggestWhichBrokerId": "0",
            "nextBeginOffset": str(following),
            "minOffset": str(partition.first),
            "maxOffset": str(partition.end),
        }
        return ClientAnswer(code, b"".join(chosen), None, fields)

    # -- groups -------------------------------------------------------------------------------------------------------

    def _group(self, group: str) -> list[InMemorySession]:
        return [session for session, beat in self._beats.items() if group in {consumer.group for consumer in beat.consumers}]

    def _producers(self, group: str) -> list[InMemorySession]:
        return [session for session, beat in self._beats.items() if group in beat.producers]

    def _beat(self, session: InMemorySession, request: RemotingRequest) -> ClientAnswer:
        beat = decode_heartbeat(request.body)
        session.client_id = beat.client_id
        before = self._beats.get(session)
        self._beats[session] = beat
        known = {consumer.group for consumer in before.consumers} if before is not None else set()
        for consumer in beat.consumers:
            self._log.create(f"{RETRY_PREFIX}{consumer.group}", 1)
            if consumer.group not in known:
                self._notify(consumer.group)
        return ClientAnswer()

    def _notify(self, group: str) -> None:
        for session in self._group(group):
            session.ask(Request.NOTIFY_CONSUMER_IDS_CHANGED, headers.ConsumerGroupOnly(group))

    def _unregister(self, session: InMemorySession, request: RemotingRequest) -> ClientAnswer:
        header = _fields(headers.UnregisterClient, request)
        beat = self._beats.get(session)
        if beat is None:
            return ClientAnswer()
        producers = tuple(group for group in beat.producers if group != header.producer_group)
        consumers = tuple(consumer for consumer in beat.consumers if consumer.group != header.consumer_group)
        self._beats[session] = beat._replace(producers=producers, consumers=consumers)
        if header.consumer_group:
            self._held = [
                held for held in self._held if held.session is not session or not _is_pop(held, header.consumer_group)
            ]
            self._notify(header.consumer_group)
        return ClientAnswer()

    def _forget(self, session: InMemorySession) -> None:
        beat = self._beats.pop(session, None)
        self._locks = {key: owner for key, owner in self._locks.items() if owner != session.client_id}
        for consumer in beat.consumers if beat is not None else ():
            self._notify(consumer.group)

    def _members(self, session: InMemorySession, request: RemotingRequest) -> ClientAnswer:
        members = [member.client_id for member in self._group(_fields(headers.ConsumerGroupOnly, request).consumer_group)]
        return ClientAnswer(body=orjson.dumps({"consumerIdList": members}))

    def _query_offset(self, session: InMemorySession, request: RemotingRequest) -> ClientAnswer:
        header = _fields(headers.QueryConsumerOffset, request)
        place = GroupPartition(header.consumer_group, header.topic, header.queue_id)
        first = self._log.partition(header.topic, header.queue_id).first
        self._offsets.taken_up(place)
        offset = self._offsets.get(place)
        # as a broker does for a young topic: a new group begins with its first message
        return _offset(first if offset is None else offset)

    def _update_offset(self, session: InMemorySession, request: RemotingRequest) -> ClientAnswer:
        header = _fields(headers.UpdateConsumerOffset, request)
        self._log.partition(header.topic, header.queue_id)  # raises when it was deleted
        self._offsets.commit(GroupPartition(header.consumer_group, header.topic, header.queue_id), header.commit_offset)
        return ClientAnswer()

    def _end(self, session: InMemorySession, request: RemotingRequest) -> ClientAnswer:
        header = _fields(headers.QueueOnly, request)
        return _offset(self._log.partition(header.topic, header.queue_id).end)

    def _begin(self, session: InMemorySession, request: RemotingRequest) -> ClientAnswer:
        header = _fields(headers.QueueOnly, request)
        return _offset(self._log.partition(header.topic, header.queue_id).first)

    def _search_offset(self, session: InMemorySession, request: RemotingRequest) -> ClientAnswer:
        header = _fields(headers.SearchOffset, request)
        return _offset(self._log.first_since(header.topic, header.queue_id, header.timestamp))

    def _lock(self, session: InMemorySession, request: RemotingRequest) -> ClientAnswer:
        wanted = decode_queue_set(request.body)
        for one in wanted.queues:
            self._locks.setdefault((wanted.group, one), wanted.client_id)
        return ClientAnswer(
            body=encode_locked(one for one in wanted.queues if self._locks[wanted.group, one] == wanted.client_id)
        )

    def _unlock(self, session: InMemorySession, request: RemotingRequest) -> ClientAnswer:
        given = decode_queue_set(request.body)
        for one in given.queues:
            if self._locks.get((given.group, one)) == given.client_id:
                del self._locks[given.group, one]
        return ClientAnswer()


_BROKER: Final = BrokerData(CLUSTER, BROKER_NAME, {0: ADDRESS})


def _fields(kind: type[H], request: RemotingRequest) -> H:
    return decode_header(kind, request.fields or {})


def _offset(offset: int) -> ClientAnswer:
    return ClientAnswer(fields={"offset": str(offset)})


def _is_pop(held: _Held, group: str) -> bool:
    return held.request.code == Request.POP_MESSAGE and (held.request.fields or {}).get("consumerGroup") == group
