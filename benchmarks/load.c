/* Load generator for message brokers on loopback: one thread, epoll, the same loop for every protocol, so that the
 * cost of the client is the same whatever is measured.
 *
 * Closed loop (the default): every connection keeps --in-flight requests outstanding; a latency runs from handing the
 * request to the kernel's queue to the reply. Open loop (--rate): request k is due at start + k / rate, whatever the
 * replies do, and its latency runs from that moment, so a stall of the server is charged to every request that was due
 * in it (no coordinated omission).
 *
 * Puts are sent straight out of a prepared buffer that holds the request many times; where it has numbers of its own,
 * they are renewed each time that the buffer has been sent. Gets walk what is stored, --batch messages at a time (by
 * default as many whole ones as fit into --block in MetaQ's encoding), and start over at its end. With more than one in
 * flight the next position is needed before the reply is there, so all messages have --body bytes.
 *
 * Leases depend on what came: a pop asks for --batch messages, and what ends their leases is sent when they are there. The next
 * pop of a connection follows when all that is answered. A pushed connection asks for nothing: it acks as many as --batch at a
 * time. Both end before --duration-ms when there is nothing left to lease. Their rates count the messages that were leased.
 *
 * A delayed put is due --delay-ms after it was sent, or at --due-ms (Unix time), and at random within --spread-ms of that.
 *
 * Prints one JSON object; exit 0 = measured, 1 = some replies were errors, 2 = wrong options, 3 = the run broke off. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "histogram.h"
#include "protocols.h"

enum {
    GET_BYTES_MAX = 768,
    PATTERN_MIN = 1 << 20,
    REQUEST_ROOM = 1024,
    FOLLOW_ROOM = 1 << 16, /* what ends the leases of one pop */
    MOST_FOLLOWING = 1024,
    NUMBER_DIGITS = sizeof NUMBER - 1,
    DUE_DIGITS = sizeof DUE - 1,
    LEAST_NUMBER = 10000000, /* JSON allows no leading zeros */
    STALL_MS = 15000,
    MAX_LAG = 1 << 16, /* open loop: requests one connection may be behind its schedule */
    EXIT_BROKE_OFF = 3
};

struct connection {
    int fd, wants_write;
    char *in;
    size_t have;       /* unparsed bytes in `in` */
    char *lines;       /* puts: the request, repeated; others: what is not sent yet */
    size_t phase;      /* sent bytes of `lines`; puts of equal requests: of the current one */
    size_t unsent;     /* admitted, not yet taken by the kernel */
    struct ask ask;
    struct asked *asked;
    uint64_t head, tail; /* requests admitted and answered */
};

struct asked {
    uint64_t since, position;
};

static struct {
    const struct protocol *protocol;
    const char *topic, *group;
    int port;
    long connections, in_flight, body, block, batch, count, rate, first, delay_ms, due_ms, spread_ms;
    double seconds, warmup;
} opt = {.topic = "bench", .group = "bench", .connections = 1, .in_flight = 1, .body = 128, .block = 65536, .seconds = 2};

static int poller;
static struct connection *connections;
static size_t request_size, pattern_size, in_size, asked_mask;
static size_t *numbers, number_count; /* where the numbers of a put are */
static size_t due_at;                 /* where the time of a delayed put is; 0 without one */
static int exhausted;                 /* there is nothing left to lease */
static uint64_t numbers_used;
static uint64_t admitted, answered, messages_read; /* since the start, to know when to stop */
static struct {
    uint64_t since, requests, messages, errors, wraps;
    char first_error[160];
} measured;
static struct histogram latency;

static void broke_off(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "load: ");
    vfprintf(stderr, format, arguments);
    fprintf(stderr, " (after %llu of %llu requests)\n", (unsigned long long)answered, (unsigned long long)admitted);
    va_end(arguments);
    exit(EXIT_BROKE_OFF);
}

static void *allocate(size_t size)
{
    void *memory = calloc(1, size);
    if (!memory)
        broke_off("out of memory for %zu bytes", size);
    return memory;
}

