package metaq.interop;

import com.alibaba.fastjson.JSONObject;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.ClientConfig;
import org.apache.rocketmq.client.consumer.AckCallback;
import org.apache.rocketmq.client.consumer.AckResult;
import org.apache.rocketmq.client.consumer.PopCallback;
import org.apache.rocketmq.client.consumer.PopResult;
import org.apache.rocketmq.client.impl.MQClientAPIImpl;
import org.apache.rocketmq.client.impl.MQClientManager;
import org.apache.rocketmq.client.impl.factory.MQClientInstance;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.remoting.protocol.header.AckMessageRequestHeader;
import org.apache.rocketmq.remoting.protocol.header.ChangeInvisibleTimeRequestHeader;
import org.apache.rocketmq.remoting.protocol.header.ExtraInfoUtil;
import org.apache.rocketmq.remoting.protocol.header.PopMessageRequestHeader;

/** Single pops, acks and changes with the client's own calls, which the push consumer and the proxy are made of. */
final class Pops {
    private static final long CALL_MS = 25_000;

    private final String registry;
    private MQClientInstance started;

    Pops(String registry) {
        this.registry = registry;
    }

    private MQClientAPIImpl api() throws Exception {
        if (started == null) {
            ClientConfig config = new ClientConfig();
            config.setNamesrvAddr(registry);
            config.setInstanceName("pops");
            started = MQClientManager.getInstance().getOrCreateMQClientInstance(config);
            started.start();
        }
        return started.getMQClientAPIImpl();
    }

    Object pop(JSONObject request) throws Exception {
        PopMessageRequestHeader header = new PopMessageRequestHeader();
        header.setConsumerGroup(request.getString("group"));
        header.setTopic(request.getString("topic"));
        header.setQueueId(request.containsKey("queue") ? request.getIntValue("queue") : -1);
        header.setMaxMsgNums(request.getIntValue("most"));
        header.setInvisibleTime(request.getLongValue("invisible_ms"));
        header.setPollTime(request.getLongValue("poll_ms"));
        header.setBornTime(System.currentTimeMillis());
        header.setInitMode(request.getIntValue("init_mode"));
        header.setOrder(request.getBooleanValue("order"));
        header.setExpType("TAG");
        header.setExp(request.getOrDefault("expression", "*").toString());
        header.setBrokerName(request.getString("broker_name"));
        CompletableFuture<PopResult> result = new CompletableFuture<>();
        api().popMessageAsync(request.getString("broker_name"), request.getString("broker"), header, CALL_MS, new PopCallback() {
            @Override
            public void onSuccess(PopResult found) {
                result.complete(found);
            }

            @Override
            public void onException(Throwable failure) {
                result.completeExceptionally(failure);
            }
        });
        PopResult found = result.get(CALL_MS, TimeUnit.MILLISECONDS);
        Map<String, Object> view = new LinkedHashMap<>();
        view.put("status", found.getPopStatus().name());
        List<MessageExt> messages = found.getMsgFoundList() == null ? List.of() : found.getMsgFoundList();
        view.put("messages", messages.stream().map(Messages::view).toList());
        view.put("rest", found.getRestNum());
        return view;
    }

    Object ack(JSONObject request) throws Exception {
        String receipt = request.getString("receipt");
        String[] words = ExtraInfoUtil.split(receipt);
        AckMessageRequestHeader header = new AckMessageRequestHeader();
        header.setConsumerGroup(request.getString("group"));
        header.setTopic(request.getString("topic"));
        header.setQueueId(ExtraInfoUtil.getQueueId(words));
        header.setOffset(ExtraInfoUtil.getQueueOffset(words));
        header.setExtraInfo(receipt);
        Result result = new Result();
        api().ackMessageAsync(request.getString("broker"), CALL_MS, result, header);
        return result.view();
    }

    Object ackMany(JSONObject request) throws Exception {
        Result result = new Result();
        api().batchAckMessageAsync(request.getString("broker"), CALL_MS, result, request.getString("topic"),
                request.getString("group"), request.getJSONArray("receipts").toJavaList(String.class));
        return result.view();
    }

    Object change(JSONObject request) throws Exception {
        String receipt = request.getString("receipt");
        String[] words = ExtraInfoUtil.split(receipt);
        ChangeInvisibleTimeRequestHeader header = new ChangeInvisibleTimeRequestHeader();
        header.setConsumerGroup(request.getString("group"));
        header.setTopic(request.getString("topic"));
        header.setQueueId(ExtraInfoUtil.getQueueId(words));
        header.setOffset(ExtraInfoUtil.getQueueOffset(words));
        header.setExtraInfo(receipt);
        header.setInvisibleTime(request.getLongValue("invisible_ms"));
        Result result = new Result();
        api().changeInvisibleTimeAsync(ExtraInfoUtil.getBrokerName(words), request.getString("broker"), header, CALL_MS, result);
        return result.view();
    }

    /** What the client makes of the answer to an ack or a change. */
    private static final class Result implements AckCallback {
        private final CompletableFuture<AckResult> future = new CompletableFuture<>();

        @Override
        public void onSuccess(AckResult result) {
            future.complete(result);
        }

        @Override
        public void onException(Throwable failure) {
            future.completeExceptionally(failure);
        }

        Map<String, Object> view() throws Exception {
            AckResult result = future.get(CALL_MS, TimeUnit.MILLISECONDS);
            Map<String, Object> view = new LinkedHashMap<>();
            view.put("status", result.getStatus().name());
            view.put("receipt", result.getExtraInfo());
            return view;
        }
    }
}
