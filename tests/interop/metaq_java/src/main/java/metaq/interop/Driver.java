package metaq.interop;

import static metaq.interop.Requests.message;
import static metaq.interop.Requests.number;
import static metaq.interop.Requests.text;

import com.taobao.metamorphosis.Message;
import com.taobao.metamorphosis.client.producer.SendResult;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Base64;
import java.util.HashMap;
import java.util.List;
import java.util.Map;

/**
 * Runs the MetaQ client on request: {@code Driver SERVER_URL HOME LIFETIME_SECONDS}.
 *
 * <p>It answers {@link Requests}, and ends with its input.
 */
public final class Driver {
    private final DirectSession session;

    private Driver(DirectSession session) {
        this.session = session;
    }

    public static void main(String[] arguments) {
        Requests.endAfter(Integer.parseInt(arguments[2]));
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
        Driver driver = new Driver(new DirectSession(serverUrl, home));
        Requests.serve(driver::run);
        driver.session.close();
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

    private interface Action<E extends Exception> {
        void run() throws E;
    }

    private static <E extends Exception> Object done(Action<E> action) throws E {
        action.run();
        return null;
    }
}
