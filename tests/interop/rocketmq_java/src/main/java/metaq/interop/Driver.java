package metaq.interop;

import com.alibaba.fastjson.JSON;
import com.alibaba.fastjson.JSONObject;
import com.alibaba.fastjson.serializer.SerializerFeature;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Timer;
import java.util.TimerTask;
import org.apache.rocketmq.client.exception.MQBrokerException;
import org.apache.rocketmq.client.exception.MQClientException;

/**
 * Runs the RocketMQ client on request: {@code Driver REGISTRY LIFETIME_SECONDS}.
 *
 * <p>Each line of standard input is a JSON object with the keys {@code id}, {@code step} and that step's arguments; it
 * is answered by one line, {@code {"id": …, "returned": …}} or {@code {"id": …, "raised": [{"class": …, "message": …,
 * "code": …}, …]}} with the chain of causes. Between them come lines with the key {@code event}: what consumers and
 * streams of messages meet. Bodies are base64. It ends with its input, or with status 3 after its lifetime.
 */
public final class Driver {
    private final PrintStream lines;
    private final Producers producers;
    private final Consumers consumers;
    private final Transactions transactions;
    private final Administration administration;

    private Driver(String registry, PrintStream lines) {
        this.lines = lines;
        this.producers = new Producers(registry, this::emit);
        this.consumers = new Consumers(registry, producers, this::emit);
        this.transactions = new Transactions(registry, this::emit);
        this.administration = new Administration(registry);
    }

    public static void main(String[] arguments) throws Exception {
        PrintStream lines = new PrintStream(System.out, true, StandardCharsets.UTF_8);
        System.setOut(System.err);
        endAfter(Integer.parseInt(arguments[1]));
        Driver driver = new Driver(arguments[0], lines);
        BufferedReader requests = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = requests.readLine(); line != null; line = requests.readLine()) {
            driver.emit(driver.answer(JSON.parseObject(line)));
        }
        driver.producers.close();
        driver.consumers.close();
        driver.transactions.close();
        driver.administration.close();
        Runtime.getRuntime().halt(0);
    }

    private static void endAfter(int seconds) {
        new Timer("lifetime", true).schedule(new TimerTask() {
            @Override
            public void run() {
                Runtime.getRuntime().halt(3);
            }
        }, seconds * 1_000L);
    }

    private synchronized void emit(Map<String, Object> line) {
        lines.println(JSON.toJSONString(line, SerializerFeature.WriteMapNullValue));
    }

    private Map<String, Object> answer(JSONObject request) {
        Map<String, Object> answer = new LinkedHashMap<>();
        answer.put("id", request.getLong("id"));
        try {
            answer.put("returned", run(request));
        } catch (Exception failure) {
            answer.put("raised", chain(failure));
        }
        return answer;
    }

    static List<Map<String, Object>> chain(Throwable failure) {
        List<Map<String, Object>> chain = new ArrayList<>();
        for (Throwable cause = failure; cause != null; cause = cause.getCause()) {
            Map<String, Object> view = new LinkedHashMap<>();
            view.put("class", cause.getClass().getSimpleName());
            view.put("message", String.valueOf(cause.getMessage()));
            view.put("code", cause instanceof MQBrokerException broker ? broker.getResponseCode()
                    : cause instanceof MQClientException client ? client.getResponseCode() : null);
            chain.add(view);
        }
        return chain;
    }

    private Object run(JSONObject request) throws Exception {
        return switch (request.getString("step")) {
            case "start_producer" -> producers.start(request);
            case "send" -> producers.send(request);
            case "send_batch" -> producers.sendBatch(request);
            case "stream" -> producers.stream(request);
            case "request" -> producers.request(request);
            case "start_consumer" -> consumers.start(request);
            case "stop" -> consumers.stop(request);
            case "pull" -> consumers.pull(request);
            case "poll" -> consumers.poll(request);
            case "start_transaction_producer" -> transactions.start(request);
            case "begin_transaction" -> transactions.begin(request);
            case "decide_transaction" -> transactions.decide(request);
            case "find_transactions" -> transactions.find(request);
            case "create_topic" -> administration.createTopic(request);
            case "query_by_key" -> administration.queryByKey(request);
            case "query_by_id" -> administration.queryById(request);
            case "group_offsets" -> administration.groupOffsets(request);
            case "reset_offsets" -> administration.resetOffsets(request);
            case "mqadmin" -> administration.mqadmin(request);
            case "invoke" -> administration.invoke(request);
            default -> throw new IllegalArgumentException("no such step: " + request);
        };
    }
}
