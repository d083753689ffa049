/* Optimizer updates over a flat range in one pass: AdamW moves 26 bytes per parameter, torch kernels over a hundred.
 *
 * The operations are those of the torch forms, to the bit: no contraction (-ffp-contract=off), no fast-math, correctly
 * rounded division and root (IEEE instructions, never errno or a library). This file does not depend on torch or
 * Python: functions take pointers, a length and a few numbers.
 *
 * The threads are our own and sleep between calls. OpenMP's threads spin for about 8 ms after every call (measured:
 * 11 ms of processor time for 2.8 ms of work), on cores that the main thread and the driver need. Only an environment
 * variable turns this off, and libgomp reads it when torch loads it.
 */
#include <fenv.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Fingerprint of the source, so that a library built from another source is not used (see build.py). */
#ifndef SOURCE
#define SOURCE "unknown"
#endif
const char *made_from(void) { return SOURCE; }

#define NUMBERS 9 /* at most, with the clipping factor, which comes last */

/* Compiled for several instruction sets; the loader chooses the best one that the machine has. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define BEST __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#elif defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define BEST __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define BEST
#endif

#define PIECE 65536 /* elements; 1.7 MB of traffic; whole segments (see SEGMENT) */

static inline float of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint32_t to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static inline float of_bf16(uint16_t half) { return of_bits((uint32_t)half << 16); }
static inline float of_fp32(float value) { return value; }

/* The update rules. Each computes `next`, the new master, from the master `w`, the clipped gradient `g`, the state
 * s[i], r[i] and the numbers h: see adamw.py, lion.py, sgd.py. */
#define ADAMW                                                  \
    const float g = gradient * h[8];                           \
    const float first = (s[i] * h[0]) + (g * h[2]);            \
    const float second = (r[i] * h[1]) + ((g * g) * h[3]);     \
    const float d = (sqrtf(second) * h[7]) + h[4];             \
    const float next = (w * h[5]) - ((first * h[6]) / d);      \
    s[i] = first;                                              \
    r[i] = second;

#define LION                                                   \
    const float g = gradient * h[6];                           \
    const float x = (s[i] * h[0]) + (g * h[2]);                \
    const float sign = (float)(x > 0.0f) - (float)(x < 0.0f);  \
    const float next = (w * h[4]) - (sign * h[5]);             \
    s[i] = (s[i] * h[1]) + (g * h[3]);

#define SGD                                                    \
    const float g = gradient * h[2];                           \
    const float t = g + (w * h[0]);                            \
    const float next = w - (t * h[1]);

#define SGD_MOMENTUM                                           \
    const float g = gradient * h[5];                           \
    const float t = g + (w * h[0]);                            \
    const float b = (s[i] * h[2]) + t;                         \
    const float next = w - (((t * h[3]) + (b * h[4])) * h[1]); \
    s[i] = b;

typedef struct {
    void *weight;
    int16_t *lo;
    float *s, *r; /* state */
    const void *grad;
    int64_t n;
    float h[NUMBERS];
} range;

typedef void (*step_of)(const range *, int64_t at, int64_t n);

/* One call of `run`. The last thread that releases it frees it: a helper thread may join after the call has returned,
 * and finds no piece left. */
typedef struct {
    range r;
    step_of step;
    _Atomic int64_t next, left; /* start of the next free piece; number of unfinished pieces */
    _Atomic int holders;
    pthread_mutex_t lock;
    pthread_cond_t done;
} call;

/* Helper threads sleep here between calls. The first call creates them; they end with the process. */
static struct {
    pthread_mutex_t lock;
    pthread_cond_t wake;
    call *open; /* the call that helpers may join; 0: none */
    int wanted, helpers;
} pool = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0, 0};

static void release(call *c) {
    if (atomic_fetch_sub(&c->holders, 1) > 1) return;
    pthread_mutex_destroy(&c->lock);
    pthread_cond_destroy(&c->done);
    free(c);
}

/* Each thread takes the next piece when it has finished one, so a delayed thread leaves its share to the others. */
static void work(call *c) {
    for (;;) {
        const int64_t at = atomic_fetch_add(&c->next, PIECE);
        if (at >= c->r.n) return;
        c->step(&c->r, at, c->r.n - at < PIECE ? c->r.n - at : PIECE);
        if (atomic_fetch_sub(&c->left, 1) == 1) {
            pthread_mutex_lock(&c->lock);
            pthread_cond_signal(&c->done);
            pthread_mutex_unlock(&c->lock);
        }
    }
}

