"""The broker itself by command: settings, run-time information, statistics, and its own permission."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from metaq.client.text.textclient import TextClient, parse_stats
from metaq.config import load
from metaq.errors import Refused as TextRefused
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.fastjson import decode
from tests.support.admin import Refused, ask, ask_body, connect, create_topic, fields_of, pull, send
from tests.support.broker import BrokerProcess, wait_until
from tests.support.ports import free_ports
from tests.support.remoting import RemotingClient
from tests.support.slowdisk import Controlled

DEADLINE_S = 60.0
NAMES_OF_4_9_8 = """
bootTimestamp brokerVersion brokerVersionDesc commitLogDirCapacity commitLogDiskRatio commitLogMaxOffset commitLogMinOffset
consumeQueueDiskRatio dispatchBehindBytes dispatchMaxBuffer earliestMessageTimeStamp EndTransactionQueueSize
EndTransactionThreadPoolQueueCapacity getFoundTps getMessageEntireTimeMax getMissTps getTotalTps getTransferedTps
msgGetTotalTodayMorning msgGetTotalTodayNow msgGetTotalYesterdayMorning msgPutTotalTodayMorning msgPutTotalTodayNow
msgPutTotalYesterdayMorning pageCacheLockTimeMills pullThreadPoolQueueCapacity pullThreadPoolQueueHeadWaitTimeMills
pullThreadPoolQueueSize putLatency99 putLatency999 putMessageAverageSize putMessageDistributeTime putMessageEntireTimeMax
putMessageFailedTimes putMessageSizeTotal putMessageTimesTotal putTps queryThreadPoolQueueCapacity
queryThreadPoolQueueHeadWaitTimeMills queryThreadPoolQueueSize remainHowManyDataToFlush remainTransientStoreBufferNumbs runtime
sendThreadPoolQueueCapacity sendThreadPoolQueueHeadWaitTimeMills sendThreadPoolQueueSize startAcceptSendRequestTimeStamp
"""
NAMES_OF_5 = "getTransferredTps brokerActive timerReadBehind timerOffsetBehind timerCongestNum timerEnqueueTps timerDequeueTps"


@pytest.fixture
def client(broker: BrokerProcess) -> Iterator[RemotingClient]:
    with connect(broker) as client:
        yield client


def runtime(client: RemotingClient) -> dict[str, str]:
    table: dict[str, str] = ask_body(client, Request.GET_BROKER_RUNTIME_INFO)["table"]
    return table


def settings(client: RemotingClient) -> dict[str, str]:
    lines = ask(client, Request.GET_BROKER_CONFIG).body.decode().splitlines()
    return dict(line.split("=", 1) for line in lines)


def update(client: RemotingClient, *lines: str) -> None:
    ask(client, Request.UPDATE_BROKER_CONFIG, "\n".join(lines).encode())


# -- what it is doing -------------------------------------------------------------------------------------------------


def test_runtime_has_every_name(client: RemotingClient) -> None:
    """SG-086, SG-088: 28 has each name that RocketMQ's tools know, as texts; rates have three averages."""
    table = runtime(client)
    assert table.keys() >= set((NAMES_OF_4_9_8 + NAMES_OF_5).split())
    assert all(isinstance(value, str) for value in table.values())
    assert table["brokerVersionDesc"] == "V4_9_8"
    for name in ("putTps", "getTransferedTps", "getTransferredTps", "getTotalTps", "getFoundTps", "getMissTps"):
        assert re.fullmatch(r"\d+\.\d+ \d+\.\d+ \d+\.\d+", table[name]), name
    assert 0 <= float(table["commitLogDiskRatio"]) <= 1


def test_runtime_counts(client: RemotingClient) -> None:
    """SG-086: messages put and got by both protocols, since the start; delay levels by position."""
    before = runtime(client)
    create_topic(client, "counted")
    send(client, "counted", b"12345", b"12345", b"12345")
    send(client, "counted", b"later", pairs="DELAY\x0118")
    pull(client, "counted", 0)
    after = runtime(client)

    def grown(name: str) -> int:
        return int(after[name]) - int(before[name])

    assert grown("msgPutTotalTodayNow") == grown("putMessageTimesTotal") == 3
    assert grown("putMessageSizeTotal") == 15
    assert grown("msgGetTotalTodayNow") == 3
    assert float(after["putTps"].split()[0]) > 0
    assert re.fullmatch(r"\d+,\d+", after["scheduleMessageOffset_18"])
    assert int(after["commitLogMaxOffset"]) > int(before["commitLogMaxOffset"])


