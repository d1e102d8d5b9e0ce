package metaq.interop;

import com.taobao.metamorphosis.Message;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Base64;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Timer;
import java.util.TimerTask;
import javax.transaction.xa.XAException;
import org.codehaus.jackson.map.ObjectMapper;

/**
 * What a driver is asked to do, step by step.
 *
 * <p>Each line of standard input is a JSON object with the key {@code step} and that step's arguments; each is answered
 * by one line, {@code {"returned": …}} or {@code {"raised": [{"class": …, "message": …}, …]}} with the chain of causes
 * and, for an XAException, its error {@code code}. Payloads are base64.
 */
final class Requests {
    private static final ObjectMapper JSON = new ObjectMapper();

    private Requests() {}

    /** Does one step. */
    interface Steps {
        Object run(Map<?, ?> request) throws Exception;
    }

    /** Returns when standard input ends. What others print goes to standard error. */
    static void serve(Steps steps) throws IOException {
        PrintStream answers = new PrintStream(System.out, true, StandardCharsets.UTF_8);
        System.setOut(System.err);
        BufferedReader requests = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = requests.readLine(); line != null; line = requests.readLine()) {
            answers.println(JSON.writeValueAsString(answer(steps, JSON.readValue(line, Map.class))));
        }
    }

    /** Ends the process with status 3 after its lifetime. */
    static void endAfter(int seconds) {
        new Timer("lifetime", true).schedule(new TimerTask() {
            @Override
            public void run() {
                Runtime.getRuntime().halt(3);
            }
        }, seconds * 1_000L);
    }

    private static Map<String, Object> answer(Steps steps, Map<?, ?> request) {
        Map<String, Object> answer = new LinkedHashMap<>();
        try {
            answer.put("returned", steps.run(request));
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

    static Message message(Map<?, ?> request) {
        byte[] payload = Base64.getDecoder().decode(text(request, "payload"));
        return new Message(text(request, "topic"), payload, text(request, "attribute"));
    }

    static String text(Map<?, ?> request, String key) {
        return (String) request.get(key);
    }

    static long number(Map<?, ?> request, String key) {
        return ((Number) request.get(key)).longValue();
    }
}
