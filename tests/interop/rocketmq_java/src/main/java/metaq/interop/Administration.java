package metaq.interop;

import com.alibaba.fastjson.JSONObject;
import java.io.ByteArrayOutputStream;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.TreeMap;
import org.apache.rocketmq.client.QueryResult;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.common.TopicConfig;
import org.apache.rocketmq.common.constant.PermName;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.remoting.netty.NettyClientConfig;
import org.apache.rocketmq.remoting.netty.NettyRemotingClient;
import org.apache.rocketmq.remoting.protocol.RemotingCommand;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;
import org.apache.rocketmq.tools.command.MQAdminStartup;

/** What the admin client of RocketMQ's tools does. */
final class Administration {
    private static final int QUERY_MESSAGES = 32;
    private static final long INVOKE_MS = 60_000;

    private final String registry;
    private DefaultMQAdminExt started;

    Administration(String registry) {
        this.registry = registry;
    }

    private DefaultMQAdminExt admin() throws MQClientException {
        if (started == null) {
            DefaultMQAdminExt admin = new DefaultMQAdminExt(INVOKE_MS);
            admin.setNamesrvAddr(registry);
            admin.start();
            started = admin;
        }
        return started;
    }

    Object createTopic(JSONObject request) throws Exception {
        int queues = request.getIntValue("queues");
        TopicConfig topic = new TopicConfig(request.getString("topic"), queues, queues,
                PermName.PERM_READ | PermName.PERM_WRITE);
        admin().createAndUpdateTopicConfig(request.getString("broker"), topic);
        return null;
    }

    Object queryByKey(JSONObject request) throws Exception {
        QueryResult result = admin().queryMessage(
                request.getString("topic"), request.getString("key"), QUERY_MESSAGES, 0, Long.MAX_VALUE);
        return result.getMessageList().stream().map(Messages::view).toList();
    }

    /** By the unique id that the client gave the message, or by the offset id that the broker gave it. */
    Object queryById(JSONObject request) throws Exception {
        return Messages.view(admin().viewMessage(request.getString("topic"), request.getString("message_id")));
    }

    /** Where a group stands in each queue of a topic. */
    Object groupOffsets(JSONObject request) throws Exception {
        Map<String, Long> view = new TreeMap<>();
        admin().examineConsumeStats(request.getString("group"), request.getString("topic")).getOffsetTable().forEach(
                (queue, offsets) -> view.put(Integer.toString(queue.getQueueId()), offsets.getConsumerOffset()));
        return view;
    }

    Object resetOffsets(JSONObject request) throws Exception {
        Map<MessageQueue, Long> offsets = admin().resetOffsetByTimestamp(
                request.getString("topic"), request.getString("group"), request.getLongValue("timestamp"), true);
        Map<String, Long> view = new TreeMap<>();
        offsets.forEach((queue, offset) -> view.put(Integer.toString(queue.getQueueId()), offset));
        return view;
    }

    /** Runs RocketMQ's command line tool in this process, and returns what it prints. */
    Object mqadmin(JSONObject request) {
        ByteArrayOutputStream printed = new ByteArrayOutputStream();
        PrintStream stream = new PrintStream(printed, true, StandardCharsets.UTF_8);
        PrintStream output = System.out;
        PrintStream errors = System.err;
        System.setOut(stream);
        System.setErr(stream);
        try {
            MQAdminStartup.main0(request.getJSONArray("arguments").toArray(new String[0]), null);
        } finally {
            System.setOut(output);
            System.setErr(errors);
        }
        return printed.toString(StandardCharsets.UTF_8);
    }

    /** Sends a bare request with a code that no client of RocketMQ has. */
    Object invoke(JSONObject request) throws Exception {
        NettyRemotingClient client = new NettyRemotingClient(new NettyClientConfig());
        client.start();
        try {
            RemotingCommand command = RemotingCommand.createRequestCommand(request.getIntValue("code"), null);
            RemotingCommand answer = client.invokeSync(request.getString("address"), command, INVOKE_MS);
            Map<String, Object> view = new LinkedHashMap<>();
            view.put("code", answer.getCode());
            view.put("remark", answer.getRemark());
            return view;
        } finally {
            client.shutdown();
        }
    }

    void close() {
        if (started != null) {
            started.shutdown();
        }
    }
}
