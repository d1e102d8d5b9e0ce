/* What load.c can say: how each protocol greets, asks, and frames its replies.
 *
 * A parser looks at the unread bytes and returns the first reply in them. Size 0 means that the reply is not complete.
 * Parsers never copy; every reply is matched to the oldest outstanding request of its connection. */
#ifndef BENCHMARKS_PROTOCOLS_H
#define BENCHMARKS_PROTOCOLS_H

#include <arpa/inet.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { RECORD_HEADER = 20 }; /* MetaQ's text encoding of a message: length 4, checksum 4, id 8, flag 4 */

/* Stands in a put where a number belongs that was sent nowhere before: load.c replaces it by 8 digits. */
#define NUMBER "########"

/* Stands in a delayed put where the time belongs at which it is due: 13 digits. */
#define DUE "@@@@@@@@@@@@@"

enum { MOST_LEASED = 128, LEASED_ROOM = MOST_LEASED * 32 };

/* Ids of leased messages, with commas between them, until a request ends their leases. */
struct leased {
    size_t count, size;
    char ids[LEASED_ROOM];
};

/* What a request is about. A get asks for `batch` messages (MetaQ: for `block` bytes) from `position` on; a put in batches
 * brings as many. */
struct ask {
    int connection;
    const char *topic, *group;
    size_t body, block, batch;
    uint64_t position;
    struct leased leased;
};

enum verdict {
    STORED,     /* a put is acknowledged */
    READ,       /* a get brought `messages` messages; the next ones are `advance` positions further */
    LEASED,     /* a frame with a leased message, which answers no request: its id is the text */
    END_OF_LOG, /* nothing is stored at a get's position, or nothing is left to lease */
    REFUSED,    /* an error reply: text */
    UNRELATED   /* a frame that answers no request */
};

struct reply {
    size_t size;
    enum verdict verdict;
    const char *text;
    size_t text_size, header_size; /* a header before the text */
    uint64_t messages, advance;
};

struct protocol {
    const char *name;
    enum { PUT, PUT_BATCH, GET, LEASE } kind; /* each get has a position of its own */
    size_t (*greet)(char *out, size_t room, const struct ask *ask);
    size_t (*request)(char *out, size_t room, const struct ask *ask);
    struct reply (*parse)(const char *p, size_t n, const struct ask *ask);
    uint64_t (*advance)(const struct ask *ask); /* how far one full reply to a get moves the position */
    /* writes what ends the leases of a reply's messages, and says in how many requests */
    size_t (*follow)(char *out, size_t room, const struct reply *reply, struct ask *ask, size_t *requests);
    int again; /* what was leased comes again: there is always something, sooner or later */
};

static const struct reply INCOMPLETE = {.verdict = UNRELATED};

static size_t fill_body(char *out, size_t size)
{
    for (size_t i = 0; i < size; i++)
        out[i] = (char)('!' + i % 90);
    return size;
}

static long parse_number(const char **p, const char *end)
{
    long sign = 1, value = 0;
    if (*p < end && **p == '-')
        sign = -1, ++*p;
    while (*p < end && **p >= '0' && **p <= '9')
        value = value * 10 + (*(*p)++ - '0');
    while (*p < end && **p == ' ')
        ++*p;
    return sign * value;
}

/* The number in the last word of a line that ends before `end`. */
static long last_number(const char *line, const char *end)
{
    const char *at = end;
    while (at > line && at[-1] != ' ')
        at--;
    return parse_number(&at, end);
}

static struct reply refused_line(const char *p, const char *end)
{
    size_t size = (size_t)(end - p);
    return (struct reply){.size = size + 1, .verdict = REFUSED, .text = p, .text_size = size};
}

static uint64_t advance_one(const struct ask *ask)
{
    (void)ask;
    return 1;
}

/* ---- MetaQ text protocol ---- */

static size_t put_metaq(char *out, size_t room, const struct ask *ask)
{
    size_t head = (size_t)snprintf(out, room, "put %s 0 %zu 0 7\r\n", ask->topic, ask->body);
    return head + fill_body(out + head, ask->body);
}

static size_t get_metaq(char *out, size_t room, const struct ask *ask)
{
    return (size_t)snprintf(out, room, "get %s bench 0 %llu %zu 7\r\n", ask->topic, (unsigned long long)ask->position,
                            ask->block);
}

