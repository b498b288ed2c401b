// A fixed set of threads that work on one thing together, step after step.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

namespace optimc {

// One counter that threads wait on: for a short while spinning, then yielding (unless others take up what is yielded),
// then asleep, so that a waiting thread costs nanoseconds while its mates are about to be done and nothing when they
// are not.
class WaitCounter {
  public:
    // Return once the value is no longer `old`. What was written before the `advance` that changed it is visible then.
    void wait_past(std::uint32_t old);
    // Add one and wake whoever waits.
    void advance();
    std::uint32_t value() const { return value_.load(std::memory_order_acquire); }

  private:
    using Clock = std::chrono::steady_clock;

    std::atomic<std::uint32_t> value_{0};
    std::atomic<std::uint32_t> sleepers_{0};
    // Until then yields are not worth it: other threads want the cores.
    std::atomic<Clock::time_point> crowded_until_{Clock::time_point::min()};
};

// The calling thread is thread 0. One caller at a time.
class ThreadTeam {
  public:
    // Throws std::system_error if the system does not start that many.
    explicit ThreadTeam(int threads);
    ~ThreadTeam();
    ThreadTeam(const ThreadTeam&) = delete;
    ThreadTeam& operator=(const ThreadTeam&) = delete;

    int size() const { return size_; }

    // Call body(argument, thread) on every thread and return when all have returned. It must not throw. Throws
    // std::invalid_argument in a child process: a fork takes none of the other threads along.
    void run(void (*body)(void*, int), void* argument);

    // Inside `run`: return once all threads have called it. What they wrote before is visible after.
    void barrier();

  private:
    void work(int thread);
    void stop();

    const int size_;
    const pid_t process_;
    std::vector<std::thread> workers_;
    void (*body_)(void*, int) = nullptr;
    void* argument_ = nullptr;
    bool stopping_ = false;

    alignas(64) WaitCounter started_;
    alignas(64) WaitCounter phase_;
    alignas(64) std::atomic<int> arrived_{0};
};

}  // namespace optimc
