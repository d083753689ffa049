/* Runs a function over the pieces of a range, on several threads.
 *
 * The threads are our own and sleep between calls. OpenMP's threads spin for about 8 ms after every call (measured:
 * 11 ms of processor time for 2.8 ms of work), on cores that the main thread and the driver need. Only an environment
 * variable turns this off, and libgomp reads it when torch loads it.
 */
#include <fenv.h>
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

/* Compiled for several instruction sets; the loader chooses the best one that the machine has. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define BEST __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#elif defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define BEST __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define BEST
#endif

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

/* What is done to the elements [at, at + n) of a range. */
typedef void (*step_of)(const void *range, int64_t at, int64_t n);

/* One call of `run`. The last thread that releases it frees it: a helper thread may join after the call has returned,
 * and finds no piece left. */
typedef struct {
    const void *range; /* the caller's, read while pieces are left */
    int64_t n, piece;
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
        const int64_t at = atomic_fetch_add(&c->next, c->piece);
        if (at >= c->n) return;
        c->step(c->range, at, c->n - at < c->piece ? c->n - at : c->piece);
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
static int run(step_of step, const void *range, int64_t n, int64_t piece, int threads) {
    const int64_t pieces = (n + piece - 1) / piece;
    fenv_t before;
    call *c = malloc(sizeof *c);
    if (c == 0) return -1;
    c->range = range;
    c->n = n;
    c->piece = piece;
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
