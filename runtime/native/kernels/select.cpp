#include "kernels/select.h"

#include <stdexcept>
#include <string>

namespace optimc {

const Kernels& kernels_of(InstructionSet set) {
    switch (set) {
        case InstructionSet::portable: return *kernels_portable();
#if defined(OPTIMC_X86_KERNELS)
        case InstructionSet::avx2: return *kernels_avx2();
        case InstructionSet::avx512: return *kernels_avx512();
#else
        default: break;
#endif
    }
    throw std::invalid_argument(std::string("no kernels for ") + name_of(set) + " in this build");
}

}  // namespace optimc
