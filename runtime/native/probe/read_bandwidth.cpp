#include <algorithm>
#include <atomic>
#include <chrono>
#include <vector>

#include "probe/probes.h"
#include "threads/thread_team.h"

namespace optimc {

namespace {

using Clock = std::chrono::steady_clock;

// Small sets are read again until starting and meeting no longer count.
constexpr std::size_t kLeastBytes = 8 << 20;
constexpr std::size_t kUnit = 512;

struct Reading {
    const ProbeKernels& kernels;
    ThreadTeam& team;
    const std::byte* data;
    std::size_t bytes_each;
    std::size_t times;
    std::vector<double> seconds;
    std::atomic<std::uint64_t> seen{0};
};

void read_part(void* argument, int thread) {
    auto& reading = *static_cast<Reading*>(argument);
    const std::byte* own = reading.data + static_cast<std::size_t>(thread) * reading.bytes_each;
    reading.team.barrier();
    const Clock::time_point start = Clock::now();
    std::uint64_t seen = 0;
    for (std::size_t i = 0; i < reading.times; ++i) seen |= reading.kernels.read(own, reading.bytes_each);
    reading.seconds[static_cast<std::size_t>(thread)] = std::chrono::duration<double>(Clock::now() - start).count();
    reading.seen.fetch_or(seen, std::memory_order_relaxed);
}

}  // namespace

double read_bandwidth(const std::byte* data, std::size_t bytes, int threads, int rounds, InstructionSet set) {
    ThreadTeam team(threads);
    const std::size_t bytes_each = bytes / static_cast<std::size_t>(threads) / kUnit * kUnit;
    const std::size_t times = std::max<std::size_t>(1, kLeastBytes / std::max<std::size_t>(1, bytes));
    Reading reading{probe_kernels_of(set), team, data, bytes_each, times,
                    std::vector<double>(static_cast<std::size_t>(threads))};
    const double read = static_cast<double>(bytes_each * times) * threads;
    double best = 0.0;
    for (int round = 0; round < rounds; ++round) {
        team.run(read_part, &reading);
        best = std::max(best, read / *std::max_element(reading.seconds.begin(), reading.seconds.end()));
    }
    return best;
}

}  // namespace optimc