static void *help(void *unused) {
    fesetenv(FE_DFL_ENV); /* a new thread inherits the environment of its creator */
    for (;;) {
        pthread_mutex_lock(&pool.lock);
        while (pool.wanted == 0) pthread_cond_wait(&pool.wake, &pool.lock);
        pool.wanted--;
        call *c = pool.open;
        atomic_fetch_add(&c->holders, 1);
        pthread_mutex_unlock(&pool.lock);
        work(c);
        release(c);
    }
    return unused;
}

/* Called with the pool's lock held. If a helper cannot be created, the other threads do its work. */
static void make_helpers(int count) {
    pthread_attr_t attributes;
    pthread_t thread;
    if (pool.helpers >= count || pthread_attr_init(&attributes) != 0) return;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, 1 << 20);
    while (pool.helpers < count && pthread_create(&thread, &attributes, help, 0) == 0) pool.helpers++;
    pthread_attr_destroy(&attributes);
}

/* A concurrent second call, from another thread, gets no helpers. */
static void open_for_helpers(call *c, int count) {
    if (count < 1) return;
    pthread_mutex_lock(&pool.lock);
    if (pool.open == 0) {
        make_helpers(count);
        pool.open = c;
        pool.wanted = count;
        pthread_cond_broadcast(&pool.wake);
    }
    pthread_mutex_unlock(&pool.lock);
}

static void close_for_helpers(call *c) {
    pthread_mutex_lock(&pool.lock);
    if (pool.open == c) {
        pool.open = 0;
        pool.wanted = 0;
    }
    pthread_mutex_unlock(&pool.lock);
}

/* A forked child has no helpers, and perhaps a lock that no thread of it will release. */
static void forget_helpers(void) {
    pthread_mutex_init(&pool.lock, 0);
    pthread_cond_init(&pool.wake, 0);
    pool.open = 0;
    pool.wanted = pool.helpers = 0;
}

__attribute__((constructor)) static void set_up(void) { pthread_atfork(0, 0, forget_helpers); }

/* Returns 0, or -1 if there is no memory for the call. */
static int run(step_of step, range r, int threads) {
    const int64_t pieces = (r.n + PIECE - 1) / PIECE;
    fenv_t before;
    call *c = malloc(sizeof *c);
    if (c == 0) return -1;
    c->r = r;
    c->step = step;
    atomic_init(&c->next, 0);
    atomic_init(&c->left, pieces);
    atomic_init(&c->holders, 1);
    pthread_mutex_init(&c->lock, 0);
    pthread_cond_init(&c->done, 0);
    open_for_helpers(c, (int)(threads < pieces ? threads : pieces) - 1);
    /* The default environment, even if a library has set denormals to zero. */
    fegetenv(&before);
    fesetenv(FE_DFL_ENV);
    work(c);
    fesetenv(&before);
    close_for_helpers(c);
    pthread_mutex_lock(&c->lock);
    while (atomic_load(&c->left) > 0) pthread_cond_wait(&c->done, &c->lock);
    pthread_mutex_unlock(&c->lock);
    release(c);
    return 0;
}

