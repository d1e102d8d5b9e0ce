/* Transactions of MetaQ's text protocol: one request is a whole transaction of `batch` messages, one reply are all its
 * results. A connection uses one key again and again: the broker is done with a transaction before the next one begins. All
 * keys are equally long, as requests must be. */
#ifndef BENCHMARKS_TRANSACTIONS_H
#define BENCHMARKS_TRANSACTIONS_H

static size_t puts_in_transaction(char *out, size_t room, const struct ask *ask, const char *key)
{
    size_t size = 0;
    for (size_t i = 0; i < ask->batch; i++) {
        size += (size_t)snprintf(out + size, room - size, "put %s 0 %zu 0 %s 7\r\n", ask->topic, ask->body, key);
        size += fill_body(out + size, ask->body);
    }
    return size;
}

static size_t step(char *out, size_t room, const char *key, const char *type)
{
    return (size_t)snprintf(out, room, "transaction %s bench %s 7\r\n", key, type);
}

static size_t put_one_phase(char *out, size_t room, const struct ask *ask)
{
    char key[32];
    snprintf(key, sizeof key, "TX:bench:%04d", ask->connection);
    size_t size = step(out, room, key, "BEGIN");
    size += puts_in_transaction(out + size, room - size, ask, key);
    return size + step(out + size, room - size, key, "COMMIT_ONE_PHASE");
}

static size_t put_two_phase(char *out, size_t room, const struct ask *ask)
{
    char key[48];
    snprintf(key, sizeof key, "XID:1:%08x:01:bench", (unsigned)ask->connection);
    size_t size = step(out, room, key, "BEGIN");
    size += puts_in_transaction(out + size, room - size, ask, key);
    size += step(out + size, room - size, key, "END");
    size += step(out + size, room - size, key, "PREPARE");
    return size + step(out + size, room - size, key, "COMMIT_TWO_PHASE");
}

static struct reply parse_results(const char *p, size_t n, const struct ask *ask, size_t results)
{
    struct reply all = {.verdict = STORED};
    for (size_t i = 0; i < results; i++) {
        struct reply one = parse_metaq(p + all.size, n - all.size, ask);
        if (one.size == 0)
            return INCOMPLETE;
        if (one.verdict != STORED && all.verdict == STORED) {
            all.verdict = REFUSED;
            all.text = one.text;
            all.text_size = one.text_size;
        }
        all.size += one.size;
    }
    return all;
}

static struct reply parse_one_phase(const char *p, size_t n, const struct ask *ask)
{
    return parse_results(p, n, ask, ask->batch + 2);
}

static struct reply parse_two_phase(const char *p, size_t n, const struct ask *ask)
{
    return parse_results(p, n, ask, ask->batch + 3); /* END has no result */
}

#endif
