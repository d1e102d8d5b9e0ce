/* Latency histogram shared by load.c and limits.c.
 *
 * Values are nanoseconds. Below 128 every value has its own bucket; above, each power of two is cut into 64 equal
 * buckets, so a percentile is off by at most 1/64 (1.6 %), and recording is a shift and an increment. */
#ifndef BENCHMARKS_HISTOGRAM_H
#define BENCHMARKS_HISTOGRAM_H

#include <stdint.h>
#include <stdio.h>
#include <time.h>

enum { SUB_BITS = 6, SUB_BUCKETS = 1 << SUB_BITS, BUCKETS = (64 - SUB_BITS + 1) * SUB_BUCKETS };

struct histogram {
    uint64_t count, max;
    uint64_t bucket[BUCKETS];
};

static inline uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static inline void histogram_record(struct histogram *h, uint64_t ns)
{
    unsigned index = (unsigned)ns;
    if (ns >= 2 * SUB_BUCKETS) {
        unsigned shift = 63u - (unsigned)__builtin_clzll(ns) - SUB_BITS;
        index = shift * SUB_BUCKETS + (unsigned)(ns >> shift);
    }
    h->bucket[index]++;
    h->count++;
    if (ns > h->max)
        h->max = ns;
}

/* Upper edge, in microseconds, of the bucket that holds the given share (0..1) of all values; 0 without values. */
static inline double histogram_us(const struct histogram *h, double share)
{
    uint64_t seen = 0, wanted = (uint64_t)(share * (double)h->count + 0.5);
    if (wanted == 0)
        wanted = 1;
    for (unsigned i = 0; i < BUCKETS && h->count; i++) {
        seen += h->bucket[i];
        if (seen < wanted)
            continue;
        unsigned shift = i < 2 * SUB_BUCKETS ? 0 : i / SUB_BUCKETS - 1;
        uint64_t low = shift ? (uint64_t)(i - shift * SUB_BUCKETS) << shift : i;
        uint64_t high = low + (1ull << shift) - 1;
        return (double)(high < h->max ? high : h->max) / 1000.0;
    }
    return 0.0;
}

static inline void histogram_print(const struct histogram *h, FILE *out)
{
    fprintf(out, "\"p50_us\": %.1f, \"p99_us\": %.1f, \"p999_us\": %.1f, \"max_us\": %.1f", histogram_us(h, 0.5),
            histogram_us(h, 0.99), histogram_us(h, 0.999), (double)h->max / 1000.0);
}

#endif
