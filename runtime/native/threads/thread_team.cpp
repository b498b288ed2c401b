#include "threads/thread_team.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif
#include <sched.h>
#include <unistd.h>

#include <cassert>
#include <chrono>
#include <climits>
#include <stdexcept>
#include <utility>

namespace optimc {

namespace {

// About 10 us: longer than threads of one step are apart when nobody else wants the cores.
constexpr int kSpins = 400;
// Longer than the gap between two steps of a busy engine.
constexpr auto kYielding = std::chrono::milliseconds(2);
// A yield that comes back later than this went to a thread that uses up its turns, not to one that soon waits again.
// Each such yield costs a turn, of which threads that wait for each other make hundreds; one that sleeps gets its core
// back when it is woken.
constexpr auto kTurn = std::chrono::milliseconds(1);
// How long that thread is believed to stay.
constexpr auto kCrowded = std::chrono::milliseconds(20);

void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

#if defined(__linux__)

// std::atomic's own `wait` yields several times before it sleeps.
void sleep_while(const std::atomic<std::uint32_t>& value, std::uint32_t old) {
    while (value.load(std::memory_order_seq_cst) == old) {
        syscall(SYS_futex, &value, FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
    }
}

void wake_all(std::atomic<std::uint32_t>& value) {
    syscall(SYS_futex, &value, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

#else

void sleep_while(const std::atomic<std::uint32_t>& value, std::uint32_t old) {
    value.wait(old, std::memory_order_seq_cst);
}

void wake_all(std::atomic<std::uint32_t>& value) { value.notify_all(); }

#endif

}  // namespace

void WaitCounter::wait_past(std::uint32_t old) {
    for (int i = 0; i < kSpins; ++i) {
        if (value_.load(std::memory_order_acquire) != old) return;
        relax();
    }
    Clock::time_point now = Clock::now();
    const Clock::time_point latest = now + kYielding;
    while (now < latest && now >= crowded_until_.load(std::memory_order_relaxed)) {
        if (value_.load(std::memory_order_acquire) != old) return;
        sched_yield();
        const Clock::time_point before = std::exchange(now, Clock::now());
        if (now - before > kTurn) crowded_until_.store(now + kCrowded, std::memory_order_relaxed);
    }
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    sleep_while(value_, old);
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

void WaitCounter::advance() {
    value_.fetch_add(1, std::memory_order_seq_cst);
    // A thread that goes to sleep counts itself first and looks at the value last: one of the two sees the other.
    if (sleepers_.load(std::memory_order_seq_cst) > 0) wake_all(value_);
}

ThreadTeam::ThreadTeam(int threads) : size_(threads), process_(getpid()) {
    assert(threads >= 1);
    workers_.reserve(static_cast<std::size_t>(threads - 1));
    try {
        for (int thread = 1; thread < threads; ++thread) workers_.emplace_back([this, thread] { work(thread); });
    } catch (...) {
        stop();  // those that did start; the destructor will not run
        throw;
    }
}

ThreadTeam::~ThreadTeam() {
    if (process_ == getpid()) {
        stop();
    } else {
        // In a child process there is nothing to join, and a joinable std::thread must not be destroyed.
        new std::vector<std::thread>(std::move(workers_));
    }
}

void ThreadTeam::stop() {
    stopping_ = true;
    started_.advance();
    for (std::thread& worker : workers_) worker.join();
}

void ThreadTeam::run(void (*body)(void*, int), void* argument) {
    if (size_ > 1 && process_ != getpid()) {
        throw std::invalid_argument("the threads stayed in the process that started them; load the plan after the fork");
    }
    body_ = body;
    argument_ = argument;
    started_.advance();
    body(argument, 0);
    barrier();
}

void ThreadTeam::barrier() {
    if (size_ == 1) return;
    const std::uint32_t phase = phase_.value();
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
        arrived_.store(0, std::memory_order_relaxed);
        phase_.advance();
    } else {
        phase_.wait_past(phase);
    }
}

void ThreadTeam::work(int thread) {
    std::uint32_t seen = 0;
    while (true) {
        started_.wait_past(seen);
        ++seen;  // `run` does not return before every thread has passed its last barrier, so no start is missed
        if (stopping_) return;
        body_(argument_, thread);
        barrier();
    }
}

}  // namespace optimc
