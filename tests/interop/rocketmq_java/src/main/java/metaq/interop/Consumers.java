package metaq.interop;

import com.alibaba.fastjson.JSONObject;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.function.Consumer;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.PullStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyContext;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.utils.MessageUtil;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.common.protocol.heartbeat.MessageModel;

/** The consumers of this process, by the names that requests give them. */
final class Consumers {
    private static final int PULL_MESSAGES = 32;
    private static final long POLL_MS = 500;

    private final String registry;
    private final Producers producers;
    private final Consumer<Map<String, Object>> events;
    private final Map<String, DefaultMQPushConsumer> started = new ConcurrentHashMap<>();

    Consumers(String registry, Producers producers, Consumer<Map<String, Object>> events) {
        this.registry = registry;
        this.producers = producers;
        this.events = events;
    }

    Object start(JSONObject request) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(
                request.getString("group"),
                Users.hook(request),
                new AllocateMessageQueueAveragely(),
                request.getBooleanValue("traced"),
                null);
        consumer.setNamesrvAddr(registry);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setConsumeMessageBatchMaxSize(1);
        if (request.getBooleanValue("broadcast")) {
            consumer.setMessageModel(MessageModel.BROADCASTING);
            // A second broadcast consumer of the group in this process would otherwise pass for the first.
            consumer.setInstanceName(request.getString("consumer"));
        }
        if (request.containsKey("max_reconsume_times")) {
            consumer.setMaxReconsumeTimes(request.getIntValue("max_reconsume_times"));
        }
        if (request.containsKey("hurry_ms")) {
            consumer.setPollNameServerInterval(request.getIntValue("hurry_ms"));
            consumer.setHeartbeatBrokerInterval(request.getIntValue("hurry_ms"));
        }
        consumer.subscribe(request.getString("topic"), selector(request));
        // Two lambdas and not one class with both faces: the client takes whatever can be orderly for orderly.
        Listener listener = new Listener(request);
        if (request.getBooleanValue("orderly")) {
            consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> listener.takeOrderly(messages));
        } else {
            consumer.registerMessageListener((MessageListenerConcurrently) listener::take);
        }
        consumer.start();
        started.put(request.getString("consumer"), consumer);
        return null;
    }

    private static MessageSelector selector(JSONObject request) {
        String expression = request.getString("expression");
        return request.getBooleanValue("sql") ? MessageSelector.bySql(expression) : MessageSelector.byTag(expression);
    }

    Object stop(JSONObject request) {
        started.remove(request.getString("consumer")).shutdown();
        return null;
    }

    /** Reports each message; fails all of them, or replies to them, when the request says so. */
    private final class Listener {
        private final String name;
        private final boolean failing;
        private final DefaultMQProducer replier;

        Listener(JSONObject request) {
            name = request.getString("consumer");
            failing = request.getBooleanValue("failing");
            replier = request.containsKey("replier") ? producers.named(request.getString("replier")) : null;
        }

        ConsumeConcurrentlyStatus take(List<MessageExt> messages, ConsumeConcurrentlyContext context) {
            messages.forEach(this::take);
            context.setDelayLevelWhenNextConsume(1);
            return failing ? ConsumeConcurrentlyStatus.RECONSUME_LATER : ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        }

        ConsumeOrderlyStatus takeOrderly(List<MessageExt> messages) {
            messages.forEach(this::take);
            return ConsumeOrderlyStatus.SUCCESS;
        }

        private void take(MessageExt message) {
            Map<String, Object> event = Messages.view(message);
            event.put("event", "message");
            event.put("consumer", name);
            event.put("at", System.currentTimeMillis());
            events.accept(event);
            if (replier != null) {
                reply(message);
            }
        }

        private void reply(MessageExt message) {
            try {
                replier.send(MessageUtil.createReplyMessage(message, message.getBody()));
            } catch (Exception failure) {
                events.accept(Map.of("event", "reply_failed", "raised", Driver.chain(failure)));
            }
        }
    }

    /** Everything of a topic that the expression lets through, with the plain pull consumer, queue by queue. */
    Object pull(JSONObject request) throws Exception {
        DefaultMQPullConsumer consumer = new DefaultMQPullConsumer(request.getString("group"));
        consumer.setNamesrvAddr(registry);
        consumer.start();
        try {
            List<Map<String, Object>> messages = new ArrayList<>();
            for (MessageQueue queue : consumer.fetchSubscribeMessageQueues(request.getString("topic"))) {
                long offset = 0;
                PullResult result;
                do {
                    result = consumer.pull(queue, selector(request), offset, PULL_MESSAGES);
                    offset = result.getNextBeginOffset();
                    if (result.getPullStatus() == PullStatus.FOUND) {
                        result.getMsgFoundList().forEach(message -> messages.add(Messages.view(message)));
                    }
                } while (offset < result.getMaxOffset());
                consumer.updateConsumeOffset(queue, offset);
            }
            return messages;
        } finally {
            consumer.shutdown();
        }
    }

    /** The next {@code count} messages of a group, with the lite pull consumer, or fewer after {@code seconds}. */
    Object poll(JSONObject request) throws Exception {
        DefaultLitePullConsumer consumer = new DefaultLitePullConsumer(request.getString("group"));
        consumer.setNamesrvAddr(registry);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setAutoCommit(false);
        consumer.subscribe(request.getString("topic"), selector(request));
        consumer.start();
        try {
            List<Map<String, Object>> messages = new ArrayList<>();
            long end = System.nanoTime() + request.getLongValue("seconds") * 1_000_000_000L;
            while (messages.size() < request.getIntValue("count") && System.nanoTime() < end) {
                consumer.poll(POLL_MS).forEach(message -> messages.add(Messages.view(message)));
                consumer.commitSync();
            }
            return messages;
        } finally {
            consumer.shutdown();
        }
    }

    void close() {
        started.values().forEach(DefaultMQPushConsumer::shutdown);
    }
}