def test_rates(broker: BrokerProcess, client: RemotingClient) -> None:
    """SG-086: 315 by topic, by topic@group and for the broker, over a minute, an hour and a day; both protocols count."""
    create_topic(client, "rated")
    send(client, "rated", b"1234567890", b"1234567890")
    with TextClient(broker.host, broker.port) as text:
        text.put("rated", b"1234567890")
        messages, _ = text.get("rated", group="both")
        assert len(messages) == 3
    pull(client, "rated", 0, group="both")

    def total(name: str, key: str, span: str = "statsMinute") -> tuple[int, float]:
        rates = ask_body(client, Request.VIEW_BROKER_STATS_DATA, statsName=name, statsKey=key)
        assert rates[span]["tps"] > 0
        return rates[span]["sum"], rates[span]["avgpt"]

    for span in ("statsMinute", "statsHour", "statsDay"):
        assert total("TOPIC_PUT_NUMS", "rated", span) == (3, 1.0)
    assert total("TOPIC_PUT_SIZE", "rated") == (30, 10.0)
    assert total("GROUP_GET_NUMS", "rated@both") == (6, 1.0)
    assert total("GROUP_GET_SIZE", "rated@both")[0] > 60
    assert total("BROKER_PUT_NUMS", "DefaultCluster")[0] >= 3
    assert total("BROKER_GET_NUMS", "DefaultCluster")[0] >= 6


def test_rates_of_nothing(client: RemotingClient) -> None:
    """SG-086: 315 answers 1 for what was never counted, and for unknown names."""
    create_topic(client, "never-put")
    for name, key in (("TOPIC_PUT_NUMS", "never-put"), ("GROUP_GET_NUMS", "never-put@nobody"), ("NO_SUCH_NAME", "never-put")):
        with pytest.raises(Refused, match="nothing is counted") as refused:
            ask(client, Request.VIEW_BROKER_STATS_DATA, statsName=name, statsKey=key)
        assert refused.value.code == Response.SYSTEM_ERROR


def test_text_statistics_count_both_protocols(tmp_path: Path) -> None:
    """SG-086, SG-076: sends and pulls of RocketMQ clients are puts and gets of ``stats``; what is refused failed."""
    with BrokerProcess(tmp_path / "data") as broker, connect(broker) as client, TextClient(broker.host, broker.port) as text:
        create_topic(client, "both")
        send(client, "both", b"12345", b"12345")
        text.put("both", b"12345")
        pull(client, "both", 0)
        pull(client, "both", 3)
        with pytest.raises(Refused):
            send(client, "OFFSET_MOVED_EVENT", b"x")
        counted = parse_stats(text.stats())
        names = ("cmd_put", "put_failed", "cmd_get", "get_miss")
        assert [counted[name] for name in names] == ["4", "1", "2", "1"]
        topic = parse_stats(text.stats("both"))
        assert topic["topic_realtime_get"].startswith("Count=2,")


# -- addresses --------------------------------------------------------------------------------------------------------


def test_the_port_of_rocketmq_clients(tmp_path: Path) -> None:
    """SG-056: an address of their own, the second port two below it, and routes that lead there."""
    second, _, port = free_ports(3)
    with BrokerProcess(tmp_path / "data", "--remoting-listen", f"127.0.0.1:{port}") as broker:
        identities = set()
        for number in (port, second, broker.port):
            with RemotingClient("127.0.0.1", number) as client:
                identities.add(ask(client, Request.IDENTITY).fields["identity"])
                [data] = ask_body(client, Request.GET_ROUTEINFO_BY_TOPIC, topic="TBW102")["brokerDatas"]
                assert data["brokerAddrs"] == {"0": f"127.0.0.1:{port}"}
        assert len(identities) == 1
        assert load(None, {}, {}).remoting_listen.endswith(":10911")


# -- settings ---------------------------------------------------------------------------------------------------------


def test_settings_are_shown(broker: BrokerProcess, client: RemotingClient) -> None:
    """SG-088: 26 names settings as RocketMQ does, and as metaq does, with a version."""
    answer = ask(client, Request.GET_BROKER_CONFIG)
    assert decode(answer.fields["version"].encode()).keys() == {"counter", "timestamp"}
    shown = settings(client)
    assert (shown["brokerName"], shown["brokerClusterName"], shown["brokerId"]) == ("metaq", "DefaultCluster", "0")
    assert (shown["listenPort"], shown["flushDiskType"]) == (str(broker.port), "ASYNC_FLUSH")
    assert shown["messageDelayLevel"] == "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
    assert shown["checkpoint_interval_ms"] == "5000"


def test_settings_are_changed(client: RemotingClient) -> None:
    """SG-088, SG-049: 25 changes how long messages are kept and when they go."""
    update(client, "# a comment", "", "fileReservedTime=48", "deleteWhen=05")
    shown = settings(client)
    assert (shown["fileReservedTime"], shown["deleteWhen"]) == ("48", "05")
    assert (float(shown["keep_hours"]), shown["delete_hour"]) == (48, "5")
    version = decode(ask(client, Request.GET_BROKER_CONFIG).fields["version"].encode())
    assert version["counter"] >= 1
    update(client, "fileReservedTime=72", "deleteWhen=04")


