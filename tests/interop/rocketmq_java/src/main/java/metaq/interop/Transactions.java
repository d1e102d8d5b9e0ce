package metaq.interop;

import com.alibaba.fastjson.JSONObject;
import java.nio.charset.StandardCharsets;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.TimeUnit;
import java.util.function.Consumer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.client.producer.TransactionSendResult;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/** The transaction producers of this process, by the names that requests give them. */
final class Transactions {
    private static final int SEND_MS = 30_000;
    private static final long DECISION_SECONDS = 300;

    private final String registry;
    private final Consumer<Map<String, Object>> events;
    private final Map<String, Desk> started = new ConcurrentHashMap<>();

    Transactions(String registry, Consumer<Map<String, Object>> events) {
        this.registry = registry;
        this.events = events;
    }

    /** A producer, and a listener that does as requests say; states are the names of {@link LocalTransactionState}. */
    private final class Desk implements TransactionListener {
        private final String name;
        private final TransactionMQProducer producer;
        private final Map<String, CompletableFuture<TransactionSendResult>> sends = new ConcurrentHashMap<>();
        private final Map<String, CompletableFuture<LocalTransactionState>> decisions = new ConcurrentHashMap<>();
        private volatile LocalTransactionState found = LocalTransactionState.UNKNOW;

        Desk(JSONObject request) throws Exception {
            name = request.getString("producer");
            producer = new TransactionMQProducer(request.getString("group"));
            producer.setNamesrvAddr(registry);
            producer.setSendMsgTimeout(SEND_MS);
            producer.setTransactionListener(this);
            producer.start();
        }

        @Override
        public LocalTransactionState executeLocalTransaction(Message message, Object argument) {
            report("executing", message);
            try {
                return decisions.get((String) argument).get(DECISION_SECONDS, TimeUnit.SECONDS);
            } catch (Exception failure) {
                throw new IllegalStateException(failure);
            }
        }

        @Override
        public LocalTransactionState checkLocalTransaction(MessageExt message) {
            report("checked", message);
            return found;
        }

        private void report(String event, Message message) {
            Map<String, Object> view = new LinkedHashMap<>();
            view.put("event", event);
            view.put("producer", name);
            view.put("text", new String(message.getBody(), StandardCharsets.UTF_8));
            view.put("topic", message.getTopic());
            view.put("transaction", message.getTransactionId());
            view.put("properties", message.getProperties());
            events.accept(view);
        }
    }

    private Desk named(JSONObject request) {
        return started.get(request.getString("producer"));
    }

    Object start(JSONObject request) throws Exception {
        started.put(request.getString("producer"), new Desk(request));
        return null;
    }

    /** Stores a half message and begins its local transaction, which goes on until {@link #decide}. */
    Object begin(JSONObject request) {
        Desk desk = named(request);
        String key = request.getString("key");
        Message message = Messages.read(request.getJSONObject("message"));
        CompletableFuture<TransactionSendResult> result = new CompletableFuture<>();
        desk.sends.put(key, result);
        desk.decisions.put(key, new CompletableFuture<>());
        Thread thread = new Thread(() -> {
            try {
                result.complete(desk.producer.sendMessageInTransaction(message, key));
            } catch (Exception failure) {
                result.completeExceptionally(failure);
            }
        }, "transaction");
        thread.setDaemon(true);
        thread.start();
        return null;
    }

    /** Ends the local transaction, and returns what the producer makes of it. */
    Object decide(JSONObject request) throws Exception {
        Desk desk = named(request);
        String key = request.getString("key");
        desk.decisions.get(key).complete(LocalTransactionState.valueOf(request.getString("state")));
        TransactionSendResult result = desk.sends.get(key).get(DECISION_SECONDS, TimeUnit.SECONDS);
        Map<String, Object> view = Messages.view(result);
        view.put("state", result.getLocalTransactionState().name());
        view.put("transaction", result.getTransactionId());
        return view;
    }

    /** What checks find from now on. */
    Object find(JSONObject request) {
        named(request).found = LocalTransactionState.valueOf(request.getString("state"));
        return null;
    }

    void close() {
        started.values().forEach(desk -> desk.producer.shutdown());
    }
}
