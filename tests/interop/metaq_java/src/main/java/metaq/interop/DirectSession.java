package metaq.interop;

import com.taobao.metamorphosis.Message;
import com.taobao.metamorphosis.client.MetaClientConfig;
import com.taobao.metamorphosis.client.RemotingClientWrapper;
import com.taobao.metamorphosis.client.XAMetaMessageSessionFactory;
import com.taobao.metamorphosis.client.consumer.ConsumerConfig;
import com.taobao.metamorphosis.client.consumer.ConsumerZooKeeper;
import com.taobao.metamorphosis.client.consumer.FetchRequest;
import com.taobao.metamorphosis.client.consumer.InnerConsumer;
import com.taobao.metamorphosis.client.consumer.MessageConsumer;
import com.taobao.metamorphosis.client.consumer.MessageListener;
import com.taobao.metamorphosis.client.consumer.TopicPartitionRegInfo;
import com.taobao.metamorphosis.client.consumer.storage.LocalOffsetStorage;
import com.taobao.metamorphosis.client.producer.MessageProducer;
import com.taobao.metamorphosis.client.producer.SendMessageCallback;
import com.taobao.metamorphosis.client.producer.SendResult;
import com.taobao.metamorphosis.cluster.Broker;
import com.taobao.metamorphosis.cluster.Partition;
import com.taobao.metamorphosis.consumer.MessageIterator;
import com.taobao.metamorphosis.exception.InvalidMessageException;
import com.taobao.metamorphosis.exception.MetaClientException;
import com.taobao.metamorphosis.utils.MetaZookeeper;
import com.taobao.metamorphosis.utils.ZkUtils.ZKConfig;
import java.io.IOException;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Executor;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import org.I0Itec.zkclient.ZkClient;

/**
 * One session factory in direct mode ({@code serverUrl} set, no ZooKeeper), its producer, and a consumer per group.
 */
final class DirectSession {
    private static final long WAIT_SECONDS = 20;

    private final String serverUrl;
    private final Path home;
    private final Factory factory;
    private final MessageProducer producer;
    private final Map<String, MessageConsumer> consumers = new HashMap<>();
    private final Map<String, BlockingQueue<Message>> received = new HashMap<>();
    private Transactions transactions;

    /** @param home folder for what the client keeps locally */
    DirectSession(String serverUrl, Path home) throws MetaClientException {
        this.serverUrl = serverUrl;
        this.home = home;
        MetaClientConfig config = new MetaClientConfig();
        config.setServerUrl(serverUrl);
        factory = new Factory(config);
        producer = factory.createProducer();
    }

    /**
     * In release 1.4.6.2 {@code completeSubscribe} asks a ZooKeeper layout for path names even in direct mode, and
     * without one it fails unnoticed and never fetches. The factory's own hook lets us hand it the path names alone.
     */
    private static final class Factory extends XAMetaMessageSessionFactory {
        Factory(MetaClientConfig config) throws MetaClientException {
            super(config);
        }

        @Override
        protected ConsumerZooKeeper initConsumerZooKeeper(
                RemotingClientWrapper client, ZkClient zk, ZKConfig config) {
            return new ConsumerZooKeeper(new MetaZookeeper(null, "/meta"), client, zk, config);
        }

        RemotingClientWrapper client() {
            return remotingClient;
        }
    }

    /** A whole reply to a get; {@code bytes} is what its messages took of the partition. */
    record Fetched(List<Message> messages, int bytes) {}

    SendResult put(Message message) throws MetaClientException, InterruptedException {
        producer.publish(message.getTopic());
        return producer.sendMessage(message);
    }

