/* The remoting protocol for load.c: frames with JSON headers, written as Java clients write them.
 *
 * A frame is two big-endian lengths (of all that follows the first, and of the header), the header, the body. Replies are
 * framed by length and taken in the order of the requests; only a read from a cold disk lets one overtake another, and
 * then their latencies are exchanged. Included by protocols.h, after what it needs of it. */
#ifndef BENCHMARKS_REMOTING_H
#define BENCHMARKS_REMOTING_H

enum {
    FRAME_LENGTHS = 8,
    REMOTING_SEND = 310,
    REMOTING_SEND_BATCH = 320,
    REMOTING_NOT_FOUND = 19,
    REMOTING_OFFSET_MOVED = 21,
    STORED_RECORD_HEADER = 88, /* up to the body, of which its last 4 bytes are the length */
};

/* The properties of a message as a Java client sends them, but for the escaping. A UNIQ_KEY is 32 hexadecimal digits. */
#define UNIQUE_KEY "7F00000100071B6D35860000" NUMBER
#define KEYED_MESSAGE \
    "KEYS\\u0001order-" NUMBER "\\u0002UNIQ_KEY\\u0001" UNIQUE_KEY "\\u0002WAIT\\u0001true\\u0002TAGS\\u0001paid\\u0002"
#define PARKED_MESSAGE "TIMER_DELIVER_MS\\u0001" DUE "\\u0002"
#define ONCE_MESSAGE "DEDUPE_ID\\u0001" UNIQUE_KEY "\\u0002"
#define KEYED_ITEM "UNIQ_KEY\1" UNIQUE_KEY "\2TAGS\1paid\2"

static char *put_number(char *out, size_t number)
{
    uint32_t big_endian = htonl((uint32_t)number);
    memcpy(out, &big_endian, sizeof big_endian);
    return out + sizeof big_endian;
}

static size_t get_number(const char *p)
{
    uint32_t big_endian;
    memcpy(&big_endian, p, sizeof big_endian);
    return ntohl(big_endian);
}

/* Writes the header of a send and returns where its body goes. */
static char *send_header(char *out, size_t room, const struct ask *ask, int code, const char *properties, size_t body)
{
    static const char HEADER[] =
        "{\"code\":%d,\"extFields\":{\"a\":\"bench\",\"b\":\"%s\",\"c\":\"TBW102\",\"d\":\"4\",\"e\":\"0\",\"f\":\"0\","
        "\"g\":\"17900" NUMBER "\",\"h\":\"0\",\"i\":\"%s\",\"j\":\"0\",\"k\":\"false\",\"m\":\"%s\"},\"flag\":0,"
        "\"language\":\"JAVA\",\"opaque\":" NUMBER ",\"serializeTypeCurrentRPC\":\"JSON\",\"version\":409}";
    char *header = out + FRAME_LENGTHS;
    size_t size = (size_t)snprintf(header, room - FRAME_LENGTHS, HEADER, code, ask->topic, properties,
                                   code == REMOTING_SEND_BATCH ? "true" : "false");
    put_number(put_number(out, 4 + size + body), size);
    return header + size;
}

static size_t send_message(char *out, size_t room, const struct ask *ask, const char *properties)
{
    char *body = send_header(out, room, ask, REMOTING_SEND, properties, ask->body);
    return (size_t)(body - out) + fill_body(body, ask->body);
}

static size_t put_remoting(char *out, size_t room, const struct ask *ask)
{
    return send_message(out, room, ask, "");
}

static size_t put_remoting_keyed(char *out, size_t room, const struct ask *ask)
{
    return send_message(out, room, ask, KEYED_MESSAGE);
}

static size_t put_remoting_park(char *out, size_t room, const struct ask *ask)
{
    return send_message(out, room, ask, PARKED_MESSAGE);
}

static size_t put_remoting_once(char *out, size_t room, const struct ask *ask)
{
    return send_message(out, room, ask, ONCE_MESSAGE);
}

/* Items: size, magic 0, CRC 0, flag 0, length and body, length (16 bits) and properties. */
static size_t send_batch(char *out, size_t room, const struct ask *ask, const char *shared, const char *properties)
{
    size_t length = strlen(properties), item = 20 + ask->body + 2 + length;
    char *at = send_header(out, room, ask, REMOTING_SEND_BATCH, shared, item * ask->batch);
    for (size_t i = 0; i < ask->batch; i++) {
        const size_t head[] = {item, 0, 0, 0, ask->body};
        for (size_t k = 0; k < sizeof head / sizeof *head; k++)
            at = put_number(at, head[k]);
        at += fill_body(at, ask->body);
        *at++ = (char)(length >> 8);
        *at++ = (char)length;
        memcpy(at, properties, length);
        at += length;
    }
    return (size_t)(at - out);
}

