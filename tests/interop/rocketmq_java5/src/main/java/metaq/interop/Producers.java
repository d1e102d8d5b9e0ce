package metaq.interop;

import com.alibaba.fastjson.JSONObject;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageAccessor;
import org.apache.rocketmq.common.message.MessageExt;

/** The producers of this process, by the names that requests give them. */
final class Producers {
    private static final int SEND_MS = 30_000;
    private static final int BATCH = 250;

    private final String registry;
    private final Map<String, DefaultMQProducer> started = new ConcurrentHashMap<>();

    Producers(String registry) {
        this.registry = registry;
    }

    private DefaultMQProducer named(String name) {
        DefaultMQProducer producer = started.get(name);
        if (producer == null) {
            throw new IllegalArgumentException("no such producer: " + name);
        }
        return producer;
    }

    Object start(JSONObject request) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer(request.getString("group"));
        producer.setNamesrvAddr(registry);
        producer.setInstanceName(request.getString("producer"));
        producer.setSendMsgTimeout(SEND_MS); // the usual 3 s are little for a first send on a busy machine
        if (request.containsKey("hurry_ms")) {
            producer.setPollNameServerInterval(request.getIntValue("hurry_ms"));
            producer.setHeartbeatBrokerInterval(request.getIntValue("hurry_ms"));
        }
        if (request.containsKey("attempt_ms")) {
            producer.setSendMsgMaxTimeoutPerRequest(request.getIntValue("attempt_ms"));
        }
        producer.start();
        started.put(request.getString("producer"), producer);
        return null;
    }

    Object send(JSONObject request) throws Exception {
        return Messages.view(named(request.getString("producer")).send(Messages.read(request.getJSONObject("message"))));
    }

    /** Sends {@code count} numbers from {@code first} on in batches, which the client spreads over all queues of the topic. */
    Object sendNumbers(JSONObject request) throws Exception {
        DefaultMQProducer producer = named(request.getString("producer"));
        int first = request.getIntValue("first");
        int end = first + request.getIntValue("count");
        List<Message> batch = new ArrayList<>();
        for (int number = first; number < end; number++) {
            batch.add(new Message(request.getString("topic"), Integer.toString(number).getBytes()));
            if (batch.size() == BATCH || number == end - 1) {
                producer.send(batch);
                batch = new ArrayList<>();
            }
        }
        return null;
    }

    Object recall(JSONObject request) throws Exception {
        return named(request.getString("producer")).recallMessage(request.getString("topic"), request.getString("handle"));
    }

    /** Sends a message that was consumed to another topic, with all its properties. */
    void pass(String producer, MessageExt message, String topic) throws Exception {
        Message copy = new Message(topic, message.getBody());
        MessageAccessor.setProperties(copy, MessageAccessor.deepCopyProperties(message.getProperties()));
        named(producer).send(copy);
    }
}
