#include <algorithm>
#include <atomic>
#include <chrono>
#include <vector>

#include "probe/probes.h"
#include "threads/thread_team.h"

namespace optimc {

namespace {

using Clock = std::chrono::steady_clock;
using Multiply = float (*)(std::int64_t rounds);

// A fraction of a millisecond: some spells pass between two interruptions.
constexpr std::int64_t kRounds = 50'000;

struct Spell {
    Multiply multiply;
    ThreadTeam& team;
    std::vector<double> seconds;
    std::atomic<float> result{0.0f};
};

void multiply_all(void* argument, int thread) {
    auto& spell = *static_cast<Spell*>(argument);
    spell.team.barrier();
    const Clock::time_point start = Clock::now();
    const float result = spell.multiply(kRounds);
    spell.seconds[static_cast<std::size_t>(thread)] = std::chrono::duration<double>(Clock::now() - start).count();
    spell.result.store(result, std::memory_order_relaxed);
}

double peak_ops(Multiply multiply, std::int64_t ops, int threads, double seconds) {
    ThreadTeam team(threads);
    Spell spell{multiply, team, std::vector<double>(static_cast<std::size_t>(threads))};
    const double done = static_cast<double>(ops) * kRounds * threads;
    const Clock::time_point end = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                                     std::chrono::duration<double>(seconds));
    double best = 0.0;
    do {
        team.run(multiply_all, &spell);
        best = std::max(best, done / *std::max_element(spell.seconds.begin(), spell.seconds.end()));
    } while (Clock::now() < end);
    return best;
}

}  // namespace

const ProbeKernels& probe_kernels_of(InstructionSet set) {
    switch (set) {
        case InstructionSet::portable: return *probe_portable();
#if defined(OPTIMC_X86_KERNELS)
        case InstructionSet::avx2: return *probe_avx2();
        case InstructionSet::avx512:
        case InstructionSet::avx512_bf16:
        case InstructionSet::amx: return *probe_avx512();
#else
        default: break;
#endif
    }
    return *probe_portable();
}

double peak_int8_ops(int threads, double seconds, InstructionSet set) {
    const ProbeKernels& kernels = probe_kernels_of(set);
    return peak_ops(kernels.multiply_int8, kernels.int8_ops, threads, seconds);
}

double peak_float_ops(int threads, double seconds, InstructionSet set) {
    const ProbeKernels& kernels = probe_kernels_of(set);
    return peak_ops(kernels.multiply_float, kernels.float_ops, threads, seconds);
}

}  // namespace optimc
