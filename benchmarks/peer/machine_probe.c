/* Two facts about the machine that change within minutes on virtual cores: how long two threads need to meet, and how
   fast they read memory together. Compiled when needed; called from machine_probe.py. */

#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

enum { MAX_THREADS = 64, LINE = 64 };

struct team {
    _Alignas(LINE) atomic_int arrived;
    _Alignas(LINE) atomic_int generation;
    int threads;
    int rounds;
    const uint64_t *words;
    size_t words_per_thread;
};

struct member {
    struct team *team;
    int number;
    int core;
    double seconds;
    uint64_t sum;
};

static double now_s(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + 1e-9 * (double)at.tv_nsec;
}

static void meet(struct team *team) {
    int generation = atomic_load_explicit(&team->generation, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&team->arrived, 1, memory_order_acq_rel) == team->threads - 1) {
        atomic_store_explicit(&team->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&team->generation, generation + 1, memory_order_release);
        return;
    }
    while (atomic_load_explicit(&team->generation, memory_order_acquire) == generation) {
    }
}

static void pin(int core) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

static void *run(void *argument) {
    struct member *member = argument;
    struct team *team = member->team;
    pin(member->core);
    meet(team);
    double start = now_s();
    if (team->words == NULL) {
        for (int round = 0; round < team->rounds; ++round) meet(team);
    } else {
        const uint64_t *words = team->words + team->words_per_thread * (size_t)member->number;
        uint64_t sums[8] = {0};
        for (size_t i = 0; i + 8 <= team->words_per_thread; i += 8)
            for (size_t lane = 0; lane < 8; ++lane) sums[lane] += words[i + lane];
        for (size_t lane = 0; lane < 8; ++lane) member->sum += sums[lane];
        meet(team);
    }
    member->seconds = now_s() - start;
    return NULL;
}

static double run_team(struct team *team, const int *cores) {
    struct member members[MAX_THREADS] = {0};
    pthread_t threads[MAX_THREADS];
    for (int i = 0; i < team->threads; ++i) {
        members[i] = (struct member){.team = team, .number = i, .core = cores[i]};
        if (pthread_create(&threads[i], NULL, run, &members[i]) != 0) return -1.0;
    }
    double seconds = 0.0;
    volatile uint64_t sum = 0; /* keeps the reads */
    for (int i = 0; i < team->threads; ++i) {
        pthread_join(threads[i], NULL);
        sum += members[i].sum;
        if (members[i].seconds > seconds) seconds = members[i].seconds;
    }
    return seconds;
}

/* Seconds that `threads` pinned threads need for `rounds` meetings; negative if a thread could not be started. */
double probe_barrier(int threads, const int *cores, int rounds) {
    struct team team = {.threads = threads, .rounds = rounds};
    return run_team(&team, cores);
}

/* Seconds that `threads` pinned threads need to read `bytes` at `words` once, each an equal part. */
double probe_read(int threads, const int *cores, const uint64_t *words, size_t bytes) {
    struct team team = {.threads = threads, .words = words, .words_per_thread = bytes / sizeof *words / (size_t)threads};
    return run_team(&team, cores);
}