static uint64_t advance_metaq(const struct ask *ask)
{
    return ask->batch * (RECORD_HEADER + ask->body);
}

/* Counts the whole records of a `value`; the last one may be cut. All must have the body size of this run. */
static struct reply count_records(struct reply value, const struct ask *ask)
{
    while (value.advance + RECORD_HEADER <= value.text_size) {
        uint32_t length;
        memcpy(&length, value.text + value.advance, sizeof length);
        if (ntohl(length) != ask->body) {
            static const char WHY[] = "a record of another size than --body";
            return (struct reply){.size = value.size, .verdict = REFUSED, .text = WHY, .text_size = sizeof WHY - 1};
        }
        if (value.advance + RECORD_HEADER + ask->body > value.text_size)
            break;
        value.advance += RECORD_HEADER + ask->body;
        value.messages++;
    }
    return value;
}

/* `result <code> <length> <opaque>\r\n<body>` or `value <length> <opaque>\r\n<records>` */
static struct reply parse_metaq(const char *p, size_t n, const struct ask *ask)
{
    const char *end = memchr(p, '\n', n), *at = p;
    long code = 0;
    if (!end)
        return INCOMPLETE;
    if (n > 7 && !memcmp(p, "result ", 7)) {
        at = p + 7;
        code = parse_number(&at, end);
    } else if (n > 6 && !memcmp(p, "value ", 6)) {
        at = p + 6;
    } else {
        return refused_line(p, end);
    }
    long length = parse_number(&at, end);
    if (length < 0)
        return refused_line(p, end);
    struct reply reply = {.size = (size_t)(end - p) + 1 + (size_t)length, .text = end + 1, .text_size = (size_t)length};
    if (reply.size > n)
        return INCOMPLETE;
    reply.verdict = code == 0 ? READ : code == 200 ? STORED : code == 404 ? END_OF_LOG : REFUSED;
    return reply.verdict == READ ? count_records(reply, ask) : reply;
}

/* ---- Redis Streams ---- */

static size_t put_redis(char *out, size_t room, const struct ask *ask)
{
    size_t head = (size_t)snprintf(out, room, "*5\r\n$4\r\nXADD\r\n$%zu\r\n%s\r\n$1\r\n*\r\n$1\r\nd\r\n$%zu\r\n",
                                   strlen(ask->topic), ask->topic, ask->body);
    head += fill_body(out + head, ask->body);
    return head + (size_t)snprintf(out + head, room - head, "\r\n");
}

/* The first messages of the stream, again and again: the id to go on from is known only from the reply. */
static size_t get_redis(char *out, size_t room, const struct ask *ask)
{
    char many[24];
    int digits = snprintf(many, sizeof many, "%zu", ask->batch);
    return (size_t)snprintf(out, room, "*6\r\n$6\r\nXRANGE\r\n$%zu\r\n%s\r\n$1\r\n-\r\n$1\r\n+\r\n$5\r\nCOUNT\r\n$%d\r\n%s\r\n",
                            strlen(ask->topic), ask->topic, digits, many);
}

/* `$<length>\r\n<entry id>\r\n` */
static struct reply parse_xadd(const char *p, size_t n, const struct ask *ask)
{
    (void)ask;
    const char *end = memchr(p, '\n', n), *at = p + 1;
    if (!end)
        return INCOMPLETE;
    if (*p != '$')
        return refused_line(p, end);
    size_t size = (size_t)(end - p) + 1 + (size_t)parse_number(&at, end) + 2;
    return size > n ? INCOMPLETE : (struct reply){.size = size, .verdict = STORED};
}

/* An array of entries, each `*2 $id *2 $1 d $<length> body`: counted down element by element. */
static struct reply parse_xrange(const char *p, size_t n, const struct ask *ask)
{
    const char *at = p;
    (void)ask;
    for (long left = 1, first = 1, entries = 0; left > 0; left--, first = 0) {
        const char *end = memchr(at, '\n', n - (size_t)(at - p)), *digits = at + 1;
        if (!end)
            return INCOMPLETE;
        if (*at != '*' && (first || *at != '$'))
            return refused_line(p, end);
        long value = parse_number(&digits, end);
        size_t skip = *at == '$' ? (size_t)value + 2 : 0;
        left += *at == '*' ? value : 0;
        entries = first ? value : entries;
        if (entries == 0)
            return (struct reply){.size = (size_t)(end + 1 - p), .verdict = END_OF_LOG};
        if ((size_t)(end + 1 - p) + skip > n)
            return INCOMPLETE;
        at = end + 1 + skip;
        if (left == 1)
            return (struct reply){.size = (size_t)(at - p), .verdict = READ, .messages = (uint64_t)entries};
    }
    return INCOMPLETE;
}

