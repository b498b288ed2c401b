#include "isa/instruction_set.h"

#include <array>
#include <cstdlib>
#include <stdexcept>

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace optimc {

namespace {

constexpr std::array kAll = {InstructionSet::portable, InstructionSet::avx2, InstructionSet::avx512,
                             InstructionSet::avx512_bf16, InstructionSet::amx};

// Ask the system to keep tiles for this process. Linux grants no process this memory unasked.
bool may_use_tiles() {
#if defined(__x86_64__) && defined(__linux__)
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}

bool supported(InstructionSet set) {
#if defined(__x86_64__)
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512vnni");
    const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
    const bool amx = avx512 && __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-int8");
#else
    const bool avx2 = false;
    const bool avx512 = false;
    const bool bf16 = false;
    const bool amx = false;
#endif
    switch (set) {
        case InstructionSet::portable: return true;
        case InstructionSet::avx2: return avx2;
        case InstructionSet::avx512: return avx512;
        case InstructionSet::avx512_bf16: return bf16;
        case InstructionSet::amx: return amx && may_use_tiles();
    }
    return false;
}

}  // namespace

const char* name_of(InstructionSet set) {
    switch (set) {
        case InstructionSet::portable: return "portable";
        case InstructionSet::avx2: return "avx2";
        case InstructionSet::avx512: return "avx512";
        case InstructionSet::avx512_bf16: return "avx512_bf16";
        case InstructionSet::amx: return "amx";
    }
    return "?";
}

std::vector<InstructionSet> supported_instruction_sets() {
    std::vector<InstructionSet> sets;
    for (InstructionSet set : kAll) {
        if (supported(set)) sets.push_back(set);
    }
    return sets;
}

InstructionSet choose_instruction_set() {
    const char* forced = std::getenv("OPTIMC_ISA");
    return choose_instruction_set(forced == nullptr ? "" : forced);
}

InstructionSet choose_instruction_set(const std::string& name) {
    const std::vector<InstructionSet> sets = supported_instruction_sets();
    if (name.empty()) return sets.back();
    for (InstructionSet set : kAll) {
        if (name != name_of(set)) continue;
        if (supported(set)) return set;
        throw std::invalid_argument("OPTIMC_ISA=" + name + ": this machine lacks it; it can run up to " +
                                    name_of(sets.back()));
    }
    throw std::invalid_argument("OPTIMC_ISA=" + name + ": unknown; use portable, avx2, avx512, avx512_bf16 or amx");
}

}  // namespace optimc
