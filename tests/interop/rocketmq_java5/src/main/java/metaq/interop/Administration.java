package metaq.interop;

import com.alibaba.fastjson.JSONObject;
import java.io.ByteArrayOutputStream;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import org.apache.rocketmq.tools.command.MQAdminStartup;

/** RocketMQ's command line tool, in this process. */
final class Administration {
    /** Returns what the tool prints. */
    Object mqadmin(JSONObject request) {
        ByteArrayOutputStream printed = new ByteArrayOutputStream();
        PrintStream stream = new PrintStream(printed, true, StandardCharsets.UTF_8);
        PrintStream output = System.out;
        PrintStream errors = System.err;
        System.setOut(stream);
        System.setErr(stream);
        try {
            MQAdminStartup.main0(request.getJSONArray("arguments").toArray(new String[0]), null);
        } finally {
            System.setOut(output);
            System.setErr(errors);
        }
        return printed.toString(StandardCharsets.UTF_8);
    }
}
