/* Leases for load.c: pops of both protocols, and what ends them. Included by protocols.h, after remoting.h. */
#ifndef BENCHMARKS_LEASES_H
#define BENCHMARKS_LEASES_H

enum {
    REMOTING_POP = 200050,
    REMOTING_ACK = 200051,
    REMOTING_ACK_BATCH = 200151,
    POLLING_FULL = 209,
    POLLING_TIMEOUT = 210,
    INVISIBLE_MS = 600000,
    READY = 1000, /* messages of a subscription that may be out */
    BIT_BYTES = 256,
};

/* ---- remoting: 200050, 200051, 200151 ---- */

static size_t remoting_request(char *out, size_t room, int code, const char *fields, const char *body, size_t body_size)
{
    static const char HEADER[] = "{\"code\":%d,\"extFields\":{%s},\"flag\":0,\"language\":\"JAVA\",\"opaque\":7,"
                                 "\"serializeTypeCurrentRPC\":\"JSON\",\"version\":409}";
    size_t size = (size_t)snprintf(out + FRAME_LENGTHS, room - FRAME_LENGTHS, HEADER, code, fields);
    put_number(put_number(out, 4 + size + body_size), size);
    memcpy(out + FRAME_LENGTHS + size, body, body_size);
    return FRAME_LENGTHS + size + body_size;
}

/* A pop that does not wait. */
static size_t pop_remoting(char *out, size_t room, const struct ask *ask)
{
    char fields[512];
    snprintf(fields, sizeof fields,
             "\"consumerGroup\":\"%s\",\"topic\":\"%s\",\"queueId\":\"0\",\"maxMsgNums\":\"%zu\",\"invisibleTime\":\"%d\","
             "\"pollTime\":\"0\",\"bornTime\":\"0\",\"initMode\":\"0\",\"expType\":\"TAG\",\"exp\":\"*\",\"order\":\"false\"",
             ask->group, ask->topic, ask->batch, INVISIBLE_MS);
    return remoting_request(out, room, REMOTING_POP, fields, "", 0);
}

/* An answer to an ack has no body, one to a pop has records. */
static struct reply parse_popped(const char *p, size_t n, const struct ask *ask)
{
    long code;
    struct reply reply = remoting_frame(p, n, &code);
    if (code == POLLING_FULL || code == POLLING_TIMEOUT)
        reply.verdict = END_OF_LOG;
    if (reply.size == 0 || reply.verdict != STORED || reply.text_size == 0)
        return reply;
    return count_stored(reply, ask);
}

/* What an answer to a pop says of its messages, all of the queue 0. */
struct popped {
    unsigned long long pop_ms, invisible_ms, token, start, offsets[MOST_LEASED];
    size_t count;
};

/* The number behind a name in the header that ends before `end`. */
static unsigned long long field(const char *header, const char *end, const char *name, const char **at)
{
    const char *found = memmem(header, (size_t)(end - header), name, strlen(name));
    *at = found ? found + strlen(name) : end;
    return found ? (unsigned long long)parse_number(at, end) : 0;
}

static struct popped read_popped(const struct reply *reply)
{
    const char *end = reply->text, *header = end - reply->header_size, *at;
    struct popped popped = {.pop_ms = field(header, end, "\"popTime\":\"", &at),
                            .invisible_ms = field(header, end, "\"invisibleTime\":\"", &at),
                            .token = field(header, end, "\"reviveQid\":\"", &at),
                            .start = field(header, end, "\"startOffsetInfo\":\"0 0 ", &at)};
    unsigned long long offset = field(header, end, "\"msgOffsetInfo\":\"0 0 ", &at);
    while (popped.count < reply->messages && popped.count < MOST_LEASED && at < end) {
        popped.offsets[popped.count++] = offset;
        at += at < end;
        offset = (unsigned long long)parse_number(&at, end);
    }
    return popped;
}

/* A request for each message, as Java clients do. */
static size_t ack_each(char *out, size_t room, const struct reply *reply, struct ask *ask, size_t *requests)
{
    struct popped popped = read_popped(reply);
    size_t size = 0;
    for (size_t i = 0; i < popped.count; i++) {
        char fields[768];
        snprintf(fields, sizeof fields,
                 "\"consumerGroup\":\"%s\",\"topic\":\"%s\",\"queueId\":\"0\",\"offset\":\"%llu\","
                 "\"extraInfo\":\"%llu %llu %llu %llu 0 metaq 0 %llu\"",
                 ask->group, ask->topic, popped.offsets[i], popped.start, popped.pop_ms, popped.invisible_ms, popped.token,
                 popped.offsets[i]);
        size += remoting_request(out + size, room - size, REMOTING_ACK, fields, "", 0);
        ++*requests;
    }
    return size;
}