    /** Sends all with a callback each before any answer is awaited; the results are in the order of the messages. */
    List<SendResult> putPipelined(List<Message> messages) throws Exception {
        List<CompletableFuture<SendResult>> pending = new ArrayList<>();
        for (Message message : messages) {
            producer.publish(message.getTopic());
            CompletableFuture<SendResult> result = new CompletableFuture<>();
            producer.sendMessage(message, new SendMessageCallback() {
                @Override
                public void onMessageSent(SendResult sent) {
                    result.complete(sent);
                }

                @Override
                public void onException(Throwable failure) {
                    result.completeExceptionally(failure);
                }
            });
            pending.add(result);
        }
        List<SendResult> results = new ArrayList<>();
        for (CompletableFuture<SendResult> result : pending) {
            results.add(result.get(WAIT_SECONDS, TimeUnit.SECONDS));
        }
        return results;
    }

    /** @return null where the client says that there is nothing at this offset */
    Fetched get(String topic, String group, int partition, long offset, int maxSize)
            throws MetaClientException, InterruptedException, IOException, InvalidMessageException {
        MessageIterator iterator = consumer(group).get(topic, new Partition(0, partition), offset, maxSize);
        if (iterator == null) {
            return null;
        }
        List<Message> messages = new ArrayList<>();
        while (iterator.hasNext()) {
            messages.add(iterator.next());
        }
        return new Fetched(messages, iterator.getOffset());
    }

    long offset(String topic, String group, int partition, long offset) throws MetaClientException, IOException {
        TopicPartitionRegInfo place = new TopicPartitionRegInfo(topic, new Partition(0, partition), offset);
        return ((InnerConsumer) consumer(group)).offset(new FetchRequest(new Broker(0, serverUrl), 0, place, 1));
    }

    /** Starts fetching partition 0 from an offset; {@link #take} hands out what the listener was given. */
    void subscribe(String topic, String group, long offset, int maxSize) throws MetaClientException, IOException {
        BlockingQueue<Message> queue = new LinkedBlockingQueue<>();
        received.put(topic, queue);
        MessageConsumer consumer = consumer(group);
        ConsumerConfig config = consumer.getConsumerConfig();
        config.setPartition("0-0");
        config.setOffset(offset);
        consumer.subscribe(topic, maxSize, new MessageListener() {
            @Override
            public void recieveMessages(Message message) {
                queue.add(message);
            }

            @Override
            public Executor getExecutor() {
                return null;
            }
        });
        consumer.completeSubscribe();
    }

    /** @return the next message the listener of this topic was given, null when none came in time */
    Message take(String topic) throws InterruptedException {
        return received.get(topic).poll(WAIT_SECONDS, TimeUnit.SECONDS);
    }

    Map<String, String> stats(String item) throws InterruptedException {
        Map<String, String> values = new HashMap<>();
        factory.getStats(item).values().forEach(result -> values.putAll(result.getAllValues()));
        return values;
    }

    /** Returns once the client counts the broker as connected, which after a reconnect is a little later than TCP. */
    void awaitConnected() throws InterruptedException, TimeoutException {
        long deadline = System.nanoTime() + TimeUnit.SECONDS.toNanos(WAIT_SECONDS);
        while (!factory.getRemotingClient().isConnected(serverUrl)) {
            if (System.nanoTime() > deadline) {
                throw new TimeoutException("not connected to " + serverUrl + " within " + WAIT_SECONDS + " s");
            }
            Thread.sleep(10);
        }
    }

    /** The producers of transactions, made when they are first asked for. */
    Transactions transactions() {
        if (transactions == null) {
            transactions = new Transactions(factory, factory.client(), new MetaClientConfig(), serverUrl);
        }
        return transactions;
    }

    /**
     * Closes the connection. The factory's own shutdown takes topics back from ZooKeeper, so it fails in direct mode.
     */
    void close() throws Exception {
        factory.getRemotingClient().stop();
    }

    private MessageConsumer consumer(String group) throws IOException {
        MessageConsumer consumer = consumers.get(group);
        if (consumer == null) {
            ConsumerConfig config = new ConsumerConfig(group);
            config.setMaxDelayFetchTimeInMills(100);
            String offsets = home.resolve(group + ".offsets").toString();
            consumer = factory.createConsumer(config, new LocalOffsetStorage(offsets));
            consumers.put(group, consumer);
        }
        return consumer;
    }
}