/* ---- beanstalkd ---- */

static size_t put_beanstalkd(char *out, size_t room, const struct ask *ask)
{
    size_t head = (size_t)snprintf(out, room, "put 0 0 60 %zu\r\n", ask->body); /* into the tube `default` */
    head += fill_body(out + head, ask->body);
    return head + (size_t)snprintf(out + head, room - head, "\r\n");
}

/* It has no batches. Reading without deleting is `peek`; the jobs of a fresh server are numbered from 1. */
static size_t get_beanstalkd(char *out, size_t room, const struct ask *ask)
{
    return (size_t)snprintf(out, room, "peek %llu\r\n", (unsigned long long)ask->position + 1);
}

/* `INSERTED <id>\r\n`, `FOUND <id> <length>\r\n<body>\r\n` or `NOT_FOUND\r\n` */
static struct reply parse_beanstalkd(const char *p, size_t n, const struct ask *ask)
{
    const char *end = memchr(p, '\n', n);
    (void)ask;
    if (!end)
        return INCOMPLETE;
    size_t line = (size_t)(end - p) + 1;
    if (line > 9 && !memcmp(p, "INSERTED ", 9))
        return (struct reply){.size = line, .verdict = STORED};
    if (line > 9 && !memcmp(p, "NOT_FOUND", 9))
        return (struct reply){.size = line, .verdict = END_OF_LOG};
    if (line <= 6 || memcmp(p, "FOUND ", 6))
        return refused_line(p, end);
    size_t size = line + (size_t)last_number(p, end) + 2;
    return size > n ? INCOMPLETE : (struct reply){.size = size, .verdict = READ, .messages = 1, .advance = 1};
}

/* ---- NATS JetStream ---- */

static size_t greet_nats(char *out, size_t room, const struct ask *ask)
{
    return (size_t)snprintf(out, room,
                            "CONNECT {\"verbose\":false,\"pedantic\":false}\r\nSUB ack.%04d 1\r\nSUB pulled.%d 2\r\n",
                            ask->connection, ask->connection);
}

/* The inbox has a fixed width: the puts of all connections are equally long. */
static size_t put_nats(char *out, size_t room, const struct ask *ask)
{
    size_t head = (size_t)snprintf(out, room, "PUB %s ack.%04d %zu\r\n", ask->topic, ask->connection, ask->body);
    head += fill_body(out + head, ask->body);
    return head + (size_t)snprintf(out + head, room - head, "\r\n");
}

/* A pull of one batch from a consumer of the connection's own, which the first get makes. The position counts pulls. A
 * pull beyond the last message waits for more, so a run must end (--count) before it reads everything. */
static size_t get_nats(char *out, size_t room, const struct ask *ask)
{
    char consumer[64], config[256], pull[64];
    size_t size = 0;
    snprintf(consumer, sizeof consumer, "c%d-%d", (int)getpid(), ask->connection);
    if (ask->position == 0) {
        int bytes = snprintf(config, sizeof config,
                             "{\"stream_name\":\"%s\",\"config\":{\"name\":\"%s\",\"deliver_policy\":\"all\","
                             "\"ack_policy\":\"none\",\"mem_storage\":true}}", ask->topic, consumer);
        size = (size_t)snprintf(out, room, "PUB $JS.API.CONSUMER.CREATE.%s.%s made %d\r\n%s\r\n", ask->topic, consumer,
                                bytes, config);
    }
    int bytes = snprintf(pull, sizeof pull, "{\"batch\":%zu}", ask->batch);
    return size + (size_t)snprintf(out + size, room - size, "PUB $JS.API.CONSUMER.MSG.NEXT.%s.%s pulled.%d %d\r\n%s\r\n",
                                   ask->topic, consumer, ask->connection, bytes, pull);
}

/* One frame: `MSG <subject> <sid> [<reply to>] <length>\r\n<payload>\r\n`, or an INFO or PING line, which answers
 * nothing. PINGs stay unanswered: the server allows two of them, minutes apart, longer than a run takes. */
