package metaq.interop;

import com.alibaba.fastjson.JSONObject;
import org.apache.rocketmq.acl.common.AclClientRPCHook;
import org.apache.rocketmq.acl.common.SessionCredentials;
import org.apache.rocketmq.remoting.RPCHook;

/** Who a client of this process is. */
final class Users {
    private Users() {
    }

    /** Signs what a client sends, when the request names a user and its secret; otherwise null. */
    static RPCHook hook(JSONObject request) {
        if (!request.containsKey("user")) {
            return null;
        }
        return new AclClientRPCHook(new SessionCredentials(request.getString("user"), request.getString("secret")));
    }
}