static void watch(struct connection *c, int operation)
{
    struct epoll_event event = {EPOLLIN | (c->wants_write ? EPOLLOUT : 0), {.ptr = c}};
    if (epoll_ctl(poller, operation, c->fd, &event))
        broke_off("epoll_ctl: %s", strerror(errno));
}

static int is_put(void)
{
    return opt.protocol->kind == PUT || opt.protocol->kind == PUT_BATCH;
}

/* Remembers where the numbers of the put at the start of a pattern belong. */
static void find_numbers(const char *request)
{
    const char *at = request, *end = request + request_size;
    numbers = allocate((request_size / NUMBER_DIGITS + 1) * sizeof *numbers);
    for (number_count = 0; (at = memmem(at, (size_t)(end - at), NUMBER, NUMBER_DIGITS)); at += NUMBER_DIGITS)
        numbers[number_count++] = (size_t)(at - request);
    at = memmem(request, request_size, DUE, DUE_DIGITS);
    due_at = at ? (size_t)(at - request) : 0;
}

static void write_digits(char *first, int digits, uint64_t number)
{
    for (char *digit = first + digits; digit-- > first; number /= 10)
        *digit = (char)('0' + number % 10);
}

/* When the next delayed put is due, in Unix milliseconds, which have 13 digits until the year 2286. */
static uint64_t next_due(void)
{
    static uint64_t random = 88172645463325252u;
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    random ^= random << 13, random ^= random >> 7, random ^= random << 17; /* xorshift */
    uint64_t now = (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
    return (opt.due_ms ? (uint64_t)opt.due_ms : now + (uint64_t)opt.delay_ms) + random % ((uint64_t)opt.spread_ms + 1);
}

/* Gives every put of a pattern numbers that none had before. */
static void renew_numbers(char *pattern)
{
    for (char *request = pattern; number_count && request < pattern + pattern_size; request += request_size) {
        for (size_t i = 0; i < number_count; i++) {
            uint64_t number = LEAST_NUMBER + ((uint64_t)opt.first + numbers_used++) % (9 * LEAST_NUMBER);
            write_digits(request + numbers[i], NUMBER_DIGITS, number);
        }
    }
}

/* Gives the next put of a connection, if it is delayed, a time: not earlier, as a pattern may be sent for seconds. */
static void set_due(struct connection *c)
{
    if (due_at)
        write_digits(c->lines + c->head * request_size % pattern_size + due_at, DUE_DIGITS, next_due());
}

/* Puts one more request into the connection's send queue. */
static void admit(struct connection *c, uint64_t since)
{
    struct asked *asked = &c->asked[c->head & asked_mask];
    if (c->head - c->tail > asked_mask)
        broke_off("a connection is %zu requests behind the schedule", asked_mask + 1);
    *asked = (struct asked){since, c->ask.position};
    if (is_put())
        set_due(c);
    c->head++, admitted++;
    if (is_put()) {
        c->unsent += request_size;
        return;
    }
    memmove(c->lines, c->lines + c->phase, c->unsent);
    c->phase = 0;
    c->unsent += opt.protocol->request(c->lines + c->unsent, GET_BYTES_MAX, &c->ask);
    if (opt.protocol->advance)
        c->ask.position += opt.protocol->advance(&c->ask);
}

/* Puts what ends the leases of messages that came into the connection's send queue. */
static void follow(struct connection *c, const struct reply *reply, uint64_t now)
{
    size_t requests = 0;
    if (!opt.protocol->follow)
        return;
    memmove(c->lines, c->lines + c->phase, c->unsent);
    c->phase = 0;
    c->unsent += opt.protocol->follow(c->lines + c->unsent, FOLLOW_ROOM - c->unsent, reply, &c->ask, &requests);
    for (; requests; requests--, admitted++)
        c->asked[c->head++ & asked_mask] = (struct asked){now, 0};
    if (c->head - c->tail > asked_mask)
        broke_off("more than %zu requests end leases", asked_mask);
}

static void flush(struct connection *c)
{
    int blocked = 0;
    while (c->unsent && !blocked) {
        size_t size = c->unsent;
        if (is_put() && size > pattern_size - c->phase)
            size = pattern_size - c->phase;
        ssize_t sent = send(c->fd, c->lines + c->phase, size, MSG_NOSIGNAL);
        if (sent < 0 && errno != EAGAIN)
            broke_off("send: %s", strerror(errno));
        blocked = sent < (ssize_t)size;
        if (sent > 0) {
            c->unsent -= (size_t)sent;
            c->phase += (size_t)sent;
            if (is_put() && !number_count)
                c->phase %= request_size;
            if (is_put() && c->phase == pattern_size) {
                renew_numbers(c->lines);
                c->phase = 0;
            }
        }
    }
    if (blocked != c->wants_write) {
        c->wants_write = blocked;
        watch(c, EPOLL_CTL_MOD);
    }
}

static void note_error(const char *text, size_t size)
{
    int shown = size < sizeof measured.first_error ? (int)size : (int)sizeof measured.first_error - 1;
    if (measured.errors++ == 0)
        snprintf(measured.first_error, sizeof measured.first_error, "%.*s", shown, text);
}

static void take_get(struct connection *c, const struct reply *reply, uint64_t position)
{
    if (reply->verdict != READ || reply->messages == 0)
        broke_off("a get at %llu was answered: %.*s", (unsigned long long)position,
                  reply->text_size < 200 ? (int)reply->text_size : 200, reply->text ? reply->text : "");
    measured.messages += reply->messages;
    messages_read += reply->messages;
    if (c->head == c->tail) /* nothing else in flight: go on exactly where this reply ended */
        c->ask.position = position + reply->advance;
}

static uint64_t messages_of_put(void)
{
    return opt.protocol->kind == PUT_BATCH ? (uint64_t)opt.batch : 1;
}

static void take_leased(struct connection *c, const struct reply *reply, uint64_t now)
{
    measured.messages += reply->messages;
    messages_read += reply->messages;
    follow(c, reply, now);
}

static void take(struct connection *c, const struct reply *reply, uint64_t now)
{
    if (reply->verdict == UNRELATED)
        return;
    if (reply->verdict == LEASED) { /* a frame of its own, before the reply or without one */
        take_leased(c, reply, now);
        return;
    }
    if (opt.protocol->kind == LEASE && reply->verdict == REFUSED)
        broke_off("a request for leases was answered: %.*s", reply->text_size < 200 ? (int)reply->text_size : 200, reply->text);
    if (c->head == c->tail)
        broke_off("a reply that nothing asked for: %.*s", (int)reply->text_size, reply->text ? reply->text : "");
    struct asked asked = c->asked[c->tail++ & asked_mask];
    answered++;
    if (opt.protocol->kind == GET && reply->verdict == END_OF_LOG && asked.position > 0) {
        if (c->ask.position > asked.position) { /* the first of several answers beyond the end */
            c->ask.position = 0;
            measured.wraps++;
        }
        return;
    }
    if (opt.protocol->kind == LEASE && reply->verdict == END_OF_LOG) {
        exhausted = !opt.protocol->again;
        return;
    }
    histogram_record(&latency, now - asked.since);
    measured.requests++;
    if (opt.protocol->kind == LEASE && reply->verdict == READ)
        take_leased(c, reply, now);
    else if (opt.protocol->kind == LEASE && reply->verdict == STORED)
        return;
    else if (opt.protocol->kind == GET)
        take_get(c, reply, asked.position);
    else if (reply->verdict == STORED)
        measured.messages += messages_of_put();
    else
        note_error(reply->text, reply->text_size);
}

static void receive(struct connection *c)
{
    ssize_t got = recv(c->fd, c->in + c->have, in_size - c->have, 0);
    if (got == 0)
        broke_off("the server closed a connection");
    if (got < 0 && errno != EAGAIN)
        broke_off("recv: %s", strerror(errno));
    if (got <= 0)
        return;
    c->have += (size_t)got;
    uint64_t now = now_ns();
    size_t at = 0;
    while (at < c->have) {
        struct reply reply = opt.protocol->parse(c->in + at, c->have - at, &c->ask);
        if (reply.size == 0)
            break;
        take(c, &reply, now);
        at += reply.size;
    }
    if (at == 0 && c->have == in_size)
        broke_off("a reply of more than %zu bytes", in_size);
    memmove(c->in, c->in + at, c->have - at);
    c->have -= at;
}

static void start_measuring(uint64_t now)
{
    memset(&latency, 0, sizeof latency);
    memset(&measured, 0, sizeof measured);
    measured.since = now;
}

/* Waits for the sockets, at most until `until` (0: until STALL_MS), and takes what arrived. */
static int turn(struct epoll_event *events, int room, uint64_t until)
{
    uint64_t now = now_ns(), wait = STALL_MS * 1000000ull;
    if (until)
        wait = until > now ? until - now : 0;
    struct timespec timeout = {(time_t)(wait / 1000000000u), (long)(wait % 1000000000u)};
    int ready = epoll_pwait2(poller, events, room, &timeout, NULL);
    if (ready < 0 && errno != EINTR)
        broke_off("epoll_pwait2: %s", strerror(errno));
    if (ready == 0 && !until)
        broke_off("no reply for %d ms", STALL_MS);
    for (int i = 0; i < ready; i++) {
        struct connection *c = events[i].data.ptr;
        if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR))
            receive(c);
    }
    return ready;
}