#define ENTRY(name)                                                                                                        \
    int name(void *weight, int16_t *lo, float *s, float *r, const void *grad, int64_t n, const float *h, int threads) {      \
        range it = {weight, lo, s, r, grad, n, {0}};                                                                       \
        memcpy(it.h, h, sizeof it.h);                                                                                      \
        return run(name##_at, it, threads);                                                                                \
    }

/* A split master: hi is the weight, lo the lower half (see split.py). A NaN keeps no payload. */
#define SPLIT(name, RULE, type, widen)                                                                                     \
    BEST static void name##_piece(uint16_t *restrict hi, int16_t *restrict lo, float *restrict s, float *restrict r,       \
                                  const type *restrict grad, int64_t n, const float *restrict h) {                         \
        (void)s, (void)r;                                                                                                  \
        for (int64_t i = 0; i < n; i++) {                                                                                  \
            const float gradient = widen(grad[i]);                                                                         \
            const float w = of_bits(((uint32_t)hi[i] << 16) + (uint32_t)(int32_t)lo[i]);                                   \
            RULE                                                                                                           \
            const uint32_t bits = next != next ? 0x7FC00000u : to_bits(next);                                              \
            const uint32_t high = (uint32_t)((int32_t)(bits + 0x8000u) >> 16);                                             \
            hi[i] = (uint16_t)high;                                                                                        \
            lo[i] = (int16_t)(bits - (high << 16));                                                                        \
        }                                                                                                                  \
    }                                                                                                                      \
    static void name##_at(const range *a, int64_t at, int64_t n) {                                                         \
        name##_piece((uint16_t *)a->weight + at, a->lo + at, a->s ? a->s + at : 0, a->r ? a->r + at : 0,                   \
                     (const type *)a->grad + at, n, a->h);                                                                 \
    }                                                                                                                      \
    ENTRY(name)

/* The weight is its own master. */
#define WHOLE(name, RULE, type, widen)                                                                                     \
    BEST static void name##_piece(float *restrict weight, float *restrict s, float *restrict r,                            \
                                  const type *restrict grad, int64_t n, const float *restrict h) {                         \
        (void)s, (void)r;                                                                                                  \
        for (int64_t i = 0; i < n; i++) {                                                                                  \
            const float gradient = widen(grad[i]);                                                                         \
            const float w = weight[i];                                                                                     \
            RULE                                                                                                           \
            weight[i] = next;                                                                                              \
        }                                                                                                                  \
    }                                                                                                                      \
    static void name##_at(const range *a, int64_t at, int64_t n) {                                                         \
        name##_piece((float *)a->weight + at, a->s ? a->s + at : 0, a->r ? a->r + at : 0,                                  \
                     (const type *)a->grad + at, n, a->h);                                                                 \
    }                                                                                                                      \
    ENTRY(name)

#define KERNELS(name, RULE)                                                                                                \
    SPLIT(name##_split_bf16, RULE, uint16_t, of_bf16)                                                                      \
    SPLIT(name##_split_fp32, RULE, float, of_fp32)                                                                         \
    WHOLE(name##_whole_bf16, RULE, uint16_t, of_bf16)                                                                      \
    WHOLE(name##_whole_fp32, RULE, float, of_fp32)

KERNELS(adamw, ADAMW)
KERNELS(lion, LION)
KERNELS(sgd, SGD)
KERNELS(sgd_momentum, SGD_MOMENTUM)

/* Sums of the squares of a gradient's segments, by halving (see norm.py). The rest of the last segment counts as zeros.
 * A piece consists of whole segments. */
#define SEGMENT 4096
#define HALVE(half)                                                                                                        \
    for (int i = 0; i < half; i++) x[i] += x[i + half];

#define SEGMENT_SUMS(name, type, widen)                                                                                    \
    BEST static void name##_piece(float *restrict sums, const type *restrict grad, int64_t n) {                            \
        float x[SEGMENT];                                                                                                  \
        for (; n > 0; n -= SEGMENT, grad += SEGMENT) {                                                                     \
            const int64_t filled = n < SEGMENT ? n : SEGMENT;                                                              \
            for (int64_t i = 0; i < filled; i++) x[i] = widen(grad[i]) * widen(grad[i]);                                   \
            for (int64_t i = filled; i < SEGMENT; i++) x[i] = 0.0f;                                                        \
            HALVE(2048) HALVE(1024) HALVE(512) HALVE(256) HALVE(128) HALVE(64)                                             \
            HALVE(32) HALVE(16) HALVE(8) HALVE(4) HALVE(2) HALVE(1)                                                        \
            *sums++ = x[0];                                                                                                \
        }                                                                                                                  \
    }                                                                                                                      \
    static void name##_at(const range *a, int64_t at, int64_t n) {                                                         \
        name##_piece((float *)a->weight + at / SEGMENT, (const type *)a->grad + at, n);                                    \
    }                                                                                                                      \
    ENTRY(name)

SEGMENT_SUMS(segment_sums_bf16, uint16_t, of_bf16)
SEGMENT_SUMS(segment_sums_fp32, float, of_fp32)