static size_t put_remoting_batch(char *out, size_t room, const struct ask *ask)
{
    return send_batch(out, room, ask, "", "");
}

static size_t put_remoting_batch_keyed(char *out, size_t room, const struct ask *ask)
{
    return send_batch(out, room, ask, "WAIT\\u0001true\\u0002", KEYED_ITEM);
}

/* A pull that is not held: the end of the partition is answered at once. */
static size_t get_remoting(char *out, size_t room, const struct ask *ask)
{
    static const char HEADER[] =
        "{\"code\":11,\"extFields\":{\"consumerGroup\":\"bench\",\"topic\":\"%s\",\"queueId\":\"0\",\"queueOffset\":\"%llu\","
        "\"maxMsgNums\":\"%zu\",\"sysFlag\":\"4\",\"commitOffset\":\"0\",\"suspendTimeoutMillis\":\"0\",\"subscription\":\"*\","
        "\"subVersion\":\"0\",\"expressionType\":\"TAG\"},\"flag\":0,\"language\":\"JAVA\",\"opaque\":%llu,"
        "\"serializeTypeCurrentRPC\":\"JSON\",\"version\":409}";
    unsigned long long position = ask->position;
    size_t size = (size_t)snprintf(out + FRAME_LENGTHS, room - FRAME_LENGTHS, HEADER, ask->topic, position, ask->batch,
                                   position & 0x7fffffff);
    put_number(put_number(out, 4 + size), size);
    return FRAME_LENGTHS + size;
}

static uint64_t advance_batch(const struct ask *ask)
{
    return ask->batch;
}

/* One frame, with its body as text where the code is 0 and its header where it is not; `code` is -1 without a frame. */
static struct reply remoting_frame(const char *p, size_t n, long *code)
{
    static const char KEY[] = "\"code\":";
    *code = -1;
    if (n < FRAME_LENGTHS)
        return INCOMPLETE;
    size_t size = 4 + get_number(p), header = get_number(p + 4) & 0xffffff;
    const char *body = p + FRAME_LENGTHS + header;
    if (*p != 0 || size < FRAME_LENGTHS + header) /* no frame: what a broker says that turns a connection away */
        return (struct reply){.size = n, .verdict = REFUSED, .text = p, .text_size = n};
    if (size > n)
        return INCOMPLETE;
    const char *found = memmem(p + FRAME_LENGTHS, header, KEY, sizeof KEY - 1), *digits = found + sizeof KEY - 1;
    *code = found ? parse_number(&digits, body) : -1;
    if (*code == 0)
        return (struct reply){
            .size = size, .verdict = STORED, .text = body, .text_size = size - FRAME_LENGTHS - header, .header_size = header};
    return (struct reply){.size = size, .verdict = REFUSED, .text = p + FRAME_LENGTHS, .text_size = header};
}

static struct reply parse_sent(const char *p, size_t n, const struct ask *ask)
{
    long code;
    (void)ask;
    return remoting_frame(p, n, &code);
}

/* Counts the records of an answer, each of which must have the body size of this run. */
static struct reply count_stored(struct reply reply, const struct ask *ask)
{
    static const char WHY[] = "a record of another size than --body";
    reply.verdict = READ;
    for (size_t at = 0; at < reply.text_size; reply.messages++) {
        const char *record = reply.text + at;
        size_t left = reply.text_size - at;
        size_t size = left < STORED_RECORD_HEADER ? 0 : get_number(record);
        if (size < STORED_RECORD_HEADER || size > left || get_number(record + STORED_RECORD_HEADER - 4) != ask->body)
            return (struct reply){.size = reply.size, .verdict = REFUSED, .text = WHY, .text_size = sizeof WHY - 1};
        at += size;
    }
    reply.advance = reply.messages;
    return reply;
}

static struct reply parse_pull(const char *p, size_t n, const struct ask *ask)
{
    long code;
    struct reply reply = remoting_frame(p, n, &code);
    if (code >= REMOTING_NOT_FOUND && code <= REMOTING_OFFSET_MOVED)
        reply.verdict = END_OF_LOG;
    return reply.size == 0 || reply.verdict != STORED ? reply : count_stored(reply, ask);
}

#endif