/* Has the run sent all it should? Puts stop at --count messages admitted, others at --count messages read. */
static int all_asked(void)
{
    uint64_t reached = is_put() ? admitted * messages_of_put() : messages_read;
    return exhausted || (opt.count && reached >= (uint64_t)opt.count);
}

/* Do messages come that nobody asks for? */
static int pushed(uint64_t now, uint64_t end)
{
    return !opt.protocol->request && now < end && !all_asked();
}

static void closed_loop(uint64_t start)
{
    struct epoll_event events[256];
    uint64_t warm_at = start + (uint64_t)(opt.warmup * 1e9), end = warm_at + (uint64_t)(opt.seconds * 1e9), now = start;
    int warm = opt.warmup == 0, ready = 0;
    for (long i = 0; i < opt.connections; i++) {
        for (long k = 0; opt.protocol->request && k < opt.in_flight && !all_asked(); k++)
            admit(&connections[i], now);
        flush(&connections[i]);
    }
    while (answered < admitted || pushed(now, end)) {
        ready = turn(events, 256, 0);
        now = now_ns();
        if (!warm && now >= warm_at) {
            start_measuring(now);
            warm = 1;
        }
        for (int i = 0; i < ready; i++) {
            struct connection *c = events[i].data.ptr;
            while (opt.protocol->request && now < end && c->head - c->tail < (uint64_t)opt.in_flight && !all_asked())
                admit(c, now);
            flush(c);
        }
    }
}