static struct reply nats_frame(const char *p, size_t n)
{
    const char *end = memchr(p, '\n', n);
    if (!end)
        return INCOMPLETE;
    if (!memcmp(p, "INFO", 4) || !memcmp(p, "PING", 4))
        return (struct reply){.size = (size_t)(end - p) + 1, .verdict = UNRELATED};
    if (memcmp(p, "MSG ", 4))
        return refused_line(p, end);
    size_t length = (size_t)last_number(p, end), size = (size_t)(end - p) + 1 + length + 2;
    if (size > n)
        return INCOMPLETE;
    return (struct reply){.size = size, .verdict = STORED, .text = end + 1, .text_size = length};
}

static struct reply parse_ack(const char *p, size_t n, const struct ask *ask)
{
    struct reply frame = nats_frame(p, n);
    (void)ask;
    if (frame.size && frame.verdict == STORED && memmem(frame.text, frame.text_size, "\"error\"", 7))
        frame.verdict = REFUSED;
    return frame;
}

/* A whole batch is one reply. */
static struct reply parse_pulled(const char *p, size_t n, const struct ask *ask)
{
    struct reply batch = {.verdict = READ, .advance = 1};
    while (batch.messages < ask->batch) {
        struct reply frame = nats_frame(p + batch.size, n - batch.size);
        if (frame.size == 0)
            return INCOMPLETE;
        if (frame.verdict != STORED) {
            if (batch.messages == 0 || frame.verdict == REFUSED)
                return frame;
        } else {
            batch.messages++;
        }
        batch.size += frame.size;
    }
    return batch;
}

#include "remoting.h"
#include "transactions.h"
#include "leases.h"
#include "http.h"

static const struct protocol PROTOCOLS[] = {
    {"metaq-put", PUT, NULL, put_metaq, parse_metaq, NULL},
    {"metaq-one-phase", PUT_BATCH, NULL, put_one_phase, parse_one_phase, NULL},
    {"metaq-two-phase", PUT_BATCH, NULL, put_two_phase, parse_two_phase, NULL},
    {"metaq-get", GET, NULL, get_metaq, parse_metaq, advance_metaq},
    {"remoting-send", PUT, NULL, put_remoting, parse_sent, NULL},
    {"remoting-send-keyed", PUT, NULL, put_remoting_keyed, parse_sent, NULL},
    {"remoting-batch", PUT_BATCH, NULL, put_remoting_batch, parse_sent, NULL},
    {"remoting-batch-keyed", PUT_BATCH, NULL, put_remoting_batch_keyed, parse_sent, NULL},
    {"remoting-park", PUT, NULL, put_remoting_park, parse_sent, NULL},
    {"remoting-send-once", PUT, NULL, put_remoting_once, parse_sent, NULL},
    {"remoting-pull", GET, NULL, get_remoting, parse_pull, advance_batch},
    {"remoting-pop", LEASE, NULL, pop_remoting, parse_popped},
    {"remoting-pop-ack", LEASE, NULL, pop_remoting, parse_popped, NULL, ack_each},
    {"remoting-pop-ack-batch", LEASE, NULL, pop_remoting, parse_popped, NULL, ack_all},
    {"metaq-pop", LEASE, NULL, pop_metaq, parse_leased},
    {"metaq-pop-ack", LEASE, NULL, pop_metaq, parse_leased, NULL, ack_metaq},
    {"metaq-pop-nack", LEASE, NULL, pop_metaq, parse_leased, NULL, nack_metaq, 1},
    {"metaq-push", LEASE, subscribe_metaq, NULL, parse_leased, NULL, ack_pushed},
    {"http-publish", PUT, NULL, publish_http, parse_http, NULL},
    {"redis-xadd", PUT, NULL, put_redis, parse_xadd, NULL},
    {"redis-xrange", GET, NULL, get_redis, parse_xrange, NULL},
    {"beanstalkd-put", PUT, NULL, put_beanstalkd, parse_beanstalkd, NULL},
    {"beanstalkd-peek", GET, NULL, get_beanstalkd, parse_beanstalkd, advance_one},
    {"nats-publish", PUT, greet_nats, put_nats, parse_ack, NULL},
    {"nats-pull", GET, greet_nats, get_nats, parse_pulled, advance_one},
};

#endif
