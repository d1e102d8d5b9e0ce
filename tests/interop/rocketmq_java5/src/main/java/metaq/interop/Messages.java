package metaq.interop;

import com.alibaba.fastjson.JSONObject;
import java.util.Base64;
import java.util.LinkedHashMap;
import java.util.Map;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageAccessor;
import org.apache.rocketmq.common.message.MessageClientExt;
import org.apache.rocketmq.common.message.MessageExt;

/** Messages from and to JSON. */
final class Messages {
    private Messages() {
    }

    static Message read(JSONObject view) {
        Message message = new Message(view.getString("topic"), Base64.getDecoder().decode(view.getString("body")));
        if (view.containsKey("tag")) {
            message.setTags(view.getString("tag"));
        }
        if (view.containsKey("properties")) {
            // Also names that programs may not use: what else can come is for the broker to judge.
            view.getJSONObject("properties").forEach(
                    (name, value) -> MessageAccessor.putProperty(message, name, (String) value));
        }
        if (view.containsKey("delay_ms")) {
            message.setDelayTimeMs(view.getLongValue("delay_ms"));
        }
        if (view.containsKey("delay_s")) {
            message.setDelayTimeSec(view.getLongValue("delay_s"));
        }
        if (view.containsKey("deliver_ms")) {
            message.setDeliverTimeMs(view.getLongValue("deliver_ms"));
        }
        if (view.containsKey("priority")) {
            message.setPriority(view.getIntValue("priority"));
        }
        return message;
    }

    static Map<String, Object> view(SendResult sent) {
        Map<String, Object> view = new LinkedHashMap<>();
        view.put("status", sent.getSendStatus().name());
        view.put("id", sent.getMsgId());
        view.put("offset_id", sent.getOffsetMsgId());
        view.put("queue", sent.getMessageQueue().getQueueId());
        view.put("offset", sent.getQueueOffset());
        view.put("recall_handle", sent.getRecallHandle());
        return view;
    }

    static Map<String, Object> view(MessageExt message) {
        Map<String, Object> view = new LinkedHashMap<>();
        view.put("topic", message.getTopic());
        view.put("body", Base64.getEncoder().encodeToString(message.getBody()));
        view.put("id", message.getMsgId());
        view.put("offset_id", message instanceof MessageClientExt client ? client.getOffsetMsgId() : message.getMsgId());
        view.put("tag", message.getTags());
        view.put("properties", message.getProperties());
        view.put("queue", message.getQueueId());
        view.put("offset", message.getQueueOffset());
        view.put("reconsumed", message.getReconsumeTimes());
        view.put("born", message.getBornTimestamp());
        view.put("stored", message.getStoreTimestamp());
        view.put("size", message.getStoreSize());
        return view;
    }
}
