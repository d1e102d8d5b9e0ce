package metaq.interop;

import com.taobao.metamorphosis.Message;
import com.taobao.metamorphosis.client.MessageSessionFactory;
import com.taobao.metamorphosis.client.MetaClientConfig;
import com.taobao.metamorphosis.client.MetaMessageSessionFactory;
import com.taobao.metamorphosis.client.consumer.ConsumerConfig;
import com.taobao.metamorphosis.client.consumer.MessageConsumer;
import com.taobao.metamorphosis.client.consumer.MessageListener;
import com.taobao.metamorphosis.client.producer.MessageProducer;
import com.taobao.metamorphosis.client.producer.SendResult;
import com.taobao.metamorphosis.exception.MetaClientException;
import com.taobao.metamorphosis.utils.ZkUtils.ZKConfig;
import java.util.ArrayList;
import java.util.Base64;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.Executor;
import java.util.concurrent.LinkedBlockingQueue;

/**
 * Runs the MetaQ client as its users do, through ZooKeeper: {@code ClusterDriver HOSTS SESSION_MS LIFETIME_SECONDS}.
 *
 * <p>It answers {@link Requests}, and ends with its input.
 */
public final class ClusterDriver {
    private static final int SYNC_MS = 500;
    private static final int MAX_SIZE = 100_000;

    private final MessageSessionFactory factory;
    private final MessageProducer producer;
    private final BlockingQueue<Message> received = new LinkedBlockingQueue<>();

    private ClusterDriver(String hosts, int sessionMs) throws MetaClientException {
        MetaClientConfig config = new MetaClientConfig();
        config.setZkConfig(new ZKConfig(hosts, sessionMs, sessionMs, SYNC_MS));
        factory = new MetaMessageSessionFactory(config);
        producer = factory.createProducer();
    }

    public static void main(String[] arguments) throws Exception {
        Requests.endAfter(Integer.parseInt(arguments[2]));
        ClusterDriver driver = new ClusterDriver(arguments[0], Integer.parseInt(arguments[1]));
        Requests.serve(driver::run);
        driver.factory.shutdown();
        // An ordinary exit would wait for the client's threads.
        Runtime.getRuntime().halt(0);
    }

    private Object run(Map<?, ?> request) throws Exception {
        String step = Requests.text(request, "step");
        return switch (step) {
            case "put" -> put(Requests.message(request));
            case "subscribe" -> subscribe(Requests.text(request, "topic"), Requests.text(request, "group"));
            case "drain" -> drain();
            default -> throw new IllegalArgumentException("no such step: " + step);
        };
    }

    private Map<String, Object> put(Message message) throws Exception {
        producer.publish(message.getTopic());
        SendResult sent = producer.sendMessage(message);
        Map<String, Object> view = new HashMap<>();
        view.put("success", sent.isSuccess());
        view.put("broker", sent.getPartition() == null ? null : sent.getPartition().getBrokerId());
        view.put("partition", sent.getPartition() == null ? null : sent.getPartition().getPartition());
        view.put("error", sent.getErrorMessage());
        return view;
    }

    private Object subscribe(String topic, String group) throws MetaClientException {
        ConsumerConfig config = new ConsumerConfig(group);
        config.setMaxDelayFetchTimeInMills(100);
        config.setCommitOffsetPeriodInMills(500);
        MessageConsumer consumer = factory.createConsumer(config);
        consumer.subscribe(topic, MAX_SIZE, new MessageListener() {
            @Override
            public void recieveMessages(Message message) {
                received.add(message);
            }

            @Override
            public Executor getExecutor() {
                return null;
            }
        });
        consumer.completeSubscribe();
        return null;
    }

    /** @return the payloads that have come since it was asked last */
    private List<String> drain() {
        List<Message> messages = new ArrayList<>();
        received.drainTo(messages);
        return messages.stream().map(message -> Base64.getEncoder().encodeToString(message.getData())).toList();
    }
}