@pytest.mark.parametrize(
    "text",
    ["", "nonsense", "brokerName=other", "fileReservedTime=0", "fileReservedTime=-1", "deleteWhen=24", "brokerPermission=x"],
)
def test_settings_refused(client: RemotingClient, text: str) -> None:
    """SG-088: 25 says which setting is wrong, and changes none of them."""
    with pytest.raises(Refused) as refused:
        update(client, "deleteWhen=07" if text else "", text)
    assert refused.value.code == Response.SYSTEM_ERROR
    assert text.partition("=")[0] in refused.value.remark
    assert settings(client)["deleteWhen"] == "04"


# -- too much to do ---------------------------------------------------------------------------------------------------


def test_busy_says_why_and_until_when(tmp_path: Path) -> None:
    """SG-041: a send beyond ``max_waiting_bytes`` is answered 2 at once, with what was measured and when to try again."""
    fields = fields_of(a="pg", b="busy", c="TBW102", d=1, e=0, f=0, g=1700000000000, h=0, j=0, k=False)
    flags = ("--max-waiting-bytes", "1024", "--sync-timeout-ms", "60000")
    with Controlled(tmp_path / "data", *flags) as broker, connect(broker) as client:
        send(client, "busy", b"x")
        broker.stall()
        waiting = [client.send(Request.SEND_MESSAGE_V2, fields, bytes(1000)) for _ in range(2)]
        wait_until(lambda: int(runtime(client)["sendThreadPoolQueueSize"]) > 0, DEADLINE_S, "sends wait for the disk")
        refused = client.call(Request.SEND_MESSAGE_V2, fields, b"x")
        assert refused.code == Response.SYSTEM_BUSY
        limit = r"2000 bytes of puts wait for the disk, the limit is 1024 \(max_waiting_bytes\)"
        measured = r"the oldest since \d+ ms, the last sync took \d+ ms"
        assert re.fullmatch(rf"{limit}; {measured}; retry after \d+ ms", refused.remark or ""), refused.remark
        broker.go_on()
        assert [client.response(opaque).code for opaque in waiting] == [Response.SUCCESS] * 2
        send(client, "busy", b"x")


# -- permission -------------------------------------------------------------------------------------------------------


def permission_in_route(client: RemotingClient, topic: str) -> int:
    [queues] = ask_body(client, Request.GET_ROUTEINFO_BY_TOPIC, topic=topic)["queueDatas"]
    return int(queues["perm"])


def test_permission_of_the_broker(tmp_path: Path) -> None:
    """SG-139: taken away it is checked on send and pull by both protocols, and every topic's route says so; then given back."""
    with BrokerProcess(tmp_path / "data") as broker, connect(broker) as client, TextClient(broker.host, broker.port) as text:
        create_topic(client, "drained")
        send(client, "drained", b"before")
        update(client, "brokerPermission=4")
        with pytest.raises(Refused, match="broker_permission 4") as refused:
            send(client, "drained", b"x")
        assert refused.value.code == Response.NO_PERMISSION
        with pytest.raises(TextRefused, match="broker_permission 4"):
            text.put("drained", b"x")
        assert pull(client, "drained", 0).code == Response.SUCCESS
        assert permission_in_route(client, "drained") == 4
        assert permission_in_route(client, "TBW102") == 5
        update(client, "brokerPermission=2")
        assert pull(client, "drained", 0).code == Response.NO_PERMISSION
        with pytest.raises(TextRefused, match="broker_permission"):
            text.get("drained")
        update(client, "brokerPermission=6")
        send(client, "drained", b"after")
        assert permission_in_route(client, "drained") == 6


def test_permission_from_the_start(tmp_path: Path) -> None:
    """SG-139: by setting."""
    with BrokerProcess(tmp_path / "data", "--broker-permission", "4") as broker, connect(broker) as client:
        with pytest.raises(Refused, match="broker_permission 4"):
            send(client, "refused", b"x")
        assert settings(client)["brokerPermission"] == "4"


def test_wiped_write_permission(broker: BrokerProcess) -> None:
    """SG-139: 205 takes the permission to write from the registry's routes, 327 gives it back; the broker goes on as it was."""
    host, port = broker.registry.split(":")
    with connect(broker) as client, RemotingClient(host, int(port)) as registry:
        create_topic(client, "wiped")
        assert int(ask(registry, Request.WIPE_WRITE_PERM_OF_BROKER, brokerName="metaq").fields["wipeTopicCount"]) > 0
        wait_until(lambda: permission_in_route(registry, "wiped") == 4, DEADLINE_S, "the route forbids writing")
        send(client, "wiped", b"x")
        ask(registry, Request.ADD_WRITE_PERM_OF_BROKER, brokerName="metaq")
        assert permission_in_route(registry, "wiped") == 6
