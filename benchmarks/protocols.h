/* What load.c can say: how each protocol greets, asks, and frames its replies.
 *
 * A parser looks at the unread bytes and returns the first reply in them. Size 0 means that the reply is not complete.
 * Parsers never copy; every reply is matched to the oldest outstanding request of its connection. */
#ifndef BENCHMARKS_PROTOCOLS_H
#define BENCHMARKS_PROTOCOLS_H

#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum verdict {
    STORED,     /* the put is acknowledged */
    RECORDS,    /* a get's records: text, text_size */
    MOVED,      /* a get's position does not exist any more; the oldest is in text */
    END_OF_LOG, /* nothing at a get's position */
    REFUSED,    /* an error reply */
    UNRELATED   /* a frame that answers no request */
};

struct reply {
    size_t size;
    enum verdict verdict;
    const char *text;
    size_t text_size;
};

struct protocol {
    const char *name;
    int reads; /* requests are gets: each carries a position */
    size_t (*greet)(char *out, size_t room, int connection);
    size_t (*put)(char *out, size_t room, int connection, const char *topic, size_t body);
    struct reply (*parse)(const char *p, size_t n);
};

static const struct reply INCOMPLETE = {0, UNRELATED, NULL, 0};

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

static struct reply refused_line(const char *p, const char *end)
{
    return (struct reply){(size_t)(end - p) + 1, REFUSED, p, (size_t)(end - p)};
}

/* `result <code> <length> <opaque>\r\n<body>` or `value <length> <opaque>\r\n<records>` */
static struct reply parse_metaq(const char *p, size_t n)
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
    size_t size = (size_t)(end - p) + 1 + (size_t)length;
    if (length < 0)
        return refused_line(p, end);
    if (size > n)
        return INCOMPLETE;
    enum verdict verdict = code == 0     ? RECORDS
                           : code == 200 ? STORED
                           : code == 301 ? MOVED
                           : code == 404 ? END_OF_LOG
                                         : REFUSED;
    return (struct reply){size, verdict, end + 1, (size_t)length};
}

static size_t put_metaq(char *out, size_t room, int connection, const char *topic, size_t body)
{
    (void)connection;
    size_t head = (size_t)snprintf(out, room, "put %s 0 %zu 0 %d\r\n", topic, body, 7);
    return head + fill_body(out + head, body);
}

/* `$<length>\r\n<entry id>\r\n` */
static struct reply parse_redis(const char *p, size_t n)
{
    const char *end = memchr(p, '\n', n), *at = p + 1;
    if (!end)
        return INCOMPLETE;
    if (*p != '$')
        return refused_line(p, end);
    long length = parse_number(&at, end);
    size_t size = (size_t)(end - p) + 1 + (size_t)length + 2;
    return size > n ? INCOMPLETE : (struct reply){size, STORED, end + 1, (size_t)length};
}

static size_t put_redis(char *out, size_t room, int connection, const char *topic, size_t body)
{
    (void)connection;
    size_t head = (size_t)snprintf(out, room, "*5\r\n$4\r\nXADD\r\n$%zu\r\n%s\r\n$1\r\n*\r\n$1\r\nd\r\n$%zu\r\n",
                                   strlen(topic), topic, body);
    head += fill_body(out + head, body);
    return head + (size_t)snprintf(out + head, room - head, "\r\n");
}

/* `INSERTED <id>\r\n` */
static struct reply parse_beanstalkd(const char *p, size_t n)
{
    const char *end = memchr(p, '\n', n);
    if (!end)
        return INCOMPLETE;
    if (n < 9 || memcmp(p, "INSERTED ", 9))
        return refused_line(p, end);
    return (struct reply){(size_t)(end - p) + 1, STORED, p, (size_t)(end - p)};
}

static size_t put_beanstalkd(char *out, size_t room, int connection, const char *topic, size_t body)
{
    (void)connection, (void)topic; /* the tube `default` */
    size_t head = (size_t)snprintf(out, room, "put 0 0 60 %zu\r\n", body);
    head += fill_body(out + head, body);
    return head + (size_t)snprintf(out + head, room - head, "\r\n");
}

/* `MSG <inbox> <sid> <length>\r\n<JSON>\r\n` answers a publish; INFO and PING lines answer nothing. PINGs stay
 * unanswered: the server that is measured must allow two of them in the time of a run. */
static struct reply parse_nats(const char *p, size_t n)
{
    const char *end = memchr(p, '\n', n), *at = end;
    if (!end)
        return INCOMPLETE;
    if (!memcmp(p, "INFO", 4) || !memcmp(p, "PING", 4))
        return (struct reply){(size_t)(end - p) + 1, UNRELATED, p, 0};
    if (memcmp(p, "MSG ", 4))
        return refused_line(p, end);
    while (at > p && at[-1] != ' ')
        at--;
    long length = parse_number(&at, end);
    size_t size = (size_t)(end - p) + 1 + (size_t)length + 2;
    if (size > n)
        return INCOMPLETE;
    enum verdict verdict = memmem(end + 1, (size_t)length, "\"error\"", 7) ? REFUSED : STORED;
    return (struct reply){size, verdict, end + 1, (size_t)length};
}

static size_t greet_nats(char *out, size_t room, int connection)
{
    return (size_t)snprintf(out, room, "CONNECT {\"verbose\":false,\"pedantic\":false}\r\nSUB ack.%d 1\r\n", connection);
}

static size_t put_nats(char *out, size_t room, int connection, const char *topic, size_t body)
{
    size_t head = (size_t)snprintf(out, room, "PUB %s ack.%d %zu\r\n", topic, connection, body);
    head += fill_body(out + head, body);
    return head + (size_t)snprintf(out + head, room - head, "\r\n");
}

static const struct protocol PROTOCOLS[] = {
    {"metaq-put", 0, NULL, put_metaq, parse_metaq},
    {"metaq-get", 1, NULL, NULL, parse_metaq},
    {"redis-xadd", 0, NULL, put_redis, parse_redis},
    {"beanstalkd-put", 0, NULL, put_beanstalkd, parse_beanstalkd},
    {"nats-publish", 0, greet_nats, put_nats, parse_nats},
};

#endif