static void open_loop(uint64_t start)
{
    struct epoll_event events[256];
    double period = 1e9 / (double)opt.rate;
    uint64_t warm_at = start + (uint64_t)(opt.warmup * 1e9), due = start;
    uint64_t last = (uint64_t)((opt.warmup + opt.seconds) * (double)opt.rate), now = start;
    int warm = opt.warmup == 0;
    while (admitted < last || answered < admitted) {
        for (; admitted < last && due <= now; due = start + (uint64_t)((double)admitted * period))
            admit(&connections[admitted % (uint64_t)opt.connections], due);
        for (long i = 0; i < opt.connections; i++) /* what is late goes together: else a client that falls behind stays there */
            if (connections[i].unsent && !connections[i].wants_write)
                flush(&connections[i]);
        int ready = turn(events, 256, admitted < last ? due : 0);
        for (int i = 0; i < ready; i++)
            flush(events[i].data.ptr);
        now = now_ns();
        if (!warm && now >= warm_at) {
            start_measuring(now);
            warm = 1;
        }
    }
}

static void connect_one(struct connection *c, int index)
{
    struct sockaddr_in address = {AF_INET, htons((uint16_t)opt.port), {htonl(INADDR_LOOPBACK)}, {0}};
    int one = 1;
    size_t asked_room = asked_mask + 1, body = (size_t)opt.body;
    c->ask = (struct ask){index, opt.topic, opt.group, body, (size_t)opt.block, (size_t)opt.batch, 0, {0}};
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (c->fd < 0 || connect(c->fd, (struct sockaddr *)&address, sizeof address))
        broke_off("connection %d to port %d: %s", index, opt.port, strerror(errno));
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (opt.protocol->greet) {
        char greeting[512];
        size_t size = opt.protocol->greet(greeting, sizeof greeting, &c->ask);
        if (send(c->fd, greeting, size, MSG_NOSIGNAL) != (ssize_t)size)
            broke_off("greeting: %s", strerror(errno));
    }
    fcntl(c->fd, F_SETFL, O_NONBLOCK);
    c->in = allocate(in_size);
    c->asked = allocate(asked_room * sizeof *c->asked);
    if (!is_put()) {
        c->lines = allocate(opt.protocol->kind == GET ? asked_room * GET_BYTES_MAX : FOLLOW_ROOM);
        return;
    }
    size_t room = (body + REQUEST_ROOM) * messages_of_put();
    char *pattern = allocate(room + PATTERN_MIN + room);
    request_size = opt.protocol->request(pattern, room, &c->ask);
    pattern_size = request_size;
    while (pattern_size < PATTERN_MIN) {
        memcpy(pattern + pattern_size, pattern, request_size);
        pattern_size += request_size;
    }
    if (!numbers)
        find_numbers(pattern);
    renew_numbers(pattern);
    c->lines = pattern;
}

