/* Publishes by HTTP for load.c: POST requests of the REST API, over connections that stay open. Included by protocols.h. */
#ifndef BENCHMARKS_HTTP_H
#define BENCHMARKS_HTTP_H

#include <strings.h>

static size_t publish_http(char *out, size_t room, const struct ask *ask)
{
    static const char HEAD[] =
        "POST /api/v1/topics/%s/messages HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        "Content-Length: %zu\r\n\r\n%s";
    static const char BEFORE[] = "{\"body\":\"", AFTER[] = "\",\"tag\":\"paid\",\"keys\":[\"order-7\"]}";
    size_t length = sizeof BEFORE - 1 + ask->body + sizeof AFTER - 1;
    size_t size = (size_t)snprintf(out, room, HEAD, ask->topic, length, BEFORE);
    memset(out + size, 'x', ask->body); /* what JSON escapes nothing of */
    memcpy(out + size + ask->body, AFTER, sizeof AFTER - 1);
    return size + ask->body + sizeof AFTER - 1;
}

/* A head that says how long the body is, and the body. */
static struct reply parse_http(const char *p, size_t n, const struct ask *ask)
{
    static const char FIELD[] = "content-length:";
    const char *end = memmem(p, n, "\r\n\r\n", 4);
    (void)ask;
    if (!end)
        return INCOMPLETE;
    for (const char *at = p; (at = memchr(at, '\n', (size_t)(end - at)));) {
        if (strncasecmp(++at, FIELD, sizeof FIELD - 1))
            continue;
        const char *digits = at + sizeof FIELD - 1 + (at[sizeof FIELD - 1] == ' ');
        size_t size = (size_t)(end + 4 - p) + (size_t)parse_number(&digits, end);
        if (size > n)
            return INCOMPLETE;
        enum verdict verdict = memcmp(p, "HTTP/1.1 200 ", 13) ? REFUSED : STORED;
        return (struct reply){.size = size, .verdict = verdict, .text = p, .text_size = size};
    }
    return (struct reply){.size = n, .verdict = REFUSED, .text = p, .text_size = n};
}

#endif