static size_t base64(char *out, const unsigned char *bytes, size_t count)
{
    static const char DIGITS[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    char *at = out;
    for (size_t i = 0; i < count; i += 3) { /* a multiple of 3 */
        unsigned long three = (unsigned long)bytes[i] << 16 | (unsigned long)bytes[i + 1] << 8 | bytes[i + 2];
        for (int shift = 18; shift >= 0; shift -= 6)
            *at++ = DIGITS[three >> shift & 63];
    }
    return (size_t)(at - out);
}

/* One request for all messages of a pop. */
static size_t ack_all(char *out, size_t room, const struct reply *reply, struct ask *ask, size_t *requests)
{
    struct popped popped = read_popped(reply);
    unsigned char bits[3 * BIT_BYTES] = {0};
    char digits[4 * BIT_BYTES + 1], body[4 * BIT_BYTES + 512];
    size_t used = 1;
    for (size_t i = 0; i < popped.count; i++) {
        unsigned long long bit = popped.offsets[i] - popped.start;
        if (bit / 8 >= sizeof bits)
            return 0;
        bits[bit / 8] |= (unsigned char)(1 << bit % 8);
        used = bit / 8 + 1 > used ? bit / 8 + 1 : used;
    }
    digits[base64(digits, bits, (used + 2) / 3 * 3)] = 0;
    int size = snprintf(body, sizeof body,
                        "{\"brokerName\":\"metaq\",\"acks\":[{\"c\":\"%s\",\"t\":\"%s\",\"r\":\"0\",\"so\":%llu,\"q\":0,"
                        "\"rq\":%llu,\"pt\":%llu,\"it\":%llu,\"b\":\"%s\"}]}",
                        ask->group, ask->topic, popped.start, popped.token, popped.pop_ms, popped.invisible_ms, digits);
    ++*requests;
    return remoting_request(out, room, REMOTING_ACK_BATCH, "\"brokerName\":\"metaq\"", body, (size_t)size);
}

/* ---- MetaQ text protocol: opaque 7 asks, 8 ends leases ---- */

static size_t pop_metaq(char *out, size_t room, const struct ask *ask)
{
    return (size_t)snprintf(out, room, "pop %s %s %zu invisible=%d 7\r\n", ask->topic, ask->group, ask->batch, INVISIBLE_MS);
}

static size_t subscribe_metaq(char *out, size_t room, const struct ask *ask)
{
    return (size_t)snprintf(out, room, "subscribe %s %s ready=%d invisible=%d 9\r\n", ask->topic, ask->group, READY,
                            INVISIBLE_MS);
}

/* `message <length> <opaque> <id> ...\r\n<body>`: its text is the id */
static struct reply parse_message(const char *p, size_t n, const char *end, const struct ask *ask)
{
    static const char WHY[] = "a message of another size than --body";
    const char *at = p + 8;
    long length = parse_number(&at, end);
    parse_number(&at, end);
    const char *blank = memchr(at, ' ', (size_t)(end - at));
    if (length != (long)ask->body || !blank)
        return (struct reply){.size = (size_t)(end - p) + 1, .verdict = REFUSED, .text = WHY, .text_size = sizeof WHY - 1};
    size_t size = (size_t)(end - p) + 1 + (size_t)length;
    if (size > n)
        return INCOMPLETE;
    return (struct reply){.size = size, .verdict = LEASED, .text = at, .text_size = (size_t)(blank - at), .messages = 1};
}

/* A message, or `result <code> <length> <opaque>\r\n<number>`. */
static struct reply parse_leased(const char *p, size_t n, const struct ask *ask)
{
    const char *end = memchr(p, '\n', n), *at = p + 7;
    if (!end)
        return INCOMPLETE;
    if (n > 8 && !memcmp(p, "message ", 8))
        return parse_message(p, n, end, ask);
    if (n <= 7 || memcmp(p, "result ", 7))
        return refused_line(p, end);
    long code = parse_number(&at, end), length = parse_number(&at, end), opaque = parse_number(&at, end);
    if (length < 0)
        return refused_line(p, end);
    struct reply reply = {.size = (size_t)(end - p) + 1 + (size_t)length, .text = end + 1, .text_size = (size_t)length};
    if (reply.size > n)
        return INCOMPLETE;
    if (code == 200)
        reply.verdict = opaque == 7 ? READ : opaque == 9 ? UNRELATED : STORED;
    else
        reply.verdict = code == 404 && opaque == 7 ? END_OF_LOG : REFUSED;
    return reply;
}

static void collect(struct leased *leased, const struct reply *reply)
{
    if (leased->count == MOST_LEASED || leased->size + reply->text_size + 1 > sizeof leased->ids)
        return; /* cannot be: it is emptied before */
    if (leased->count++)
        leased->ids[leased->size++] = ',';
    memcpy(leased->ids + leased->size, reply->text, reply->text_size);
    leased->size += reply->text_size;
}

static size_t end_leases(char *out, size_t room, const char *command, struct ask *ask, size_t *requests)
{
    struct leased *leased = &ask->leased;
    if (leased->count == 0)
        return 0;
    size_t size = (size_t)snprintf(out, room, "%s %.*s 8\r\n", command, (int)leased->size, leased->ids);
    leased->count = leased->size = 0;
    ++*requests;
    return size;
}

/* Collects the messages of a pop until its result is there, then ends all leases at once. */
static size_t end_popped(char *out, size_t room, const char *command, const struct reply *reply, struct ask *ask, size_t *requests)
{
    if (reply->verdict != LEASED)
        return end_leases(out, room, command, ask, requests);
    collect(&ask->leased, reply);
    return 0;
}

static size_t ack_metaq(char *out, size_t room, const struct reply *reply, struct ask *ask, size_t *requests)
{
    return end_popped(out, room, "ack", reply, ask, requests);
}

static size_t nack_metaq(char *out, size_t room, const struct reply *reply, struct ask *ask, size_t *requests)
{
    return end_popped(out, room, "nack", reply, ask, requests);
}

/* Acks pushed messages, as many as --batch at a time. */
static size_t ack_pushed(char *out, size_t room, const struct reply *reply, struct ask *ask, size_t *requests)
{
    collect(&ask->leased, reply);
    return ask->leased.count < ask->batch ? 0 : end_leases(out, room, "ack", ask, requests);
}

#endif
