package metaq.interop;

import com.alibaba.fastjson.JSONObject;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.function.Consumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyContext;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageExt;

/** The push consumers of this process, which the broker assigns queues to, by the names that requests give them. */
final class Consumers {
    private final String registry;
    private final Producers producers;
    private final Consumer<Map<String, Object>> events;
    private final Map<String, DefaultMQPushConsumer> started = new ConcurrentHashMap<>();
    private final Map<String, Listener> listeners = new ConcurrentHashMap<>();

    Consumers(String registry, Producers producers, Consumer<Map<String, Object>> events) {
        this.registry = registry;
        this.producers = producers;
        this.events = events;
    }

    /**
     * The arguments: {@code consumer}, {@code group}, {@code topic}, {@code expression}; and if wanted {@code sql}, {@code hurry_ms} (how
     * often it asks the registry and greets brokers), {@code invisible_ms}, {@code batch} (messages of one pop), {@code threads}, and
     * those of the listener.
     */
    Object start(JSONObject request) throws Exception {
        String name = request.getString("consumer");
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(request.getString("group"));
        consumer.setNamesrvAddr(registry);
        consumer.setInstanceName(name);
        consumer.setClientRebalance(false);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        if (request.containsKey("hurry_ms")) {
            consumer.setPollNameServerInterval(request.getIntValue("hurry_ms"));
            consumer.setHeartbeatBrokerInterval(request.getIntValue("hurry_ms"));
        }
        if (request.containsKey("invisible_ms")) {
            consumer.setPopInvisibleTime(request.getLongValue("invisible_ms"));
        }
        if (request.containsKey("batch")) {
            consumer.setPopBatchNums(request.getIntValue("batch"));
        }
        if (request.containsKey("threads")) {
            consumer.setConsumeThreadMin(request.getIntValue("threads"));
            consumer.setConsumeThreadMax(request.getIntValue("threads"));
        }
        String expression = request.getString("expression");
        consumer.subscribe(request.getString("topic"),
                request.getBooleanValue("sql") ? MessageSelector.bySql(expression) : MessageSelector.byTag(expression));
        Listener listener = new Listener(request);
        consumer.registerMessageListener(listener);
        consumer.start();
        listeners.put(name, listener);
        started.put(name, consumer);
        return null;
    }

    Object stop(JSONObject request) {
        started.remove(request.getString("consumer")).shutdown();
        return null;
    }

    /** The bodies that a counting consumer has been given since the last call. */
    Object tally(JSONObject request) {
        return listeners.get(request.getString("consumer")).drain();
    }

    /**
     * Reports each message, and counts it only with {@code counting}. Then it sleeps {@code sleep_ms}, passes the message on as
     * {@code producer} to the topic {@code pass_to}, and fails: {@code fail} is {@code later}, {@code null} or {@code exception}; with
     * {@code level} the client asks for the delay at that place of its table.
     */
    private final class Listener implements MessageListenerConcurrently {
        private final JSONObject wishes;
        private final boolean counting;
        private final ConcurrentLinkedQueue<String> counted = new ConcurrentLinkedQueue<>();

        Listener(JSONObject request) {
            wishes = request;
            counting = request.getBooleanValue("counting");
        }

        List<String> drain() {
            List<String> bodies = new ArrayList<>();
            for (String body = counted.poll(); body != null; body = counted.poll()) {
                bodies.add(body);
            }
            return bodies;
        }

        @Override
        public ConsumeConcurrentlyStatus consumeMessage(List<MessageExt> messages, ConsumeConcurrentlyContext context) {
            for (MessageExt message : messages) {
                if (counting) {
                    counted.add(new String(message.getBody()));
                } else {
                    report(message);
                }
                act(message);
            }
            if (wishes.containsKey("level")) {
                context.setDelayLevelWhenNextConsume(wishes.getIntValue("level"));
            }
            String failure = wishes.getString("fail");
            if ("exception".equals(failure)) {
                throw new IllegalStateException("the listener fails");
            }
            return failure == null ? ConsumeConcurrentlyStatus.CONSUME_SUCCESS
                    : failure.equals("later") ? ConsumeConcurrentlyStatus.RECONSUME_LATER : null;
        }

        private void report(MessageExt message) {
            Map<String, Object> event = Messages.view(message);
            event.put("event", "message");
            event.put("consumer", wishes.getString("consumer"));
            event.put("at", System.currentTimeMillis());
            events.accept(event);
        }

        private void act(MessageExt message) {
            try {
                Thread.sleep(wishes.getLongValue("sleep_ms"));
                if (wishes.containsKey("pass_to")) {
                    producers.pass(wishes.getString("producer"), message, wishes.getString("pass_to"));
                }
            } catch (Exception failure) {
                throw new IllegalStateException(failure);
            }
        }
    }
}
