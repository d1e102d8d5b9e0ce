/* What this machine can do without a broker.
 *
 *   limits sendfile FILE
 *       Serves the bytes of FILE to text-protocol gets on a loopback port of its own, one sendfile per get; prints
 *       `ready port=N` and runs until it is ended. No topic, no index, no check: a get cannot be cheaper.
 *
 *   limits fdatasync FILE RECORD-BYTES DURATION-MS RATE
 *       Appends records to FILE, allocated beforehand, with one pwrite and one fdatasync each (RATE 0), or, RATE
 *       records a second being due, with one pwrite and fdatasync for all that came due meanwhile; a latency then runs
 *       from the moment the record was due. Prints one JSON object.
 *
 * Exit 1 with a reason when the system refuses something, 2 for wrong arguments. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "histogram.h"

enum { REQUESTS = 1 << 16, LOG_BYTES = 1 << 30, BATCH_BYTES = 1 << 20 };

struct client {
    int fd;
    size_t have;
    char in[REQUESTS];
};

static void fail(const char *what)
{
    fprintf(stderr, "limits: %s: %s\n", what, strerror(errno));
    exit(1);
}

/* Answers one `get topic group partition position maxsize opaque`. Sockets block: the only client reads all it asked
 * for, so a full socket buffer empties. Returns 0 when the client is gone. */
static int answer(int to, int file, off_t file_size, const char *line)
{
    unsigned long long position, block;
    char head[64];
    if (sscanf(line, "get %*s %*s %*s %llu %llu", &position, &block) != 2)
        return 0;
    if (position >= (unsigned long long)file_size)
        return send(to, "result 404 3 7\r\nend", 19, MSG_NOSIGNAL) == 19;
    if (block > (unsigned long long)file_size - position)
        block = (unsigned long long)file_size - position;
    int size = snprintf(head, sizeof head, "value %llu 7\r\n", block);
    if (send(to, head, (size_t)size, MSG_NOSIGNAL | MSG_MORE) != size)
        return 0;
    for (off_t at = (off_t)position; block;) {
        ssize_t sent = sendfile(to, file, &at, block);
        if (sent <= 0)
            return 0;
        block -= (unsigned long long)sent;
    }
    return 1;
}

static int serve(struct client *client, int file, off_t file_size)
{
    ssize_t got = recv(client->fd, client->in + client->have, sizeof client->in - client->have, 0);
    if (got <= 0)
        return 0;
    client->have += (size_t)got;
    char *at = client->in, *end;
    while ((end = memchr(at, '\n', client->have - (size_t)(at - client->in)))) {
        *end = 0;
        if (!answer(client->fd, file, file_size, at))
            return 0;
        at = end + 1;
    }
    client->have -= (size_t)(at - client->in);
    memmove(client->in, at, client->have);
    return client->have < sizeof client->in;
}

static int listen_on_loopback(void)
{
    struct sockaddr_in address = {AF_INET, 0, {htonl(INADDR_LOOPBACK)}, {0}};
    socklen_t size = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (listener < 0 || bind(listener, (struct sockaddr *)&address, size) || listen(listener, 1024) ||
        getsockname(listener, (struct sockaddr *)&address, &size))
        fail("listen");
    printf("ready port=%d\n", ntohs(address.sin_port));
    fflush(stdout);
    return listener;
}

static _Noreturn void sendfile_server(const char *path)
{
    struct stat status;
    int one = 1, file = open(path, O_RDONLY | O_CLOEXEC), poller = epoll_create1(EPOLL_CLOEXEC);
    if (file < 0 || fstat(file, &status))
        fail(path);
    int listener = listen_on_loopback();
    struct epoll_event event = {EPOLLIN, {.ptr = NULL}}, events[64];
    epoll_ctl(poller, EPOLL_CTL_ADD, listener, &event);
    for (;;) {
        int ready = epoll_wait(poller, events, 64, -1);
        for (int i = 0; i < ready; i++) {
            struct client *client = events[i].data.ptr;
            if (client && !serve(client, file, status.st_size)) {
                close(client->fd);
                free(client);
            } else if (!client) {
                client = calloc(1, sizeof *client);
                if (!client || (client->fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC)) < 0)
                    fail("accept");
                setsockopt(client->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
                event.data.ptr = client;
                epoll_ctl(poller, EPOLL_CTL_ADD, client->fd, &event);
            }
        }
    }
}

static void wait_until(uint64_t ns)
{
    struct timespec due = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &due, NULL) == EINTR)
        ;
}

static int fdatasync_loop(const char *path, size_t record, uint64_t duration_ns, uint64_t rate)
{
    static struct histogram latency;
    static char batch[BATCH_BYTES];
    int file = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (file < 0)
        fail(path);
    if ((errno = posix_fallocate(file, 0, LOG_BYTES)) || fsync(file))
        fail("allocating the file");
    memset(batch, 'x', sizeof batch);
    uint64_t start = now_ns(), end = start + duration_ns, now = start, records = 0, syncs = 0;
    off_t at = 0;
    while (now < end) {
        uint64_t due = 1, first_due = now;
        if (rate) {
            first_due = start + records * 1000000000u / rate;
            if (first_due > now) {
                wait_until(first_due);
                now = now_ns();
            }
            due = (now - start) * rate / 1000000000u - records + 1;
        }
        size_t bytes = due * record;
        if (bytes > sizeof batch || at + (off_t)bytes > LOG_BYTES) {
            errno = EFBIG;
            fail("the disk is too slow for the rate, or the duration too long");
        }
        if (pwrite(file, batch, bytes, at) != (ssize_t)bytes || fdatasync(file))
            fail("pwrite and fdatasync");
        at += (off_t)bytes;
        syncs++;
        now = now_ns();
        for (uint64_t i = 0; i < due; i++)
            histogram_record(&latency, now - (rate ? start + (records + i) * 1000000000u / rate : first_due));
        records += due;
    }
    printf("{\"record_bytes\": %zu, \"rate_wanted\": %llu, \"seconds\": %.6f, \"messages\": %llu, \"syncs\": %llu, "
           "\"messages_per_second\": %.1f, ", record, (unsigned long long)rate, (double)(now - start) / 1e9,
           (unsigned long long)records, (unsigned long long)syncs, (double)records / ((double)(now - start) / 1e9));
    histogram_print(&latency, stdout);
    printf("}\n");
    return 0;
}

int main(int argc, char **argv)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* never outlives the run that asked for it */
    prctl(PR_SET_TIMERSLACK, 1);
    if (argc == 3 && !strcmp(argv[1], "sendfile"))
        sendfile_server(argv[2]);
    if (argc == 6 && !strcmp(argv[1], "fdatasync") && atol(argv[3]) > 0 && atol(argv[4]) > 0 && atol(argv[5]) >= 0)
        return fdatasync_loop(argv[2], (size_t)atol(argv[3]), (uint64_t)atol(argv[4]) * 1000000u,
                              (uint64_t)atol(argv[5]));
    fprintf(stderr, "usage: limits sendfile FILE | limits fdatasync FILE RECORD-BYTES DURATION-MS RATE\n");
    return 2;
}
