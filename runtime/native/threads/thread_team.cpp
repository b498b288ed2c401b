#include "threads/thread_team.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include <sched.h>
#include <unistd.h>

#include <cassert>
#include <chrono>
#include <stdexcept>
#include <utility>

namespace optimc {

namespace {

// About 10 us: longer than threads of one step are apart when nobody else wants the cores.
constexpr int kSpins = 400;
// Longer than the gap between two steps of a busy engine.
constexpr auto kYielding = std::chrono::milliseconds(2);
// Reading the clock after every yield would cost more than it tells.
constexpr int kYieldsPerLook = 16;

void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

void WaitCounter::wait_past(std::uint32_t old) {
    for (int i = 0; i < kSpins; ++i) {
        if (value_.load(std::memory_order_acquire) != old) return;
        relax();
    }
    const auto start = std::chrono::steady_clock::now();
    do {
        for (int i = 0; i < kYieldsPerLook; ++i) {
            if (value_.load(std::memory_order_acquire) != old) return;
            sched_yield();
        }
    } while (std::chrono::steady_clock::now() - start < kYielding);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    // Returns once the value has changed, never before.
    value_.wait(old, std::memory_order_seq_cst);
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

void WaitCounter::advance() {
    value_.fetch_add(1, std::memory_order_seq_cst);
    // A thread that goes to sleep counts itself first and looks at the value last: one of the two sees the other.
    if (sleepers_.load(std::memory_order_seq_cst) > 0) value_.notify_all();
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