static long number_option(const char *name, const char *text, long low, long high)
{
    char *end;
    long value = strtol(text, &end, 10);
    if (*end || end == text || value < low || value > high) {
        fprintf(stderr, "load: --%s must be a number from %ld to %ld, not %s\n", name, low, high, text);
        exit(2);
    }
    return value;
}

static void read_options(int argc, char **argv)
{
    static const struct option known[] = {{"protocol", 1, 0, 'p'}, {"port", 1, 0, 'o'},      {"topic", 1, 0, 't'},
                                          {"group", 1, 0, 'g'},    {"first", 1, 0, 'f'},     {"delay-ms", 1, 0, 'y'},
                                          {"spread-ms", 1, 0, 'z'},
                                          {"due-ms", 1, 0, 'u'},
                                          {"body", 1, 0, 'b'},     {"block", 1, 0, 'k'},     {"batch", 1, 0, 'm'},
                                          {"connections", 1, 0, 'c'},
                                          {"in-flight", 1, 0, 'd'}, {"count", 1, 0, 'n'},    {"rate", 1, 0, 'r'},
                                          {"duration-ms", 1, 0, 's'}, {"warmup-ms", 1, 0, 'w'}, {0, 0, 0, 0}};
    for (int letter, at = 0; (letter = getopt_long(argc, argv, "", known, &at)) != -1;) {
        const char *name = letter == '?' ? "" : known[at].name;
        switch (letter) {
        case 'p':
            for (size_t i = 0; i < sizeof PROTOCOLS / sizeof *PROTOCOLS; i++)
                if (!strcmp(PROTOCOLS[i].name, optarg))
                    opt.protocol = &PROTOCOLS[i];
            break;
        case 'o': opt.port = (int)number_option(name, optarg, 1, 65535); break;
        case 't': opt.topic = optarg; break;
        case 'g': opt.group = optarg; break;
        case 'f': opt.first = number_option(name, optarg, 0, 89999999); break;
        case 'y': opt.delay_ms = number_option(name, optarg, 0, 34560000000); break;
        case 'u': opt.due_ms = number_option(name, optarg, 1, 9999999999999); break;
        case 'z': opt.spread_ms = number_option(name, optarg, 0, 34560000000); break;
        case 'b': opt.body = number_option(name, optarg, 0, 16 << 20); break;
        case 'k': opt.block = number_option(name, optarg, RECORD_HEADER, 64 << 20); break;
        case 'm': opt.batch = number_option(name, optarg, 1, 1024); break;
        case 'c': opt.connections = number_option(name, optarg, 1, 10000); break;
        case 'd': opt.in_flight = number_option(name, optarg, 1, MAX_LAG); break;
        case 'n': opt.count = number_option(name, optarg, 1, 1000000000); break;
        case 'r': opt.rate = number_option(name, optarg, 1, 10000000); break;
        case 's': opt.seconds = (double)number_option(name, optarg, 1, 3600000) / 1000.0; break;
        case 'w': opt.warmup = (double)number_option(name, optarg, 0, 60000) / 1000.0; break;
        default: exit(2);
        }
    }
    if (!opt.protocol || !opt.port || optind < argc || strlen(opt.topic) > 100 || strlen(opt.group) > 100) {
        fprintf(stderr, "load: one of the protocols in protocols.h (--protocol) and --port are needed; --topic and "
                        "--group have at most 100 characters\n");
        exit(2);
    }
    if (opt.protocol->kind != PUT && opt.rate) {
        fprintf(stderr, "load: --rate is for puts of one message\n");
        exit(2);
    }
    if (opt.protocol->kind == GET && opt.block < RECORD_HEADER + opt.body) {
        fprintf(stderr, "load: --block must hold one record: at least %ld bytes\n", RECORD_HEADER + opt.body);
        exit(2);
    }
    if (opt.protocol->kind == PUT_BATCH && !opt.batch) {
        fprintf(stderr, "load: --batch says how many messages a request brings\n");
        exit(2);
    }
    if (opt.protocol->kind == LEASE && (opt.in_flight != 1 || opt.batch < 1 || opt.batch > MOST_LEASED)) {
        fprintf(stderr, "load: leases have one pop in flight, for 1 to %d messages (--batch)\n", MOST_LEASED);
        exit(2);
    }
    if (!opt.batch)
        opt.batch = opt.block / (RECORD_HEADER + opt.body);
}

