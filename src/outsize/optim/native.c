/* AdamW over a flat range in one pass: 26 bytes of memory traffic a parameter instead of more than a hundred.
 *
 * The sequence of operations is that of adamw.py, to the bit: no contraction (-ffp-contract=off), no fast-math, correctly rounded division and
 * root (IEEE instructions; never through errno or a library). The arguments are pointers, a length and nine numbers: no torch, no Python.
 *
 * The threads are our own and sleep between calls. OpenMP's spin for about 8 ms after every call (measured: 11 ms of processor time for 2.8 ms of
 * work), on cores that the main thread and the driver need. Only an environment variable stops that, which libgomp reads when torch loads it.
 */
#include <fenv.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Fingerprint of the source and flags, so that a library of another source is not used (see build.py). */
#ifndef SOURCE
#define SOURCE "unknown"
#endif
const char *made_from(void) { return SOURCE; }

typedef struct {
    float b1, b2, o1, o2, eps, decay, step, c2, clip;
} numbers;

/* The instruction set is chosen at run time. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define BEST __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#elif defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define BEST __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define BEST
#endif

#define PIECE 65536 /* elements; 1.7 MB of traffic */

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

#define MOVE(gradient)                                   \
    const float g = (gradient) * h->clip;                \
    const float first = (m[i] * h->b1) + (g * h->o1);    \
    const float second = (v[i] * h->b2) + ((g * g) * h->o2); \
    const float d = (sqrtf(second) * h->c2) + h->eps;    \
    const float move = (first * h->step) / d;            \
    m[i] = first;                                        \
    v[i] = second;

typedef struct {
    void *weight;
    int16_t *lo;
    float *m, *v;
    const void *grad;
    int64_t n;
    numbers h;
} range;

typedef void (*step_of)(const range *, int64_t at, int64_t n);

/* One call of `run`. The last thread to release it frees it: a helper may arrive after the call has returned. */
typedef struct {
    range r;
    step_of step;
    _Atomic int64_t next, left; /* where the next free piece begins; pieces that are not done */
    _Atomic int holders;
    pthread_mutex_t lock;
    pthread_cond_t done;
} call;

/* Helper threads sleep here between calls. The first call creates them; they end with the process. */
static struct {
    pthread_mutex_t lock;
    pthread_cond_t wake;
    call *open; /* the call that wants helpers, or 0 */
    int wanted, helpers;
} pool = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0, 0};

static void let_go(call *c) {
    if (atomic_fetch_sub(&c->holders, 1) > 1) return;
    pthread_mutex_destroy(&c->lock);
    pthread_cond_destroy(&c->done);
    free(c);
}

/* Each thread takes the next piece when it has finished one, so a delayed thread does not delay the others. */
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
    fesetenv(FE_DFL_ENV); /* a new thread inherits its creator's */
    for (;;) {
        pthread_mutex_lock(&pool.lock);
        while (pool.wanted == 0) pthread_cond_wait(&pool.wake, &pool.lock);
        pool.wanted--;
        call *c = pool.open;
        atomic_fetch_add(&c->holders, 1);
        pthread_mutex_unlock(&pool.lock);
        work(c);
        let_go(c);
    }
    return unused;
}

/* Called with the pool's lock held. Failing to create a helper is no error. */
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

/* A forked child has no helpers, and may have a lock that stays held. */
static void forget_helpers(void) {
    pthread_mutex_init(&pool.lock, 0);
    pthread_cond_init(&pool.wake, 0);
    pool.open = 0;
    pool.wanted = pool.helpers = 0;
}

__attribute__((constructor)) static void set_up(void) { pthread_atfork(0, 0, forget_helpers); }

/* Returns 0, or -1 without memory for the call itself. */
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
    /* The default environment, even if the caller flushes denormals. */
    fegetenv(&before);
    fesetenv(FE_DFL_ENV);
    work(c);
    fesetenv(&before);
    close_for_helpers(c);
    pthread_mutex_lock(&c->lock);
    while (atomic_load(&c->left) > 0) pthread_cond_wait(&c->done, &c->lock);
    pthread_mutex_unlock(&c->lock);
    let_go(c);
    return 0;
}

#define ENTRY(name)                                                                                                                   \
    int name(void *weight, int16_t *lo, float *m, float *v, const void *grad, int64_t n, const numbers *h, int threads) {             \
        return run(name##_at, (range){weight, lo, m, v, grad, n, *h}, threads);                                                       \
    }

/* A split master: hi is the weight, lo its low bits (see split.py). A NaN keeps no payload. */
#define SPLIT(name, type, widen)                                                                                                      \
    BEST static void name##_piece(uint16_t *restrict hi, int16_t *restrict lo, float *restrict m, float *restrict v,                  \
                                  const type *restrict grad, int64_t n, const numbers *restrict h) {                                  \
        for (int64_t i = 0; i < n; i++) {                                                                                             \
            MOVE(widen(grad[i]))                                                                                                      \
            const float w = (of_bits(((uint32_t)hi[i] << 16) + (uint32_t)(int32_t)lo[i]) * h->decay) - move;                          \
            const uint32_t bits = w != w ? 0x7FC00000u : to_bits(w);                                                                  \
            const uint32_t high = (uint32_t)((int32_t)(bits + 0x8000u) >> 16);                                                        \
            hi[i] = (uint16_t)high;                                                                                                   \
            lo[i] = (int16_t)(bits - (high << 16));                                                                                   \
        }                                                                                                                             \
    }                                                                                                                                 \
    static void name##_at(const range *r, int64_t at, int64_t n) {                                                                      \
        name##_piece((uint16_t *)r->weight + at, r->lo + at, r->m + at, r->v + at, (const type *)r->grad + at, n, &r->h);              \
    }                                                                                                                                 \
    ENTRY(name)

/* The weight is its own master. */
#define WHOLE(name, type, widen)                                                                                                      \
    BEST static void name##_piece(float *restrict w, float *restrict m, float *restrict v, const type *restrict grad, int64_t n,      \
                                  const numbers *restrict h) {                                                                        \
        for (int64_t i = 0; i < n; i++) {                                                                                             \
            MOVE(widen(grad[i]))                                                                                                      \
            w[i] = (w[i] * h->decay) - move;                                                                                          \
        }                                                                                                                             \
    }                                                                                                                                 \
    static void name##_at(const range *r, int64_t at, int64_t n) {                                                                      \
        name##_piece((float *)r->weight + at, r->m + at, r->v + at, (const type *)r->grad + at, n, &r->h);                             \
    }                                                                                                                                 \
    ENTRY(name)

SPLIT(split_bf16, uint16_t, of_bf16)
SPLIT(split_fp32, float, of_fp32)
WHOLE(whole_bf16, uint16_t, of_bf16)
WHOLE(whole_fp32, float, of_fp32)
