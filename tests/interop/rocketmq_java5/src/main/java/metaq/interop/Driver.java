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
 * Runs the RocketMQ 5 client on request: {@code Driver REGISTRY LIFETIME_SECONDS}.
 *
 * <p>Lines in and out are as in the driver of the older client ({@code rocketmq_java}).
 */
public final class Driver {
    private final PrintStream lines;
    private final Producers producers;
    private final Consumers consumers;
    private final Pops pops;
    private final Administration administration = new Administration();

    private Driver(String registry, PrintStream lines) {
        this.lines = lines;
        this.producers = new Producers(registry);
        this.consumers = new Consumers(registry, producers, this::emit);
        this.pops = new Pops(registry);
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
        } catch (Exception | LinkageError failure) {
            answer.put("raised", chain(failure));
        }
        return answer;
    }

    private static List<Map<String, Object>> chain(Throwable failure) {
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
            case "send_numbers" -> producers.sendNumbers(request);
            case "recall" -> producers.recall(request);
            case "start_consumer" -> consumers.start(request);
            case "stop" -> consumers.stop(request);
            case "tally" -> consumers.tally(request);
            case "pop" -> pops.pop(request);
            case "ack" -> pops.ack(request);
            case "ack_many" -> pops.ackMany(request);
            case "change" -> pops.change(request);
            case "mqadmin" -> administration.mqadmin(request);
            default -> throw new IllegalArgumentException("no such step: " + request);
        };
    }
}