static void print_result(double seconds)
{
    int gets = !is_put(), batches = opt.protocol->kind != PUT;
    printf("{\"protocol\": \"%s\", \"connections\": %ld, \"in_flight\": %ld, \"body_bytes\": %ld, \"block_bytes\": %ld, "
           "\"batch\": %ld, \"rate_wanted\": %ld, \"seconds\": %.6f, \"requests\": %llu, \"messages\": %llu, \"bytes\": %llu, ",
           opt.protocol->name, opt.connections, opt.in_flight, opt.body, gets ? opt.block : 0, batches ? opt.batch : 0,
           opt.rate, seconds, (unsigned long long)measured.requests, (unsigned long long)measured.messages,
           (unsigned long long)(measured.messages * (uint64_t)opt.body));
    printf("\"messages_per_second\": %.1f, \"mb_per_second\": %.3f, ", (double)measured.messages / seconds,
           (double)measured.messages * (double)opt.body / seconds / 1e6);
    histogram_print(&latency, stdout);
    printf(", \"wraps\": %llu, \"errors\": %llu, \"first_error\": \"", (unsigned long long)measured.wraps,
           (unsigned long long)measured.errors);
    for (const char *c = measured.first_error; *c; c++)
        putchar(*c < ' ' || *c == '"' || *c == '\\' || *c > '~' ? '?' : *c);
    printf("\"}\n");
}

int main(int argc, char **argv)
{
    read_options(argc, argv);
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* never outlives the run that asked for it */
    prctl(PR_SET_TIMERSLACK, 1);      /* the open loop's wake-ups: 50 us late by default */
    poller = epoll_create1(EPOLL_CLOEXEC);
    connections = allocate((size_t)opt.connections * sizeof *connections);
    asked_mask = 1;
    while (asked_mask < (size_t)(opt.rate ? MAX_LAG : opt.protocol->kind == LEASE ? MOST_FOLLOWING : opt.in_flight))
        asked_mask *= 2;
    asked_mask--;
    /* the smallest messages come in frames several times their size */
    in_size = (!is_put() ? (size_t)opt.block * 8 : 0) + (1 << 18);
    for (long i = 0; i < opt.connections; i++) {
        connect_one(&connections[i], (int)i);
        watch(&connections[i], EPOLL_CTL_ADD);
    }
    uint64_t start = now_ns();
    start_measuring(start);
    if (opt.rate)
        open_loop(start);
    else
        closed_loop(start);
    print_result((double)(now_ns() - measured.since) / 1e9);
    return measured.errors ? 1 : 0;
}
