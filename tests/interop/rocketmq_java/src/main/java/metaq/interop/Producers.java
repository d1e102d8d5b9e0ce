package metaq.interop;

import com.alibaba.fastjson.JSONObject;
import java.nio.charset.StandardCharsets;
import java.util.Base64;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.TimeUnit;
import java.util.function.Consumer;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.MessageQueueSelector;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.client.producer.selector.SelectMessageQueueByHash;
import org.apache.rocketmq.common.message.Message;

/** The producers of this process, by the names that requests give them. */
final class Producers {
    private static final int SEND_MS = 30_000;
    private static final long CALLBACK_SECONDS = 60;
    private static final long PAUSE_AFTER_FAILURE_MS = 100;
    private static final MessageQueueSelector BY_KEY = new SelectMessageQueueByHash();

    private final String registry;
    private final Consumer<Map<String, Object>> events;
    private final Map<String, DefaultMQProducer> started = new ConcurrentHashMap<>();

    Producers(String registry, Consumer<Map<String, Object>> events) {
        this.registry = registry;
        this.events = events;
    }

    DefaultMQProducer named(String name) {
        DefaultMQProducer producer = started.get(name);
        if (producer == null) {
            throw new IllegalArgumentException("no such producer: " + name);
        }
        return producer;
    }

    Object start(JSONObject request) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer(
                request.getString("group"), Users.hook(request), request.getBooleanValue("traced"), null);
        producer.setNamesrvAddr(registry);
        producer.setSendMsgTimeout(SEND_MS); // the usual 3 s are little for a first send on a busy machine
        if (request.containsKey("hurry_ms")) {
            producer.setPollNameServerInterval(request.getIntValue("hurry_ms"));
            producer.setHeartbeatBrokerInterval(request.getIntValue("hurry_ms"));
        }
        producer.start();
        started.put(request.getString("producer"), producer);
        return null;
    }

    Object send(JSONObject request) throws Exception {
        DefaultMQProducer producer = named(request.getString("producer"));
        JSONObject view = request.getJSONObject("message");
        Message message = Messages.read(view);
        String key = view.getString("ordering_key");
        return switch (request.getString("way")) {
            case "sync" -> Messages.view(key == null ? producer.send(message) : producer.send(message, BY_KEY, key));
            case "async" -> Messages.view(sendAsync(producer, message));
            case "oneway" -> {
                producer.sendOneway(message);
                yield null;
            }
            default -> throw new IllegalArgumentException("no such way: " + request);
        };
    }

    private static SendResult sendAsync(DefaultMQProducer producer, Message message) throws Exception {
        CompletableFuture<SendResult> result = new CompletableFuture<>();
        producer.send(message, new SendCallback() {
            @Override
            public void onSuccess(SendResult sent) {
                result.complete(sent);
            }

            @Override
            public void onException(Throwable failure) {
                result.completeExceptionally(failure);
            }
        });
        return result.get(CALLBACK_SECONDS, TimeUnit.SECONDS);
    }

    Object sendBatch(JSONObject request) throws Exception {
        List<Message> messages = Messages.readAll(request.getJSONArray("messages"));
        return Messages.view(named(request.getString("producer")).send(messages));
    }

    /** Sends the numbers below {@code count} in the background; each again until it is acknowledged. */
    Object stream(JSONObject request) {
        DefaultMQProducer producer = named(request.getString("producer"));
        String topic = request.getString("topic");
        int count = request.getIntValue("count");
        int pauseMs = request.getIntValue("pause_ms");
        Thread thread = new Thread(() -> {
            try {
                for (int number = 0; number < count; number++) {
                    sendUntilAcknowledged(producer, topic, Integer.toString(number));
                    Thread.sleep(pauseMs);
                }
            } catch (InterruptedException interrupted) {
                Thread.currentThread().interrupt();
            }
        }, "stream");
        thread.setDaemon(true);
        thread.start();
        return null;
    }

    private void sendUntilAcknowledged(DefaultMQProducer producer, String topic, String text) throws InterruptedException {
        byte[] body = text.getBytes(StandardCharsets.UTF_8);
        boolean acknowledged = false;
        while (!acknowledged) {
            Map<String, Object> event = new HashMap<>(Map.of("topic", topic, "text", text));
            try {
                acknowledged = producer.send(new Message(topic, body)).getSendStatus() == SendStatus.SEND_OK;
                event.put("event", acknowledged ? "acknowledged" : "refused");
            } catch (InterruptedException interrupted) {
                throw interrupted;
            } catch (Exception failure) {
                event.put("event", "refused");
                event.put("raised", Driver.chain(failure));
                Thread.sleep(PAUSE_AFTER_FAILURE_MS);
            }
            events.accept(event);
        }
    }

    Object request(JSONObject request) throws Exception {
        Message message = Messages.read(request.getJSONObject("message"));
        DefaultMQProducer producer = named(request.getString("producer"));
        Message reply = producer.request(message, request.getLongValue("seconds") * 1_000);
        return Base64.getEncoder().encodeToString(reply.getBody());
    }

    void close() {
        started.values().forEach(DefaultMQProducer::shutdown);
    }
}
