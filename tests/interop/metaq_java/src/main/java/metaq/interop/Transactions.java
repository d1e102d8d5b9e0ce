package metaq.interop;

import com.taobao.metamorphosis.Message;
import com.taobao.metamorphosis.client.MetaClientConfig;
import com.taobao.metamorphosis.client.MetaMessageSessionFactory;
import com.taobao.metamorphosis.client.RemotingClientWrapper;
import com.taobao.metamorphosis.client.producer.ProducerZooKeeper;
import com.taobao.metamorphosis.client.producer.RoundRobinPartitionSelector;
import com.taobao.metamorphosis.client.producer.SendResult;
import com.taobao.metamorphosis.client.producer.SimpleMessageProducer;
import com.taobao.metamorphosis.client.producer.SimpleXAMessageProducer;
import com.taobao.metamorphosis.client.producer.XAMessageProducer;
import com.taobao.metamorphosis.exception.MetaClientException;
import com.taobao.metamorphosis.utils.MetaZookeeper;
import com.taobao.metamorphosis.utils.ZkUtils;
import java.util.Arrays;
import java.util.HexFormat;
import java.util.LinkedHashMap;
import java.util.Map;
import javax.transaction.xa.XAException;
import javax.transaction.xa.XAResource;
import javax.transaction.xa.Xid;
import org.I0Itec.zkclient.InMemoryConnection;
import org.I0Itec.zkclient.ZkClient;

/**
 * The producers of local and of XA transactions.
 *
 * <p>In direct mode the client leaves the partition to the broker, which no broker takes in a transaction. So its own
 * producers get a ZooKeeper in memory, which names the one broker and the partitions of its topics.
 *
 * <p>A transaction belongs to the calling thread, so one thread makes all calls.
 */
final class Transactions {
    private static final String ROOT = "/meta";
    private static final String QUALIFIER = "metaq-driver";
    private static final int FORMAT_ID = 4_660;

    private final ZkClient nodes = new ZkClient(new InMemoryConnection(), 10_000, new ZkUtils.StringSerializer());
    private final MetaZookeeper layout = new MetaZookeeper(nodes, ROOT);
    private final SimpleMessageProducer local;
    private final XAMessageProducer distributed;
    private XAResource resource;

    /** @param config has no server URL */
    Transactions(MetaMessageSessionFactory factory, RemotingClientWrapper client, MetaClientConfig config, String serverUrl) {
        ProducerZooKeeper brokers = new ProducerZooKeeper(layout, client, nodes, config);
        nodes.createPersistent(layout.brokerIdsPath + "/0", true);
        nodes.createPersistent(layout.brokerIdsPath + "/0/master", serverUrl);
        local = new SimpleMessageProducer(factory, client, new RoundRobinPartitionSelector(), brokers, "local-session-1");
        distributed = new SimpleXAMessageProducer(
                factory, client, new RoundRobinPartitionSelector(), brokers, "xa-session-1");
        distributed.setUniqueQualifier(QUALIFIER);
    }

    void publish(String topic, int partitions) {
        String path = layout.brokerTopicsPubPath + "/" + topic;
        nodes.createPersistent(path, true);
        nodes.createPersistent(path + "/0-m", "{\"numParts\":" + partitions + ",\"broker\":\"0-m\"}");
        local.publish(topic);
        distributed.publish(topic);
    }

    // -- local ---------------------------------------------------------------------------------------------------

    void begin(int timeoutSeconds) throws MetaClientException {
        local.setTransactionTimeout(timeoutSeconds);
        local.beginTransaction();
    }

    SendResult put(Message message) throws MetaClientException, InterruptedException {
        return local.sendMessage(message);
    }

    void commit() throws MetaClientException {
        local.commit();
    }

    void rollback() throws MetaClientException {
        local.rollback();
    }

    // -- XA ------------------------------------------------------------------------------------------------------

    SendResult putInBranch(Message message) throws MetaClientException, InterruptedException {
        return distributed.sendMessage(message);
    }

    /** The resource of the current transaction, a new one after each outcome. */
    Object step(String step, int number) throws XAException, MetaClientException {
        Xid xid = new Branch(number);
        resource = distributed.getXAResource();
        return switch (step) {
            case "xa_timeout" -> resource.setTransactionTimeout(number);
            case "xa_is_same" -> resource.isSameRM(distributed.getXAResource());
            case "xa_prepare" -> resource.prepare(xid);
            case "xa_recover" -> Arrays.stream(recover()).map(Transactions::view).toList();
            default -> {
                change(step, xid);
                yield null;
            }
        };
    }

    private void change(String step, Xid xid) throws XAException {
        switch (step) {
            case "xa_start" -> resource.start(xid, XAResource.TMNOFLAGS);
            case "xa_end" -> resource.end(xid, XAResource.TMSUCCESS);
            case "xa_commit" -> resource.commit(xid, false);
            case "xa_commit_one_phase" -> resource.commit(xid, true);
            case "xa_rollback" -> resource.rollback(xid);
            case "xa_forget" -> resource.forget(xid);
            case "xa_commit_recovered" -> {
                for (Xid found : recover()) {
                    resource.commit(found, false);
                }
            }
            default -> throw new IllegalArgumentException("no such step: " + step);
        }
    }

    private Xid[] recover() throws XAException {
        return resource.recover(XAResource.TMSTARTRSCAN | XAResource.TMENDRSCAN);
    }

    private static Map<String, Object> view(Xid xid) {
        Map<String, Object> view = new LinkedHashMap<>();
        view.put("format_id", xid.getFormatId());
        view.put("gtrid", HexFormat.of().formatHex(xid.getGlobalTransactionId()));
        view.put("bqual", HexFormat.of().formatHex(xid.getBranchQualifier()));
        return view;
    }

    private record Branch(int number) implements Xid {
        @Override
        public int getFormatId() {
            return FORMAT_ID;
        }

        @Override
        public byte[] getGlobalTransactionId() {
            return new byte[] {0x0a, (byte) 0xff};
        }

        @Override
        public byte[] getBranchQualifier() {
            return new byte[] {(byte) number};
        }
    }
}
