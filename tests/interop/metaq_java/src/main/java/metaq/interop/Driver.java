package metaq.interop;

import com.taobao.metamorphosis.Message;
import com.taobao.metamorphosis.client.producer.SendResult;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Base64;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Timer;
import java.util.TimerTask;
import javax.transaction.xa.XAException;
import org.codehaus.jackson.map.ObjectMapper;

/**
 * Runs the MetaQ client on request: {@code Driver SERVER_URL HOME LIFETIME_SECONDS}.
 *
 * <p>Each line of standard input is a JSON object with the key {@code step} and that step's arguments; each is answered
 * by one line, {@code {"returned": …}} or {@code {"raised": [{"class": …, "message": …}, …]}} with the chain of causes
 * and, for an XAException, its error {@code code}. Payloads are base64. It ends with its input, or with status 3 after
 * its lifetime.
 */
public final class Driver {
    private static final ObjectMapper JSON = new ObjectMapper();

    private final DirectSession session;

    private Driver(DirectSession session) {
        this.session = session;
    }

    public static void main(String[] arguments) {
        endAfter(Integer.parseInt(arguments[2]));
        int status = 0;
        try {
            serve(arguments[0], Path.of(arguments[1]));
        } catch (Exception failure) {
            failure.printStackTrace();
            status = 1;
        }
        // An ordinary exit would wait for the client's threads and run its shutdown hook, which needs ZooKeeper.
        Runtime.getRuntime().halt(status);
    }

    private static void serve(String serverUrl, Path home) throws Exception {
        PrintStream answers = new PrintStream(System.out, true, StandardCharsets.UTF_8);
        System.setOut(System.err);
        Driver driver = new Driver(new DirectSession(serverUrl, home));
        BufferedReader requests = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = requests.readLine(); line != null; line = requests.readLine()) {
            answers.println(JSON.writeValueAsString(driver.answer(JSON.readValue(line, Map.class))));
        }
        driver.session.close();
    }

    private static void endAfter(int seconds) {
        new Timer("lifetime", true).schedule(new TimerTask() {
            @Override
            public void run() {
                Runtime.getRuntime().halt(3);
            }
        }, seconds * 1_000L);
    }

    private Map<String, Object> answer(Map<?, ?> request) {
        Map<String, Object> answer = new LinkedHashMap<>();
        try {
            answer.put("returned", run(request));
        } catch (Exception failure) {
            List<Map<String, String>> chain = new ArrayList<>();
            for (Throwable cause = failure; cause != null; cause = cause.getCause()) {
                String name = cause.getClass().getSimpleName();
                chain.add(Map.of("class", name, "message", String.valueOf(cause.getMessage())));
            }
            answer.put("raised", chain);
            if (failure instanceof XAException xa) {
                answer.put("code", xa.errorCode);
            }
        }
        return answer;
    }

    private Object run(Map<?, ?> request) throws Exception {
        String step = (String) request.get("step");
        return step.startsWith("xa_") ? branchStep(step, request) : switch (step) {
            case "put" -> put(message(request));
            case "put_pipelined" -> putPipelined((List<?>) request.get("messages"));
            case "get" -> get(request);
            case "offset" -> session.offset(text(request, "topic"), text(request, "group"),
                    (int) number(request, "partition"), number(request, "offset"));
            case "subscribe" -> done(() -> session.subscribe(text(request, "topic"), text(request, "group"),
                    number(request, "offset"), (int) number(request, "max_size")));
            case "take" -> view(session.take(text(request, "topic")));
            case "stats" -> session.stats(text(request, "item"));
            case "await_connected" -> done(session::awaitConnected);
            case "publish" -> done(() -> session.transactions().publish(
                    text(request, "topic"), (int) number(request, "partitions")));
            case "begin" -> done(() -> session.transactions().begin((int) number(request, "timeout_s")));
            case "put_in_transaction" -> putInTransaction(message(request));
            case "commit" -> done(session.transactions()::commit);
            case "rollback" -> done(session.transactions()::rollback);
            default -> throw new IllegalArgumentException("no such step: " + step);
        };
    }

    private Object branchStep(String step, Map<?, ?> request) throws Exception {
        if (step.equals("xa_put")) {
            Message message = message(request);
            return view(message, session.transactions().putInBranch(message));
        }
        return session.transactions().step(step, (int) number(request, "number"));
    }

    private Map<String, Object> putInTransaction(Message message) throws Exception {
        return view(message, session.transactions().put(message));
    }

    private Map<String, Object> put(Message message) throws Exception {
        return view(message, session.put(message));
    }

    private List<Map<String, Object>> putPipelined(List<?> requests) throws Exception {
        List<Message> messages = new ArrayList<>();
        for (Object request : requests) {
            messages.add(message((Map<?, ?>) request));
        }
        List<SendResult> results = session.putPipelined(messages);
        List<Map<String, Object>> views = new ArrayList<>();
        for (int i = 0; i < messages.size(); i++) {
            views.add(view(messages.get(i), results.get(i)));
        }
        return views;
    }

    private Map<String, Object> get(Map<?, ?> request) throws Exception {
        DirectSession.Fetched fetched = session.get(text(request, "topic"), text(request, "group"),
                (int) number(request, "partition"), number(request, "offset"), (int) number(request, "max_size"));
        return fetched == null ? null
                : Map.of("messages", fetched.messages().stream().map(Driver::view).toList(), "bytes", fetched.bytes());
    }

    private static Map<String, Object> view(Message message, SendResult sent) {
        Map<String, Object> view = new HashMap<>();
        view.put("success", sent.isSuccess());
        view.put("id", message.getId());
        view.put("partition", sent.getPartition() == null ? null : sent.getPartition().getPartition());
        view.put("offset", sent.getOffset());
        view.put("error", sent.getErrorMessage());
        return view;
    }

    private static Map<String, Object> view(Message message) {
        if (message == null) {
            return null;
        }
        Map<String, Object> view = new HashMap<>();
        view.put("id", message.getId());
        view.put("attribute", message.getAttribute());
        view.put("payload", Base64.getEncoder().encodeToString(message.getData()));
        return view;
    }

    private static Message message(Map<?, ?> request) {
        byte[] payload = Base64.getDecoder().decode(text(request, "payload"));
        return new Message(text(request, "topic"), payload, text(request, "attribute"));
    }

    private static String text(Map<?, ?> request, String key) {
        return (String) request.get(key);
    }

    private static long number(Map<?, ?> request, String key) {
        return ((Number) request.get(key)).longValue();
    }

    private interface Action<E extends Exception> {
        void run() throws E;
    }

    private static <E extends Exception> Object done(Action<E> action) throws E {
        action.run();
        return null;
    }
}
